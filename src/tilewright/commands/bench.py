"""Time a plan beside SDPA with the mask, dense SDPA and FlexAttention at its best form.

Each result is compared with the float64 reference before it is timed; what is wrong has no time.
"""

import contextlib
import sys

from tilewright.commands import _drawing, settle_threads, table
from tilewright.core import flags
from tilewright.core.errors import ConfigError

# In the order of the table.
BASELINES = {"sdpa_mask": "SDPA with mask", "sdpa_dense": "SDPA, all pairs", "flex": "FlexAttention"}
# Masks of more keys are not made, and dense attention of more is not run: it takes minutes, or all memory.
MOST_TOKENS = 32768


def arguments(parser):
    """The plan, and how long to measure."""
    parser.add_argument("plan", help="a plan that `tilewright plan` or Plan.save wrote")
    parser.add_argument("--batch", type=flags.count, default=1, help="batch entries (default: 1)")
    parser.add_argument("--without", choices=BASELINES, nargs="+", default=[], help="leave these out")
    parser.add_argument("--forms", nargs="+", help="forms of FlexAttention to try, such as 128 64-split (default: all)")
    parser.add_argument(
        "--rse", type=flags.positive, default=0.02, help="stop at this relative standard error (default: 0.02)"
    )
    parser.add_argument("--seconds", type=flags.seconds, default=1.0, help="or after so many seconds each (default: 1)")
    parser.add_argument("--seed", type=flags.seed, default=0, help="of the tokens, standard normal (default: 0)")


def run(plan, batch, without, forms, rse, seconds, seed):
    """Check, time, and print one table. Returns 1 where a result was wrong."""
    settle_threads()
    from tilewright import api
    from tilewright.core import registry
    from tilewright_study.baselines import sparse
    from tilewright_study.experiments.attention import run as _attention
    from tilewright_study.measure.effort import Effort
    from tilewright_study.stages import experiment

    for form in forms or ():
        registry.check("form of FlexAttention", form, sparse.member("flex").VARIANTS)
    effort = experiment.checked(Effort(rse, 10, seconds))
    made = api.load(plan)
    if made.bias is not None or made.scale not in (None, made.head_dim**-0.5):
        raise ConfigError(f"{plan}: expected a plan without a bias or a scale of its own, which is what baselines have")
    sizes = {"heads": made.heads, "head_dim": made.head_dim, "dtype": str(made.dtype).removeprefix("torch.")}
    options = sizes | {"batch": batch, "seed": seed, "device": made.device}
    tokens = {
        "plan's": _attention.Tokens(made.graph, **options),
        "model's": _attention.Tokens(_drawing.natural(made.graph), **options),
    }
    # What is compiled meanwhile is said where it does not disturb the table.
    with contextlib.redirect_stdout(sys.stderr):
        inside, permuted = _attention.run_schedule(made.schedule, made.blocks, tokens["plan's"], effort)
        rows = [("tilewright", "plan's", inside), ("tilewright", "model's", permuted)]
        for name, title in BASELINES.items():
            if name not in without:
                rows.append(_best(name, title, forms, tokens, effort))
    lines = _lines(rows)
    print(made.summary().splitlines()[0])
    print(f"tensors    batch {batch}, {made.heads} heads × {made.head_dim}, {sizes['dtype']}, {_device(made)}")
    print("\n".join(table(lines)))
    for title, _, row in rows:
        if row["status"] != "ok":
            print(f"{title}: {row['status']}: {row['reason']}")
    return int(any(row["status"] == "failed" for *_, row in rows))


def _best(name, title, forms, tokens, effort):
    """``(title, order, row)`` of the fastest form of a baseline that is right, in either order of the tokens."""
    from tilewright_study.baselines import sparse
    from tilewright_study.experiments.attention import run as _attention

    module, found = sparse.member(name), []
    # Those that work through all pairs take as long in any order.
    for order, these in tokens.items():
        if module.DENSE and order != "model's":
            continue
        if module.DENSE and these.graph.n_cols > MOST_TOKENS:
            reason = f"{these.graph.n_cols:,} keys; dense attention is run up to {MOST_TOKENS:,}"
            return title, order, these.row(status="skipped", reason=reason, variant="")
        for variant in forms if name == "flex" and forms else module.VARIANTS:
            row = _attention.run_variant(module, variant, these, effort, {"provider": name, "ordered": True})
            found.append((title, order, row))
    # A form that is wrong is told of only where none is right.
    return min(found, key=lambda each: (("ok", "failed", "skipped").index(each[2]["status"]), each[2].get("p50_us", 0)))


def _lines(rows):
    """Rows as texts."""
    ours = rows[0][2].get("p50_us")
    lines = []
    for title, order, row in rows:
        time = row.get("p50_us")
        lines.append(
            {
                "attention": title,
                "order of tokens": order,
                "form": str(row.get("variant") or row.get("tiles") or ""),
                "ms": "–" if time is None else f"{time / 1e3:.3f}",
                "20 to 80 %": "–" if time is None else f"{row['p20_us'] / 1e3:.3f} to {row['p80_us'] / 1e3:.3f}",
                "× plan": "–" if time is None or ours is None else f"{time / ours:.2f}",
                "relative error": "–" if "relative_error" not in row else f"{row['relative_error']:.1e}",
            }
        )
    return lines


def _device(made):
    device = next(iter(made.profiles.values())).device
    return f"{device['name']}" + (f", {device['threads']} threads" if "threads" in device else "")
