"""Where this package keeps what it may make again: plans, and what its source files say."""

import os
from pathlib import Path


def folder():
    """``$TILEWRIGHT_CACHE``, else ``~/.cache/tilewright``; where there is no home, a folder that cannot be made."""
    stated = os.environ.get("TILEWRIGHT_CACHE")
    return Path(stated) if stated else Path(os.path.expanduser("~")) / ".cache" / "tilewright"
