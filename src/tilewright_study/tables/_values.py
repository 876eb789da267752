"""Values of claims, each under where it was found: what the claims of several experiments are made of."""

import numpy as np


def cases(values, where, noise=np.nan):
    """Values of a claim as `_judged` takes them."""
    import pandas as pd

    return pd.DataFrame({"value": values, "noise": noise}).set_axis(list(where))


def by_name(frame, column, *names, noise=None):
    where = [" ".join(filter(None, words)) for words in zip(*(frame[name] for name in names), strict=True)]
    return cases(frame[column], where, np.nan if noise is None else frame[noise])


def passed(column, ours):
    def values(frame, _):
        """Share of our rows that passed their checks, of all that could run, in percent: none of their errors is above
        its tolerance."""
        if not (frame[column] == ours).any():
            return ()
        rows = frame[(frame[column] == ours) & (frame["status"] != "skipped")]
        right = rows["status"] == "ok"
        for error in rows.columns[rows.columns.str.endswith("error")]:
            tolerance = error.removesuffix("error").removeprefix("relative_") + "tolerance"
            right &= ~(rows[error] > rows[tolerance]) if tolerance in rows else True
        wrong = rows.loc[~right, "reason"]
        return cases([100 * right.mean()], [next(iter(wrong), f"{len(rows)} rows")])

    return values


def with_batch(rows):
    return rows.assign(batch=rows["batch"].map("batch {:.0f}".format)) if "batch" in rows else rows
