"""Executors of schedules, the dense oracle and the peers they are measured against (stages T3 and T5)."""
