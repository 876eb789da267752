"""Where Triton's kernels are tested; the interpreter has to be asked for before a kernel is imported."""

import os
from pathlib import Path

TRITON_DEVICE = "cuda" if Path("/dev/nvidiactl").exists() else "cpu"
if TRITON_DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"
