"""What integer programming gains, measured, in sum: median, worst and best over all workloads and orders, and
how often they win and lose beyond noise.

What integer programming gains, measured, over all workloads and orders of the run: the median, the worst and the best
gain, 1 - ILP / rival, and the shares of cases in which it is faster, as fast within two standard errors, and slower.
"""

from tilewright_study.experiments.attention import table_policy

SHOWN = {
    "rival": ("against", ""),
    "cases": ("cases", ".0f"),
    "median": ("median gain", "+.1%"),
    "worst": ("worst", "+.1%"),
    "best": ("best", "+.1%"),
    "faster": ("faster beyond noise", ".0%"),
    "tie": ("ties", ".0%"),
    "slower": ("slower beyond noise", ".0%"),
}


def needs(config):
    """What `policy` needs."""
    return table_policy.needs(config)


def table(inputs):
    """One row per rival that was run.

    A gain is ``1 - ILP / rival`` of measured p50; noise is two standard errors of the two.
    """
    import pandas as pd

    frame = table_policy.table(inputs)
    rows = []
    for rival, name in table_policy.RIVALS.items():
        cases = frame.dropna(subset=f"over_{rival}")
        if cases.empty:
            continue
        gain = 1 - 1 / cases[f"over_{rival}"]
        shares = {verdict: (cases[f"verdict_{rival}"] == verdict).mean() for verdict in ("faster", "tie", "slower")}
        extremes = {"median": gain.median(), "worst": gain.min(), "best": gain.max()}
        rows.append({"rival": name, "cases": len(cases), **extremes, **shares})
    return pd.DataFrame(rows, columns=list(SHOWN))
