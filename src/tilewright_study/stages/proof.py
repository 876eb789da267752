"""What rows of attention prove, in words: results that were compared with dense attention, and times (stage T6)."""

from tilewright.core.errors import ArtifactError
from tilewright_study.tables import _read

# What a plan is called in a sentence.
_PLAN = "order {reorder}, tiles {tiles}, solver {solver}"


def run(inputs, figure):
    """Print what the rows in the files `inputs` prove. figure: what was drawn of them.

    Raises `ArtifactError` where a result was not right, or nothing was timed.
    """
    (rows,) = _read.frames(inputs, "attention")
    for row in rows.to_dict("records"):
        if row["status"] == "failed":
            raise ArtifactError(f"expected correct results of {row['provider']}, found: {row['reason']}")
    rows = _read.bench(rows[rows["status"] == "ok"])
    for model, found in rows.groupby("model", sort=False):
        one = found.iloc[0]
        print(f"{model}: {one['tokens']:,.0f} tokens, {one['density']:.0%} of their pairs, on {one['device']}.")
        off = (found["relative_error"] / found["tolerance"]).max()
        print(f"{len(found)} timed results agree with dense attention in float64.")
        print(f"The largest error is {off:.0%} of the tolerance.")
        ours, others = _read.plans(found), found[found["provider"] != "tilewright"]
        for what, part in (("plan", ours), ("other attention", others)):
            if len(part):
                best = part.loc[part["p50_us"].idxmin()]
                name = _PLAN.format(**best) if what == "plan" else best["provider"]
                print(f"The fastest {what} takes {best['p50_us'] / 1e3:.2f} ms: {name}.")
    if rows.empty:
        raise ArtifactError("expected rows with times, found none")
    print(f"The figure is {figure}")
