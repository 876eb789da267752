"""What is claimed of the experiment `push`: the measures of its claims, see `tables.claims`."""

from tilewright_study.experiments.push import table_push
from tilewright_study.tables._values import by_name, cases


def _push(column):
    def values(frame, _):
        """A column over the published one, for each app and memory with one."""
        rows = frame.dropna(subset=f"paper_{column}")
        return by_name(rows.assign(share=rows[column] / rows[f"paper_{column}"]), "share", "app", "memory")

    return values


def _push_exact(frame, _):
    """Share of apps and memories whose every word is numpy's, in model and RTL, in percent."""
    exact = (frame["wrong_model"] == 0) & (frame["wrong_rtl"] == 0)
    first = frame[~exact].head(1)
    where = f"{first['app'].iloc[0]} {first['memory'].iloc[0]}" if len(first) else f"{len(frame)} apps on memories"
    return cases([100 * exact.mean()], [where])


MEASURES = {
    "push_tiles": (table_push.table, _push("tiles"), "paper_push"),
    "push_cycles": (table_push.table, _push("last_cycle"), "paper_push"),
    "push_exact": (table_push.table, _push_exact, "paper_push"),
}
