"""Files of a checkpoint: which ones a path means, and what they are known by. Importing this does not import torch."""

import hashlib
import json
from pathlib import Path
from typing import Any

from tilewright.core import provenance
from tilewright.core.errors import ArtifactError

# What timm's repositories and folders of `save_pretrained` call them.
HUB_FILES = ("model.safetensors", "pytorch_model.bin")
# And diffusion models, in official folders and in those of diffusers.
PUBLISHED = ("diffusion_pytorch_model.safetensors", *HUB_FILES)
# How many names of each kind an error lists.
_LISTED = 5


def located(path: Path | str) -> Path | None:
    """The file of a checkpoint at `path`, a file or a folder as it was published; None where there is none.

    Of a folder it is the official file, that of diffusers, which keeps it in ``transformer``, or that of
    ``save_pretrained``; of a model in several files their index.
    """
    path = Path(path)
    if not path.is_dir():
        return path if path.exists() else None
    names = [f"{name}{index}" for name in PUBLISHED for index in (".index.json", "")]
    found = (folder / name for folder in (path, path / "transformer") for name in names)
    return next((file for file in found if file.exists()), None)


def parts(path: Path | str) -> list[Path]:
    """The files that hold a model: one, or those that an index names, which stand beside it. Raises `ArtifactError`."""
    path = Path(path)
    try:
        begin = head(path)
        # The length of safetensors' header may begin as an index does, and ends in zeros.
        if b"\0" in begin or not begin.lstrip().startswith(b"{"):
            return [path]
        named = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        found = [path.with_name(name) for name in sorted(set(named.values()))]
    except Exception as error:
        raise damaged(path, error) from error
    if missing := [part.name for part in found if not part.exists()]:
        raise ArtifactError(f"{path}: expected its parts in the same folder, missing {some(missing)}")
    return found


def digest(path: str | Path) -> str:
    """The first 12 digits of the SHA-256 of a file of weights; of an index, of its parts, too.

    Raises `OSError` and `ArtifactError`.
    """
    path = located(path) or Path(path)
    found = [provenance.sha256_file(file) for file in dict.fromkeys((path, *parts(path)))]
    return (found[0] if len(found) == 1 else hashlib.sha256("".join(found).encode()).hexdigest())[:12]


def head(path: Path | str) -> bytes:
    """The first bytes of a file: a ``{`` begins an index, and behind eight bytes the header of safetensors."""
    with Path(path).open("rb") as stream:
        return stream.read(9)


def damaged(path: Path | str, error: Any) -> ArtifactError:
    """What `path` raises, which a reader failed at."""
    return ArtifactError(f"{path}: expected a checkpoint of tensors, found a damaged file: {error}")


def some(names: list[str]) -> str:
    """Of `names` the first few, and how many there are besides."""
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more
