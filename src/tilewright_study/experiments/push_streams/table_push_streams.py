"""Key streams of stage T2 on push memories: keys, pieces and configuration words by order and tile.

The keys that blocks of each order and tile read, one after another, as a push memory streams them: how many, in how
many affine pieces at the least, and the configuration words of these. A better order reads fewer keys, and need not
need fewer pieces.
"""

from tilewright_study.tables import _read, _select

SHOWN = {
    "model": ("workload", ""),
    "reorder": ("order", ""),
    "tile": ("tile", ""),
    "keys": ("keys read", ",.0f"),
    "of_none": ("of those without an order", ".0%"),
    "pieces": ("affine pieces", ",.0f"),
    "longest": ("keys of the longest", ",.0f"),
    "words": ("configuration words", ",.0f"),
    "keys_a_word": ("keys a configuration word", ".1f"),
    "reason": ("why blank", ""),
}


def needs(config):
    """The experiment's files."""
    return _select.logs(config, "push_streams")


def table(inputs):
    """One row per workload, order and tile. of_none: keys over those of the same tile in the order `none`."""
    (found,) = _read.frames(inputs, "push_streams")
    plain = found[found["reorder"] == "none"].set_index(["model", "tile"])["keys"]
    plain = plain[~plain.index.duplicated()].rename("plain")
    found = found.join(plain, on=["model", "tile"])
    found["of_none"] = found["keys"] / found["plain"]
    found["keys_a_word"] = found["keys"] / found["words"]
    return found.drop(columns="plain")
