"""Scheduled sparse attention: a pattern, its order and blocks, a schedule, and what runs it on each kind of device."""
