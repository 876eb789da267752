"""Kinds of device, a module each (stages T3 to T5).

Contract of a member module; importing it needs no torch:
    ``describe() -> dict``: JSON-able facts of the device of this process, its ``kind`` among them. Raises `DeviceError`
        without one.
    ``IDENTITY``: the facts that make two devices differ for timing, versions of packages by their names. ``MACHINE``:
        those of them that a saved plan is bound to; where others differ it runs, maybe not at the speed predicted.
    ``limits(device) -> dict``: slots, per_block, envelope, occupancy, max_tile_kinds, rounds and round_us of
        `hardware.Limits`, from the facts alone.
    ``EXECUTOR``, ``PROBE``: names of the modules that run schedules on it (``prepare``) and time shape classes
        (``measure``), see `hardware.executor` and `hardware.probe`.
    ``PACKED``: name of the module that runs packed batches on it, see `kernels.ragged_lists`.
    ``TILES``, ``SPLIT_KEYS``: what plans choose from, and the longest key range of a work item, unless told otherwise.
    ``FEWEST_ROWS``: of a tile.
"""
