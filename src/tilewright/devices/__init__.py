"""Kinds of device, a module each (stages T3 to T5).

Contract of a member module; importing it needs no torch:
    ``describe() -> dict``: JSON-able facts of the device of this process, its ``kind`` among them. Raises `DeviceError`
        without one.
    ``IDENTITY``: the facts that make two devices differ for timing.
    ``limits(device) -> dict``: slots, per_block, envelope, occupancy and round_us of `hardware.Limits`, from the facts
        alone.
"""
