"""Tables that README.md and docs/ quote from recorded rows, so that they cannot disagree with them (stage T6).

In a document each stands between ``<!-- table: NAME -->`` and ``<!-- end -->``, where `updated` writes it. The name is
one of `NAMES`: ``<device>-<table>`` for a device of `FOLDERS`, ``results-<kind>`` for a kind of claims, or
``artifact-<what>`` for what checks them.
"""

import re
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal
from functools import cache
from pathlib import Path

from tilewright.attention import reorder
from tilewright.core import registry
from tilewright.core.errors import ArtifactError
from tilewright_study.experiments.attention import table_policy_summary, table_speedup
from tilewright_study.experiments.budgets import MASS, table_budgets
from tilewright_study.experiments.gains import WAYS, table_gains
from tilewright_study.experiments.neighborhood import table_neighborhood
from tilewright_study.experiments.networks import table_end_to_end, table_network_plans
from tilewright_study.experiments.networks.claims import beside_paper
from tilewright_study.experiments.pruned import table_pruned
from tilewright_study.experiments.ragged import table_ragged
from tilewright_study.experiments.slices import table_slices
from tilewright_study.tables import _artifact as _artifacts
from tilewright_study.tables import _read, _select, claims, markdown

# Recorded runs: a file of rows for each experiment.
FOLDERS = {"cpu": "expected/cpu-2-cores", "h200": "expected/h200", "h100": "expected/h100"}
# The patterns beside those of the paper, and what they are.
PATTERNS = {
    "vil-medium-wide-512-s2-exact": "15×15 windows + global, 4,097 tokens",
    "vil-medium-wide-1024-s2-exact": "15×15 windows + global, 16,385",
    "vil-medium-wide-2048-s2-exact": "15×15 windows + global, 65,537",
    "vil-small-512-s1-exact": "15×15 windows + global, 16,385",
    "vil-small-1024-s1-exact": "15×15 windows + global, 65,537",
    "vil-tiny-512-s1-exact": "15×15 windows + global, 16,385",
    "vil-small-384-s1": "ViL-small stage 1 at 384 px, 9,217",
    "vil-small-1024-s1": "ViL-small stage 1 at 1024 px, 65,537",
    "regionvit-small-896-s2-windows": "256 windows of 50",
    "regionvit-small-896-s1-windows": "1,024 windows of 50",
    "dynamicvit-s-1024-b1": "30 % of 4,096 kept",
    "dynamicvit-s-2048-b1": "30 % of 16,384 kept",
}
# Networks, settings and batches whose images a second are quoted; the summary is of all.
_HALF, _RANGE, _RANDOM = "keep_ratio=0.5", "keep_range=[0.3, 0.7]", ' predictor="random"'
PRUNED = [
    ("S, Threshold-L2, half kept", "deit-small-224-threshold_l2", _HALF, (1, 16, 256)),
    ("S, 30 to 70 % kept, image by image", "deit-small-224-threshold_l2", _RANGE, (16, 256)),
    ("T, the same", "deit-tiny-224-threshold_l2", _RANGE, (256,)),
    ("B, the same", "deit-base-224-threshold_l2", _RANGE, (256,)),
    ("B, 384 pixels, the same", "deit-base-384-threshold_l2", _RANGE, (32,)),
    ("S, 30 % kept", "deit-small-224-threshold_l2", "keep_ratio=0.3", (256,)),
    ("S, DynamicViT, 70 % kept three times", "deit-small-224-dynamicvit", f"keep_ratio=0.7{_RANDOM}", (256,)),
    ("S, DynamicViT, 30 %", "deit-small-224-dynamicvit", f"keep_ratio=0.3{_RANDOM}", (256,)),
    ("S, EViT, 70 %", "deit-small-224-evit", "keep_ratio=0.7", (256,)),
    ("S, EViT, 30 %", "deit-small-224-evit", "keep_ratio=0.3", (256,)),
    ("S, ATS, as published", "deit-small-224-ats", "keep_ratio=1.0", (256,)),
    ("S, ATS, a grid of 30 %", "deit-small-224-ats", "keep_ratio=0.3", (256,)),
]
# README's rows, lost ones among them: words, device, kind of row, and the case.
HEADLINE = [
    ("neighbourhood attention, 15² of 256² tokens, 6 × 64", "h200", "neighborhood", "256x256-w15-6x64"),
    ("neighbourhood attention, 11³ of 24×48×48 tokens, 4 × 64", "h200", "neighborhood", "24x48x48-w11-4x64"),
    ("attention, 15×15 windows + global, 16,385 tokens, 6 × 64", "h200", "attention", "vil-medium-wide-1024-s2-exact"),
    ("attention, 30 % of 16,384 tokens kept, training mask, 6 × 64", "h200", "attention", "dynamicvit-s-2048-b1"),
    ("network, ViL-tiny, 1024 px, batch 8, called", "h200", "networks", ("vil-tiny-1024", 8, "")),
    ("network, DynamicViT-S, 224 px, batch 1, called", "h200", "networks", ("dynamicvit-s-224", 1, "")),
    ("network, DeiT-S keeping 30 to 70 %, batch 256", "h200", "pruned", ("deit-small-224-threshold_l2", _RANGE, 256)),
    ("attention, ViL-tiny stage 1, 384 px, 9,217 tokens, 1 × 48", "cpu", "attention", "vil-tiny-384-s1"),
    ("attention, ViL-tiny stage 1, 128 px, 1,025 tokens, 1 × 48", "cpu", "attention", "vil-tiny-128-s1"),
]
# Heads of the published table of packed kernels, those of DeiT-B.
PUBLISHED_HEADS, PUBLISHED_DIM = 12, 64
# What computes the same windows, on grids of tokens.
_NEIGHBORS = {"flex": "FlexAttention", "gather": "keys gathered"}
_PEERS = {"flex": "FlexAttention", "sdpa_kept": "kept keys gathered, SDPA", "sdpa_dense": "dense SDPA"}
_DEVICES = {"cpu": "2 CPU cores", "h200": "H200", "h100": "H100"}
_STRATEGIES = {
    "padded_unfused": "full length, unfused as published",
    "padded": "full length",
    "padded_kept": "longest kept",
    "gathered": "gathered",
    "varlen": "packed, FlashAttention varlen",
    "ragged": "packed, Tilewright",
}
_ATTENTIONS = {
    "native": "as published",
    "flex": "FlexAttention",
    "dense": "masked SDPA",
    "full": "dense SDPA, without the mask",
    "tilewright": "Tilewright",
}
_WAYS = {"": "called", "_graph": "as a CUDA graph"}
# Whole networks by size: their names without it, and the columns; another size stands in the nearest one.
_NETWORKS = {
    "timm-vit_base_patch16_224": "timm ViT-B",
    "timm-vit_large_patch16_224": "timm ViT-L",
    "timm-vit_base_patch14_dinov2": "timm DINOv2-B",
    "vil-tiny": "ViL-tiny",
    "regionvit-tiny": "RegionViT-tiny",
    "dynamicvit-s": "DynamicViT-S",
    "deit-small-evit": "DeiT-S, EViT",
}
_PIXELS = (224, 384, 512, 768, 1024)
_POLICIES = {"greedy": "greedy", "published": "ILP, published objective", "ilp": "ILP"}
# Attention by lists: what chose them, and which rows hold it.
_LISTS = {
    "single keys, exact": {"group": "128x1", "chosen_by": "oracle", "provider": "tilewright", "call": "attend"},
    "chosen in each call: pooled, 32 (the default)": {"chosen_by": "pooled32", "call": "predict_attend"},
    "pooled, 128": {"chosen_by": "pooled128", "call": "predict_attend"},
    "blocks of 128×128, exact": {"group": "128x128", "provider": "tilewright", "call": "attend"},
    "FlashAttention 4, these blocks": {"group": "128x128", "provider": "fa4", "call": "attend"},
    "FlexAttention, these blocks": {"group": "128x128", "provider": "flex", "call": "attend"},
}
_MODES = {
    "graph": "CUDA graph",
    "compile_graph": "compiled, CUDA graph",
    "eager": "kernel by kernel",
    "compile": "compiled, kernel by kernel",
}
_MARK = re.compile(r"^<!-- table: (?P<name>\S+) -->\n.*?(?P<end>^<!-- end -->$|(?=^<!-- table: )|\Z)", re.M | re.S)


def quoted(name, root):
    """The table `name` as Markdown, from the rows recorded under `root`, a checkout.

    Raises `UnknownNameError`, and `ArtifactError` where rows are missing or are not those of this version.
    """
    registry.check("quoted table", name, tuple(NAMES))
    make, device = NAMES[name]
    return make(Path(root), device)


def updated(text, root):
    """A document's `text` with today's tables. Raises as `quoted`, and `ArtifactError` for one without an end."""

    def anew(match):
        if not match["end"]:
            raise ArtifactError(f"table {match['name']}: expected <!-- end --> after it, found none")
        return f"<!-- table: {match['name']} -->\n\n{quoted(match['name'], root)}\n{match['end']}"

    return _MARK.sub(anew, text)


def at_least(value, digits):
    """A minimum in words, rounded down."""
    return _rounded(value, digits, ROUND_FLOOR)


def at_most(value, digits):
    """A maximum in words, rounded up."""
    return _rounded(value, digits, ROUND_CEILING)


def _rounded(value, digits, rounding):
    return f"{Decimal(repr(float(value))).quantize(Decimal(1).scaleb(-digits), rounding):,}"


def _recorded(root, device, *kinds):
    """The recorded files of `kinds`; with those of layers the paper's bars."""
    folder = root / FOLDERS[device]
    found = [path for path in (folder / f"{kind}.csv" for kind in kinds) if path.is_file()]
    if not found:
        raise ArtifactError(f"{folder}: expected recorded rows of {', '.join(kinds)}, found none")
    return found + [root / _select.PAPER_LATENCY] * ("attention" in kinds)


@cache
def _table(root, device, kind, make):
    """The table that the function `make` makes of the recorded rows of `kind`; several tables quote it."""
    return make(_recorded(root, device, kind))


def _patterns(root, device):
    """Our time and the fastest peer's in the three forms, of the patterns beside the paper's."""
    rows = _table(root, device, "attention", table_speedup.table).set_index("model")
    others = set(rows.index) - set(PATTERNS) - set(rows.index[rows["paper_speedup"].notna()])
    if missing := sorted(others | (set(PATTERNS) - set(rows.index))):
        raise ArtifactError(
            f"expected rows of the paper's workloads and {', '.join(PATTERNS)}, missing or found too much: {missing}"
        )
    lines = []
    for model, words in PATTERNS.items():
        row = rows.loc[model]
        cells = [", ".join(filter(None, [words, row["case"]])), f"{row['heads']:.0f} × {row['head_dim']:.0f}"]
        for suffix in table_speedup.FORMS:
            cells += [_us(row[f"plan_us{suffix}"]), _peer(row, suffix), _ratio(row[f"over_peer{suffix}"])]
        lines.append([*cells, f"{_us(row['best_us'])} of {row['plans']:.0f}"])
    forms = ("plan order, warm L2", "natural order", "plan order, cold L2")
    header = [text for form in forms for text in (f"{form}: Tilewright, µs", "fastest peer, µs", "×")]
    return _lines(["pattern", "heads × dim", *header, "best of all plans, µs"], lines, left=1)


def _dense(root, device):
    """The headline plan over the fastest dense attention at the paper's sizes."""
    rows = _table(root, device, "attention", table_speedup.table)
    lines = []
    for row in rows[~rows["model"].isin(PATTERNS)].to_dict("records"):
        ratios = [row[name] for name in ("speedup", "speedup_natural", "speedup_cold")]
        ratios += [row["dense_us"] / row["best_us"]]
        lines.append(
            [
                ", ".join(filter(None, [row["model"], row["case"]])),
                _us(row["plan_us"]),
                f"{_us(row['dense_us'])} ({row['dense']})",
                *map(_ratio, ratios),
                f"{row['plans']:.0f}",
            ]
        )
    header = ["workload", "headline, µs", "fastest dense, µs", "×", "natural order ×", "cold L2 ×", "best plan ×"]
    return _lines([*header, "of plans"], lines, left=1)


def _paper(root, device):
    """The paper's speed-ups of whole networks with one image, and what one layer and the whole network gain here."""
    rows = beside_paper([*_recorded(root, device, "networks"), root / _select.PAPER_LATENCY])
    layers = _table(root, device, "attention", table_speedup.table)
    ways = {suffix: way for suffix, way in _WAYS.items() if rows[f"over{suffix}"].notna().any()}
    lines = []
    for row in rows.to_dict("records"):
        layer = layers.loc[layers["model"].isin([row["network"], f"{row['network']}-s1"]), "speedup"].max()
        reached = {True: "reproduced", False: "not reproduced"}[row["best"] >= row["paper_speedup"]]
        values = [row["paper_speedup"], layer, *(row[f"over{suffix}"] for suffix in ways)]
        lines.append([row["network"], *map(_ratio, values), reached if row["best"] > 0 else claims.UNKNOWN])
    header = ["paper: whole network, A100, ×", "one layer, ×", *(f"whole network, {way}, ×" for way in ways.values())]
    return _lines(["network, one image", *header, "the paper's is"], lines, left=1)


def _networks(root, device):
    """Each attention at each batch with p20 and p80, on a GPU its time as a CUDA graph, both also compiled, and the
    fastest peer in either way of running."""
    rows = _table(root, device, "networks", table_end_to_end.table)
    shown = [name for name in _ATTENTIONS if name in set(rows["attention"])]
    ways = {suffix: way for suffix, way in _WAYS.items() if rows[f"best_us{suffix}"].notna().any()}
    lines = []
    for (network, batch), group in rows.groupby(["network", "batch"], sort=False):
        group = group.drop_duplicates("attention").set_index("attention")
        times = [_spread(group.loc[name]) if name in group.index else "not run" for name in shown]
        against = [""] * 3 * len(ways)
        if table_end_to_end.OURS in group.index:
            row = group.loc[table_end_to_end.OURS]
            against = [
                text
                for suffix in ways
                for text in (_network_peer(row, suffix), _ratio(row[f"over_peer{suffix}"]), row[f"verdict{suffix}"])
            ]
        lines.append([network, f"{batch:.0f}", *times, *against])
    header = [f"{_ATTENTIONS[name]}, ms" for name in shown]
    said = [f"{way}: {text}" for way in ways.values() for text in ("fastest peer", "× it", "Tilewright is")]
    return _lines(["network", "batch", *header, *said], lines, left=1)


def _network_peer(row, suffix):
    """The fastest peer of a network's row, in words."""
    peer = row[f"peer{suffix}"]
    return ", ".join(filter(None, [_ATTENTIONS.get(peer, peer), row[f"peer_form{suffix}"]]))


def _networks_summary(root, device):
    """How many times as fast as the fastest other attention networks are, in either way of running."""
    rows = _table(root, device, "networks", table_end_to_end.table)
    rows = rows[rows["attention"] == table_end_to_end.OURS]
    lines = []
    for suffix, way in _WAYS.items():
        for words, cases in (("one image", rows[rows["batch"] == 1]), ("all batches", rows)):
            over = cases[f"over_peer{suffix}"].dropna()
            found = cases[f"verdict{suffix}"].value_counts()
            if len(over):
                spread = [at_least(over.min(), 2), f"{over.median():.2f}", at_most(over.max(), 2)]
                counts = [f"{found.get(verdict, 0)}" for verdict in ("faster", "tie", "slower")]
                lines.append([way, words, f"{len(over)}", *spread, *counts])
    header = ["networks", "", "cases", "least, × fastest peer", "median", "greatest", "faster", "ties", "slower"]
    return _lines(header, lines, left=2)


def _gains(root, device):
    """How many times as fast whole networks are as the fastest other form, by way of calling and size: in each cell for
    each batch."""
    rows = _table(root, device, "gains", table_gains.table)
    batches = sorted(set(rows["batch"]))
    known = {}
    for row in rows.to_dict("records"):
        size = f"-{row['resolution']:.0f}"
        place = min(_PIXELS, key=lambda pixels: abs(pixels - row["resolution"]))
        known.setdefault("".join(row["network"].rsplit(size, 1)), {})[place, row["batch"]] = row
    lines = []
    for network in [*filter(known.get, _NETWORKS), *(name for name in known if name not in _NETWORKS)]:
        for way in WAYS:
            cells = [
                [_ratio(known[network].get((pixels, batch), {}).get(f"over {way}", 0)) or "–" for batch in batches]
                for pixels in _PIXELS
            ]
            if any(text != "–" for each in cells for text in each):
                words = [_NETWORKS.get(network, network), table_gains.NAMES[way]]
                lines.append([*words, *(" / ".join(each) if {*each} != {"–"} else "" for each in cells)])
    return _lines(["network", "way of calling", *(f"{pixels:,} px" for pixels in _PIXELS)], lines, left=2)


def _neighborhood(root, device):
    """Time of neighbourhood attention, and times of what computes the same over it."""
    rows = _table(root, device, "neighborhood", table_neighborhood.table)
    names = [*_NEIGHBORS, table_neighborhood.DENSE]
    scale, unit = (1e3, "TFLOP/s") if rows["useful_gflops"].max() >= 1e4 else (1, "GFLOP/s")
    lines = []
    for case, group in rows.groupby("case", sort=False):
        found = group.set_index("provider")
        ours = found.loc[table_neighborhood.OURS]
        shape = [str(ours[name]).replace("x", "×") for name in ("grid", "window")]
        times = [_ratio(found["over_ours"].get(name, 0)) or "–" for name in names]
        speed = f"{ours['useful_gflops'] / scale:,.0f}"
        lines.append([*shape, _heads(case), _us(ours["p50_us"]), speed, *times])
    header = ["grid", "window", "heads × head dim", "Tilewright, µs", f"useful {unit}", *_NEIGHBORS.values()]
    return _lines([*header, "dense SDPA"], lines, left=3)


def _heads(case):
    """Heads and head dim of the name of a layer."""
    return case.rpartition("-")[2].replace("x", " × ")


def _slices(root, device):
    """Attention by lists of equal length over the fastest dense call, and in brackets the attention that they keep."""
    rows = _table(root, device, "slices", table_slices.table)
    rows = rows[(rows["lengths"] == "equal") & (rows["status"] == "ok")]
    found = {
        name: rows[(rows[list(how)] == list(how.values())).all(axis=1)].set_index(["case", "sparsity"])
        for name, how in _LISTS.items()
    }
    found = {name: own for name, own in found.items() if len(own)}
    lines = []
    for (case, sparsity), group in rows.groupby(["case", "sparsity"], sort=False):
        cells = [
            f"{own.loc[case, sparsity]['speedup']:.2f} ({own.loc[case, sparsity]['recall']:.1%})"
            if (case, sparsity) in own.index
            else ""
            for own in found.values()
        ]
        heads = case.partition("-")[0].replace("x", " × ")
        lines.append([f"{group['tokens'].iloc[0]:,.0f}", heads, f"{sparsity:.0%}", *cells])
    return _lines(["tokens", "heads × dim", "keys left out", *found], lines, left=2)


def _budgets(root, device):
    """Errors at the time of one share of the keys: of this share, of one mass, and of shares for each head."""
    rows = _table(root, device, "budgets", table_budgets.table)
    rows = rows[rows["status"] == "ok"]
    lines = []
    for (_, keep), group in rows.groupby(["case", "keep"], sort=False):
        found = {name: own.iloc[0] for name, own in group.groupby("chosen_by")}
        made = [found[name] for name in table_budgets.PROGRAMS if name in found]
        if table_budgets.SINGLE not in found or not made:
            continue
        single, program = found[table_budgets.SINGLE], made[0]
        errors = [f"{row['error']:.1%}" for row in (single, found[MASS], program)]
        times = [f"{row['p50_us'] / 1e3:.2f}" for row in (single, program)]
        lines.append(
            [single["maps"], f"{single['tokens']:,.0f}", f"{keep:.0%}", *errors, f"{program['less']:.0%}", *times]
        )
    header = [
        "maps",
        "tokens",
        "keys",
        "one share",
        "one mass",
        "for each head",
        "less",
        "ms, one share",
        "ms, each head",
    ]
    return _lines(header, lines, left=1)


def _network_plans(root, device):
    """Whole networks by order and policy: how many times faster than with their own plans."""
    rows = _table(root, device, "networks", table_network_plans.table)
    rows = rows[(rows["tiles"] == "") & (rows["over_own"] > 0)]
    rows = rows.assign(policy=rows["solver"].map(_read.policy))
    cells = rows.groupby(["reorder", "policy"])["over_own"].agg(["median", "min", "max"])
    lines = []
    for order in [name for name in reorder.NAMES if name in set(rows["reorder"])]:
        found = [cells.loc[order, policy] if (order, policy) in cells.index else None for policy in _POLICIES]
        texts = ["" if x is None else f"{x['median']:.3f} ({x['min']:.2f}–{x['max']:.2f})" for x in found]
        lines.append([order, *texts])
    return _lines(["order", *_POLICIES.values()], lines, left=1)


def _pruned(root, device):
    """Images a second of each batching as a CUDA graph, and ours over the best fair one."""
    rows = _table(root, device, "pruned", table_pruned.table)
    groups = dict(list(rows[rows["mode"] == "graph"].groupby(["network", "setting", "batch"])))
    lines = []
    for words, network, setting, batches in PRUNED:
        for batch in batches:
            if (network, setting, batch) not in groups:
                raise ArtifactError(f"expected rows of {network}, {setting}, batch {batch}, found none")
            case = groups[network, setting, batch].set_index("batching")
            ours, rates = case.loc[table_pruned.OURS], case["images_per_s"].reindex(list(_STRATEGIES))
            lines.append(
                [
                    *(words, f"{batch}", *("" if not rate > 0 else f"{rate:,.0f}" for rate in rates)),
                    _ratio(ours["over_fair"]) + (" (tie)" if "fair" in ours["ties"] else ""),
                    f"{ours['compared']:.0%} of {ours['inputs']:.0f}",
                    f"{at_least(100 * ours['same_top1_all'], 1)} %",
                ]
            )
    header = ["DeiT, pruner", "batch", *_STRATEGIES.values(), "× the best dense or FlashAttention"]
    return _lines([*header, "images with the same tokens", "same top-1, all images"], lines, left=1)


def _pruned_summary(root, device):
    """Our speed-up over each peer in each mode: least, median, greatest, and what is beyond noise."""
    rows = _table(root, device, "pruned", table_pruned.table)
    rows = rows[rows["batching"] == table_pruned.OURS]
    peers = {
        **{"padded": "full length", "published": "full length, unfused", "dense": "best dense batch"},
        "fair": "best dense or FlashAttention",
    }
    lines = []
    for mode, words in _MODES.items():
        for peer, name in peers.items():
            cases = rows[(rows["mode"] == mode) & rows[f"over_{peer}"].notna()]
            if cases.empty:
                continue
            over = cases[f"over_{peer}"]
            found = _read.verdict(over, cases[f"noise_{peer}"]).value_counts()
            counts = [f"{found.get(verdict, 0)}" for verdict in ("faster", "tie", "slower")]
            spread = [at_least(over.min(), 2), f"{over.median():.2f}", at_most(over.max(), 2)]
            lines.append([words, name, f"{len(cases)}", *spread, *counts])
    header = ["mode", "over", "cases", "least", "median", "greatest", "faster beyond noise", "ties", "slower"]
    return _lines(header, lines, left=2)


def _published_ragged(root, device):
    """Most images a second with half of the tokens kept: as published, and of ours beside the same forms."""
    (paper,) = _read.frames([root / _select.PAPER_RAGGED], "paper_ragged")
    lines = [
        [
            row.network,
            f"{row.device}, published ({row.version})",
            *_rates(row.unpruned, row.padded, row.varlen, row.packed),
        ]
        for row in paper.itertuples()
    ]
    rows = _table(root, device, "pruned", table_pruned.table)
    for network in dict.fromkeys(paper["network"]):
        half = rows[(rows["network"] == f"{network}-threshold_l2") & (rows["setting"] == _HALF)]
        most = half.groupby("batching")["images_per_s"].max()
        shown = most.reindex([table_pruned.UNPRUNED, table_pruned.PUBLISHED, "varlen", table_pruned.OURS])
        lines.append([network, _DEVICES[device], *_rates(*shown)])
    header = ["not pruned", "full length, unfused", "packed, FlashAttention", "packed, its own kernel", "over unfused"]
    return _lines(
        ["network", "device", *header, "over FlashAttention"], sorted(lines, key=lambda line: line[0]), left=2
    )


def _rates(unpruned, padded, varlen, packed):
    """Cells of images a second, and of the last over the two before; blank where there is none."""
    rates = [f"{rate:,.0f}" if rate > 0 else "" for rate in (unpruned, padded, varlen, packed)]
    return [*rates, _ratio(packed / padded), _ratio(packed / varlen)]


def _published_kernel(root, device):
    """Attention of packed images of one length, as published and as recorded: a GPU's own time, and the host's until
    the result is there. What was published is between events around a call, which the host may keep waiting."""
    (paper,) = _read.frames([root / _select.PAPER_RAGGED_KERNEL], "paper_ragged_kernel")
    rows = _table(root, device, "ragged", table_ragged.table)
    rows = rows[(rows["heads"] == PUBLISHED_HEADS) & (rows["head_dim"] == PUBLISHED_DIM) & (rows["call"] == "attend")]
    ours = rows.pivot_table(index=["images", "lengths"], columns="provider", values=["p50_us", "latency_us"])
    lines = []
    for (images, pruned_, kept), published in paper.groupby(["images", "pruned", "kept"]):
        case, at = [f"{images:.0f}", f"{pruned_:.0f} %"], (images, f"{kept:.0f}-{kept:.0f}")
        for row in published.itertuples():
            times = row.padded_us, row.varlen_us, row.packed_us
            lines.append([*case, f"{row.device}, published ({row.version})", *_kernel_times(*times)])
        for column, words in (("p50_us", "its own time"), ("latency_us", "until the result")):
            if at in ours.index:
                times = ours.loc[at, column].reindex(["", "flash_varlen", table_ragged.OURS])
                lines.append([*case, f"{_DEVICES[device]}, {words}", *_kernel_times(*times)])
    header = ["images", "pruned", "device", "full length, unfused, µs", "packed, FlashAttention, µs"]
    return _lines([*header, "packed, its own kernel, µs", "over FlashAttention"], lines, left=3)


def _kernel_times(padded, varlen, packed):
    return [*map(_us, (padded, varlen, packed)), _ratio(varlen / packed)]


def _headline(root, _):
    """Ours and the fastest peer in the rows of `HEADLINE`."""
    lines = []
    for words, device, kind, case in HEADLINE:
        make, cells = _CELLS[kind]
        lines.append([words, _DEVICES[device], *cells(_table(root, device, kind, make), case)])
    return _lines(["what", "device", "Tilewright", "fastest peer", "times as fast"], lines, left=2)


def _layer_cells(rows, model):
    row = rows.set_index("model").loc[model]
    name = row["peer"].split()[0]
    return f"{_us(row['plan_us'])} µs", f"{_us(row['peer_us'])} µs, {_PEERS.get(name, name)}", _ratio(row["over_peer"])


def _neighborhood_cells(rows, case):
    rows = rows[(rows["case"] == case) & (rows["provider"] != table_neighborhood.DENSE)].set_index("provider")
    ours = rows.loc[table_neighborhood.OURS, "p50_us"]
    peer = rows.drop(table_neighborhood.OURS)["p50_us"].dropna().sort_values()
    return (
        f"{_us(ours)} µs",
        f"{_us(peer.iloc[0])} µs, {_PEERS.get(peer.index[0], peer.index[0])}",
        _ratio(peer.iloc[0] / ours),
    )


def _network_cells(rows, case):
    *case, suffix = case
    row = rows[rows["attention"] == table_end_to_end.OURS].set_index(["network", "batch"]).loc[tuple(case)]
    us, ratio = row[f"peer_us{suffix}"], row[f"over_peer{suffix}"]
    ours, theirs = (f"{time / 1e3:{_ms(time)}} ms" for time in (us / ratio, us))
    return ours, f"{theirs}, {_network_peer(row, suffix)}", _ratio(ratio)


def _pruned_cells(rows, case):
    rows = rows[(rows["way"] == "graph") & (rows["batching"] == table_pruned.OURS)]
    row = rows.sort_values("p50_us").set_index(["network", "setting", "batch"]).loc[[case]].iloc[0]
    rate = row["images_per_s"]
    peer = f"{rate / row['over_fair']:,.0f} images/s, {_STRATEGIES[row['fair']]}"
    return f"{rate:,.0f} images/s", peer, _ratio(row["over_fair"])


def _policy(root, device):
    return markdown(table_policy_summary.table(_recorded(root, device, "attention")), table_policy_summary.SHOWN)


@cache
def judged(root, device):
    """The claims with their verdicts on the rows recorded of `device`."""
    listed = [root / path for path in (_select.CLAIMS, *_select.PAPERS)]
    return claims.table(dict.fromkeys([*listed, *_recorded(root, device, *_read.ROWS)]))


def _results(root, kind):
    """The claims of a kind with what was found on each device; the cell of one that ran nothing of it is empty."""
    frames = [judged(root, device).set_index("id") for device in FOLDERS]
    (listed,) = _read.frames([root / _select.CLAIMS], "claims")
    lines = []
    for claim in listed[listed["kind"] == kind].to_dict("records"):
        cells = [claims.found(frame.loc[claim["id"]]) if claim["id"] in frame.index else "" for frame in frames]
        if any(cells):
            lines.append([claim["claim"], *cells])
    return _lines(["claim", *(_DEVICES[device] for device in FOLDERS)], lines, left=1 + len(frames))


def _artifact(root, what):
    """The claims by experiment, or one by one, on the two devices that most were recorded of."""
    folders = {_DEVICES[name]: FOLDERS[name] for name in ("cpu", "h200")}
    if what == "experiments":
        return _lines(*_artifacts.by_experiment(root, folders), left=3)
    frames = {_DEVICES[name]: judged(root, name).set_index("id") for name in ("cpu", "h200")}
    return _lines(*_artifacts.by_claim(root, folders, frames), left=4)


def _us(value):
    return f"{value:,.{1 if value < 1000 else 0}f}" if value > 0 else ""


def _ratio(value):
    return f"{value:.{2 if value < 10 else 1}f}" if value > 0 else ""


def _peer(row, suffix):
    return f"{_us(row[f'peer_us{suffix}'])} {row[f'peer{suffix}']}" if row[f"peer{suffix}"] else "none ran"


def _spread(row):
    """Times of an attention in a cell: called, with p20 and p80; as a CUDA graph; both compiled."""
    if row["status"] != "ok":
        return row["status"]
    form = _ms(row["p50_us"])
    spread = [f"{row[name] / 1e3:{form}}" if row[name] > 0 else "" for name in ("p50_us", "p20_us", "p80_us")]
    plain = "{} ({}–{})".format(*spread) if spread[0] else ""
    graph, *compiled = (
        f"{us / 1e3:{_ms(us)}}" if us > 0 else "" for us in row[["gpu_us", "compiled_us", "compiled_gpu_us"]]
    )
    forms = ["; ".join(filter(None, [plain, graph])), "; ".join(filter(None, compiled))]
    return ", compiled ".join(filter(None, forms)) if forms[0] else f"compiled {forms[1]}"


def _ms(us):
    """The format of a time in milliseconds."""
    return f",.{0 if us >= 1e5 else 1 if us >= 1e4 else 2}f"


def _lines(header, rows, left):
    """Cells as a Markdown table whose first `left` columns stand to the left."""
    rule = ["---" if place < left else "---:" for place in range(len(header))]
    return "".join(f"| {' | '.join(line)} |\n" for line in [header, rule, *rows])


_CELLS = {
    "attention": (table_speedup.table, _layer_cells),
    "neighborhood": (table_neighborhood.table, _neighborhood_cells),
    "networks": (table_end_to_end.table, _network_cells),
    "pruned": (table_pruned.table, _pruned_cells),
}
_TABLES = {
    "speedup": _dense,
    "networks": _networks,
    "networks-summary": _networks_summary,
    "paper": _paper,
    "slices": _slices,
    "policy-summary": _policy,
    "pruned-summary": _pruned_summary,
}
NAMES = {f"{device}-{name}": (make, device) for device in FOLDERS for name, make in _TABLES.items()}
NAMES |= {"h200-network-plans": (_network_plans, "h200"), "h200-published-ragged": (_published_ragged, "h200")}
NAMES |= {
    "h200-gains": (_gains, "h200"),
    "h200-neighborhood": (_neighborhood, "h200"),
    "cpu-neighborhood": (_neighborhood, "cpu"),
}
NAMES |= {"h200-published-kernel": (_published_kernel, "h200"), "h200-budgets": (_budgets, "h200")}
NAMES |= {"h200-patterns": (_patterns, "h200"), "h200-pruned": (_pruned, "h200"), "headline": (_headline, None)}
NAMES |= {f"artifact-{what}": (_artifact, what) for what in ("experiments", "claims")}
NAMES |= {f"results-{kind}": (_results, kind) for kind in claims.KINDS if kind != "aim"}
