"""Programs on push memories: tiles, cycles, cost and words that differ, with the published numbers beside.

Programs on push memories: tiles, processing elements, registers and the cycle of the last output of each app and
memory, the published numbers beside, and how many words differ from numpy's in the model of the array and in RTL. Area
and energy are of cited parameters, and nothing that was measured.
"""

from tilewright_study.tables import _read, _select

SHOWN = {
    "app": ("app", ""),
    "memory": ("memory", ""),
    "tiles": ("tiles", ",.0f"),
    "paper_tiles": ("paper's", ",.0f"),
    "pes": ("PEs", ",.0f"),
    "registers": ("registers", ",.0f"),
    "last_cycle": ("last output, cycle", ",.0f"),
    "paper_last_cycle": ("paper's", ",.0f"),
    "occupancy": ("accesses a tile and cycle", ".2f"),
    "saved": ("tiles saved", ".0%"),
    "paper_saved": ("paper's", ".0%"),
    "words": ("words", ",.0f"),
    "area_um2": ("area (µm², cited)", ",.0f"),
    "energy_nj": ("energy (nJ, cited)", ",.1f"),
    "wrong_model": ("words that differ, model", ",.0f"),
    "wrong_rtl": ("words that differ, RTL", ",.0f"),
    "from_streams": ("tiles found from streams", ""),
    "map_s": ("mapping (s)", ".2f"),
    "reason": ("why blank", ""),
}


def needs(config):
    """The experiment's files and the published numbers."""
    files = _select.logs(config, "push")
    return [*files, _select.PAPER_PUSH] if files else []


def parts(inputs, part):
    """Rows of one part of all apps, as `experiments.push.Row` names them."""
    found, _ = _read.frames(inputs, "push", "paper_push")
    return found[found["part"] == part].reset_index(drop=True)


def table(inputs):
    """One row per app and memory. from_streams: of the tiles whose streams are examples of what was meant, those that
    were configured from these alone."""
    _, paper = _read.frames(inputs, "push", "paper_push")
    found = parts(inputs, "whole").merge(paper, on=["app", "memory"], how="left")
    found["from_streams"] = [
        f"{agreed:.0f} of {asked:.0f}" for agreed, asked in zip(found["agreed"], found["asked"], strict=True)
    ]
    return found
