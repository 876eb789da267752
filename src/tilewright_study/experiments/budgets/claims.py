"""What is claimed of the experiment `budgets`: the measures of its claims, see `tables.claims`."""

import numpy as np

from tilewright_study.experiments.budgets import table_budgets
from tilewright_study.tables._values import by_name, cases


def _less(frame, case):
    """How much less the error is by the integer program than by the best single share in the same time, in percent, on
    ``<maps>/<keep>``."""
    maps, keep = case.split("/")
    rows = table_budgets.program(frame[frame["maps"] == maps])
    rows = rows[np.isclose(rows["keep"], float(keep)) & rows["less"].notna()]
    return by_name(rows.assign(percent=100 * rows["less"]), "percent", "case", "chosen_by")


def _faster(frame, case):
    """Predicted time of a single share, ``<maps>/<keep>``, over that in which the integer program has its error:
    between two times that were allowed."""
    maps, keep = case.split("/")
    frame, found = frame[(frame["maps"] == maps) & (frame["status"] == "ok")], {}
    for name, rows in frame.groupby("case", sort=False):
        single = rows[(rows["chosen_by"] == table_budgets.SINGLE) & np.isclose(rows["keep"], float(keep))]
        made = table_budgets.program(rows).sort_values("error")
        if len(single) and made["error"].min() <= single["error"].iloc[0] <= made["error"].max():
            us = np.interp(np.log(single["error"].iloc[0]), np.log(made["error"]), made["run_us"])
            found[name] = single["run_us"].iloc[0] / us
    return cases(list(found.values()), list(found))


def _passed(frame, _):
    """Share of the attention that was timed, or could have been, that passed its check, in percent."""
    rows = frame[frame["status"] != "skipped"]
    if rows.empty:
        return ()
    wrong = rows.loc[rows["status"] != "ok", "reason"]
    return cases([100 * (rows["status"] == "ok").mean()], [next(iter(wrong), f"{len(rows)} rows")])


MEASURES = {
    "budgets_less": (table_budgets.table, _less),
    "budgets_faster": (table_budgets.table, _faster),
    "budgets_passed": (table_budgets.table, _passed),
}
