"""A made-up study for tests of tables and figures: every file that a configuration asks for, with invented timings."""

import csv
import math
from dataclasses import replace
from pathlib import Path

import numpy as np

from helpers.factories import make_limits, make_profile
from tilewright import devices, graph
from tilewright.attention import blocks, profile, schedule
from tilewright.attention.blocks.tiles import parse
from tilewright.core import artifacts
from tilewright_study import experiments
from tilewright_study.experiments import gains, neighborhood, networks
from tilewright_study.measure import rows as _rows
from tilewright_study.stages import path_pictures, video_pictures

DEVICE = {
    "kind": "cpu",
    "name": "Imaginary CPU",
    "threads": 2,
    "l1_bytes": 1,
    "l2_bytes": 1,
    "l3_bytes": 1,
    "versions": {},
}
# The experiments that the rows are of.
BENCH, NETWORK, RAGGED, PRUNED = "attention", "networks", "ragged", "pruned"
# Microseconds an image in attention; the rest of every network takes `REST_US`.
ATTENTION_US = {"native": 30_000, "dense": 90_000, "tilewright": 10_000}
REST_US = 20_000
TOO_LONG = "too many tokens: 99,999 over 1,000"


def write_csv(path, columns, rows):
    """Write `rows` under the `columns` of an experiment's name, or under those of a header; what they lack is blank."""
    kind = columns if columns in experiments.NAMES else None
    names = experiments.member(kind).Row.columns() if kind else columns.split(",")
    stated = {"kind": kind, "version": _rows.version_of(experiments.member(kind).Row)} if kind else {}
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", newline="") as stream:
        writer = csv.DictWriter(stream, names, restval="")
        writer.writeheader()
        writer.writerows(stated | row for row in rows)


def row(model, provider, p50_us, **changes):
    """One bench row; `p50_us` None: skipped."""
    timed = p50_us is not None
    tokens = int(model.split("-")[2]) + 1
    facts = {
        "model": model,
        "resolution": model.split("-")[2],
        "provider": provider,
        "status": "ok" if timed else "skipped",
        "reason": "" if timed else "no C++ compiler",
        "tokens": tokens,
        "entries": tokens * tokens // 8,
        "density": 0.125,
        "dtype": "float32",
        "batch": 1,
        "variant": "",
        "max_abs_error": 1e-6 if timed else "",
        "relative_error": 1e-6 if timed else "",
        "tolerance": 1e-5,
        "device": DEVICE["name"],
    }
    times = {"p20_us": 0.9 * p50_us, "p50_us": p50_us, "p80_us": 1.25 * p50_us, "rse": 0.01} if timed else {}
    return {**facts, **times, **changes}


def dense_us(model):
    return float(model.split("-")[2]) ** 2 / 10


def plan_us(model, order, solver):
    """Invented: later orders and the ILP are faster."""
    place = ["none", "rcm", "hc", "ic", "window"].index(order)
    return dense_us(model) / (1 + place) / (1.0 if solver == "greedy" else 1.2)


def pattern(model):
    """Windows of 8 tokens that interleave, and one global token; about 1/8 full."""
    n = 64
    window = np.arange(n) % 8
    mask = window[:, None] == window
    mask[0] = mask[:, 0] = True
    return graph.from_pattern(mask, meta={"model": model}, row_hint=window, col_hint=window)


def reorder(natural, order):
    n = natural.n_rows
    perm = np.arange(n) if order == "none" else np.argsort(natural.row_hint, kind="stable")
    return natural.reordered(perm, perm)


def write_graphs(root, config, pattern=pattern, reorder=reorder):
    """Graphs, blocks, profiles and schedules of every workload that the configuration names."""
    figures = config.figures
    for model in dict.fromkeys((*config.workloads, *figures.pattern_workloads, *figures.fill_workloads)):
        natural = pattern(model)
        for order in config.orders:
            here = reorder(natural, order)
            graph.save(root / f"results/graphs/{model}/{order}.npz", here)
            covers = {}
            for tile in dict.fromkeys((*config.tiles, *figures.pattern_tiles, *figures.fill_tiles, "64x1")):
                covers[tile] = blocks.extract(here, parse(tile), config.region_rows)
                blocks.save(root / f"results/blocks/{model}/{order}/{tile}.npz", covers[tile])
            if model in config.workloads:
                _write_schedules(root, config, model, order, covers)


def _write_schedules(root, config, model, order, covers):
    profiles = {}
    for tile in config.tiles:
        made = make_profile(covers[tile], split_keys=config.split_keys, launch_us=8.0)
        profiles[tile] = replace(made, device=DEVICE, device_id=devices.device_id(DEVICE))
        profile.save(root / f"results/profiling/{model}/{order}/{tile}.json", profiles[tile])
    for name, members in config.tile_sets.items():
        chosen = {tile: covers[tile] for tile in members}, {tile: profiles[tile] for tile in members}
        for solver in config.solvers:
            # Gurobi's licence may be missing.
            ours = "highs" if solver == "gurobi" else solver
            plan = schedule.solve(*chosen, make_limits(rounds=config.schedule.rounds), ours)
            plan = replace(plan, solver=solver)
            schedule.save(root / f"results/schedules/{model}/{order}/{name}.{solver}.json", plan)


def network_row(network, attention, batch, **changes):
    """One row of a whole network; attentions that `ATTENTION_US` does not hold are skipped."""
    facts = {
        "network": network,
        "family": network.partition("-")[0],
        "resolution": network.split("-")[2],
        "attention": attention,
        "batch": batch,
        "parameters": 6_700_000,
        "tolerance": 1e-4,
        "device": DEVICE["name"],
    }
    if attention not in ATTENTION_US:
        return {**facts, "status": "skipped", "reason": "no C++ compiler", **changes}
    attention_us, rest_us = batch * ATTENTION_US[attention], batch * REST_US
    p50 = attention_us + rest_us
    times = {"p20_us": 0.9 * p50, "p50_us": p50, "p80_us": 1.1 * p50, "attention_us": attention_us, "rest_us": rest_us}
    checked = {
        "rse": 0.01,
        "max_abs_error": 1e-6,
        "relative_error": 1e-6,
        "same_top1": 1,
        "first_call_s": 2,
        "images_per_s": batch / p50 * 1e6,
    }
    return {**facts, "status": "ok", **times, **checked, **changes}


def write_networks(root, config):
    """A file for each whole network."""
    for network in config.networks.workloads:
        batches = config.networks.attention.items()
        rows = [network_row(network, attention, batch) for attention, sizes in batches for batch in sizes]
        for plans in config.networks.plans:
            sizes, columns = config.networks.attention["tilewright"], networks.columns(plans)
            rows += [network_row(network, "tilewright", batch, **columns) for batch in sizes]
        write_csv(root / f"results/logs/networks/{network}.csv", "networks", rows)


def ragged_row(heads, head_dim, lengths, images, provider, us, call="attend", **changes):
    """One row of packed attention, in float16; `us` None: skipped."""
    facts = {
        **{"heads": heads, "head_dim": head_dim, "lengths": lengths, "images": images, "tokens": 123 * images},
        **{"provider": provider, "call": call, "exact": provider != "sdpa_flash", "dtype": "float16"},
        **{"tolerance": 6e-3, "device": DEVICE["name"]},
    }
    if us is None:
        return {**facts, "status": "skipped", "reason": "runs on an NVIDIA GPU only, found cpu", **changes}
    times = {"p20_us": 0.9 * us, "p50_us": us, "p80_us": 1.1 * us, "latency_us": us + 9, "host_us": 5 + us / 10}
    judged = {
        "max_abs_error": 1e-4,
        "relative_error": 1e-4,
        "byte_floor_us": us / 2,
        "floor_fraction": 0.5,
        "useful_gflops": 100 * images,
    }
    return {**facts, "status": "ok", **times, **judged, **changes}


def write_ragged(root, config):
    """A file for each shape of heads; every peer takes longer than the one before it."""
    for heads, head_dim in config.ragged.shapes:
        rows = []
        for low, high in config.ragged.lengths:
            for place, (provider, sizes) in enumerate(config.ragged.attention.items()):
                for images in sizes:
                    case = heads, head_dim, f"{low}-{high}", images
                    rows.append(ragged_row(*case, provider, None if provider == "flex" else (1 + place) * images))
                    if provider == "tilewright":
                        rows += [ragged_row(*case, provider, 2.0, call=call) for call in ("pack", "gather", "first")]
        write_csv(root / f"results/logs/ragged/{heads}x{head_dim}.csv", "ragged", rows)


# Images a second of a batching, each, in every mode.
PRUNED_RATES = {"padded": 1000, "padded_unfused": 800, "padded_kept": 1500, "gathered": 1600, "ragged": 2400}


def pruned_row(network, setting, batching, mode, batch, fewer=0, **changes):
    """One row of a pruned network, `fewer` tokens kept than usual; batchings that `PRUNED_RATES` does not hold are
    skipped, as are gathered ones of more than one image."""
    _, variant, size, pruner = network.split("-")
    facts = {
        **{"network": network, "variant": variant, "resolution": size, "pruner": pruner, "setting": setting},
        **{"batching": batching, "mode": mode, "batch": batch, "dtype": "float16", "tokens": 197},
        **{"fewest_kept": 90 - fewer, "most_kept": (90 if batch == 1 else 110) - fewer},
        **{"spread": 0 if batch == 1 else 20},
        **{"tolerance": 0.007, "device": DEVICE["name"]},
    }
    if batching not in PRUNED_RATES or (batching == "gathered" and batch > 1):
        return {**facts, "status": "skipped", "reason": "lengths differ", **changes}
    p50 = 1e6 * batch / PRUNED_RATES[batching]
    times = {"p20_us": 0.9 * p50, "p50_us": p50, "p80_us": 1.1 * p50, "images_per_s": PRUNED_RATES[batching]}
    packed = {"pack_us": 0.02 * p50, "pack_share": 0.02} if batching == "ragged" else {}
    judged = {"inputs": 16, "same_tokens": 15, "max_abs_error": 1e-3, "relative_error": 1e-3, "same_top1": 1}
    judged |= {"same_top1_all": 15 / 16, "largest_logit": 2, "rse": 0.01}
    return {**facts, "status": "ok", **times, **packed, **judged, **changes}


def write_pruned(root, config):
    """A file for each pruned network."""
    for network in config.pruned.workloads:
        rows = [
            pruned_row(network, f"keep_ratio={number}", batching, mode, batch, fewer=30 * number)
            for number, _ in enumerate(config.pruned.settings.get(network, [{}]))
            for mode, sizes in config.pruned.modes.items()
            for batch in sizes
            for batching in config.pruned.batching
        ]
        write_csv(root / f"results/logs/pruned/{network}.csv", "pruned", rows)


# Top-1 of a pruner in a training, less what it loses; images a second more than padded.
ACCURACY = {"threshold_l2": 0.80, "dynamicvit": 0.86, "evit": 0.87, "ats": 0.84}


def accuracy_row(network, training, pruner, setting, batching, mode, batch, **changes):
    """One row of a trained network; packed ones name one image otherwise than padded ones."""
    own = pruned_row(f"{network}-{pruner}", setting, batching, mode, batch)
    own |= {"network": network, "pruner": pruner, "training": training, "images": 5000, "crops": 1000}
    own |= {"predictor_images": 800} if pruner == "dynamicvit" else {}
    top1 = 0.9 if batching == "unpruned" else ACCURACY[pruner] + 0.01 * training
    own |= {"top1": top1, "top5": 0.99, "novel_top1": top1 - 0.2, "kept": 0.4}
    if batching == "unpruned":
        own |= {"status": "ok", "reason": "", "p50_us": 1e6 * batch / 1200, "images_per_s": 1200, "rse": 0.01}
    else:
        own["changed"] = int(batching == "ragged")
    return own | changes


def write_accuracy(root, config):
    """A file for each training."""
    section = config.pruned_accuracy
    for name, seeds in section.networks.items():
        for seed in seeds:
            rows = [
                accuracy_row(name, seed, pruner, f"keep_ratio={number}", batching, mode, batch)
                for pruner, settings in section.pruners.items()
                for number, _ in enumerate(settings)
                for mode, sizes in section.modes.items()
                for batch in sizes
                for batching in section.batching
            ]
            write_csv(root / f"results/logs/pruned_accuracy/{name}.{seed}.csv", "pruned_accuracy", rows)


def accelerator_row(network, path, place, vector, **changes):
    """One row of a path, the `place`-th of its network; each costs a tenth less than the one before it."""
    share = 0.9**place
    facts = {"network": network, "path": path, "whole": int(place == 0), "status": "ok", "device": "a cost model"}
    sizes = {"vector": vector, "lanes": 8, "elements": 4, "weights_kib": 32, "inputs_kib": 16, "outputs_kib": 16}
    costs = {"cycles": 1e6 * share / vector, "energy_uj": 50 * share, "decoder_cycles": 1e5 * share / vector}
    costs |= {"decoder_uj": 5 * share, "macs": int(1e9 * share), "padded_macs": int(1.1e9 * share)}
    return {**facts, **sizes, **costs, "area_mm2": 0.1 * vector, "left_out_mb": 20 * share, **changes}


def write_accelerator(root, config):
    """A file for each network."""
    for network, paths in config.accelerators.networks.items():
        rows = [accelerator_row(network, path, at, vector) for vector in (8, 16) for at, path in enumerate(paths)]
        if rows:
            write_csv(root / f"results/logs/accelerator/{network}.csv", "accelerator", rows)


def configure_row(case, component="", **changes):
    """One row of a stream configured by an engine, or of a component of it."""
    name, _, engine = case.rpartition(".")
    known = {"stream": name, "part": "top", "memory": "pub", "engine": engine, "solved_by": engine, "cycles": 327}
    known["status"] = "ok"
    whole = {"levels": 4, "extents": 640, "strides": 16, "starts": 16, "model_cycles": 391, "rtl_cycles": 391}
    own = {"component": component, "first": 1.5} if component else whole
    return known | own | {"seconds": 2.0 if engine == "bmc" else 0.01, "device": DEVICE["name"]} | changes


def push_row(app, memory, **changes):
    """The row of a mapped app."""
    known = {"app": app, "memory": memory, "part": "whole", "status": "ok", "tiles": 2 if memory == "dp" else 1}
    known |= {
        "pes": 10,
        "registers": 6,
        "last_cycle": 4095,
        "occupancy": 0.7,
        "words": 3844,
        "ports": 9,
        "saved": 8 / 9,
    }
    known |= {"area_um2": 13_700, "energy_nj": 20.0, "wrong_model": 0, "wrong_rtl": 0, "asked": 1, "agreed": 1}
    return known | {"map_s": 0.2, "run_s": 0.1, "device": DEVICE["name"]} | changes


def write_push(root, config):
    """A file for each app and memory: the whole, live words of a buffer and its two ports."""
    for app in config.push.apps:
        for memory in config.push.memories:
            held = {"app": app, "memory": memory, "status": "ok", "buffer": "in", "device": DEVICE["name"]}
            kept = held | {"part": "live", "modulus": 129}
            live = [kept | {"cycle": cycle, "live": min(cycle, 129)} for cycle in range(0, 4096, 256)]
            port = held | {"part": "port", "first": 0, "last": 4031, "words": 4032}
            ports = [port | {"side": "in", "name": "in"}, port | {"side": "out", "name": "in@64", "first": 64}]
            path = root / f"results/logs/push/{app}.{memory}.csv"
            write_csv(path, "push", [push_row(app, memory), *live, *ports])


def push_attention_row(model, **changes):
    """The row of a workload that is streamed."""
    known = {"model": model, "status": "ok", "heads": 1, "head_dim": 48, "tokens": 3137, "tiles": 96, "cycles": 366_976}
    known |= {"cycles_global": 370_897, "bound": 345_744, "ms": 0.412, "delivered": 308_308, "wrong": 0, "conflicts": 0}
    known |= {"queries": 0, "words": 301_056, "gathered": 29_597_568, "rtl_wrong": 0, "error": 1e-6, "tolerance": 1e-4}
    return known | {"device": DEVICE["name"]} | changes


def write_push_attention(root, config):
    """A file for each workload."""
    for model in config.push.attention:
        write_csv(root / f"results/logs/push_attention/{model}.csv", "push_attention", [push_attention_row(model)])


def push_streams_row(model, reorder, tile, **changes):
    """The row of a key stream."""
    keys = 1200 if reorder == "none" else 900
    known = {"model": model, "reorder": reorder, "tile": tile, "status": "ok", "tokens": 3137, "keys": keys}
    return known | {"pieces": 30, "words": 200, "longest": 96, "wrong": 0, "device": DEVICE["name"]} | changes


def write_push_streams(root, config):
    """A file for each workload."""
    for model in config.push.attention:
        rows = [push_streams_row(model, order, tile) for order in config.orders for tile in config.tiles]
        write_csv(root / f"results/logs/push_streams/{model}.csv", "push_streams", rows)


def worth_row(side, asked, part, provider, us, **changes):
    """One row of a grid; `us` None: skipped."""
    known = {"part": part, "side": side, "tokens": side**2 + 1, "square": 1, "asked": asked, "density": asked}
    known |= {"provider": provider, "batch": 1, "heads": 12, "head_dim": 64, "dtype": "float32", "tolerance": 1e-4}
    known |= {"device": DEVICE["name"], "compiled": "False" if part == "block" else "", "plan_s": 1.5}
    if us is None:
        return known | {"status": "skipped", "reason": TOO_LONG} | changes
    times = {"p20_us": 0.9 * us, "p50_us": us, "p80_us": 1.1 * us, "rse": 0.005, "relative_error": 1e-6}
    return known | times | {"status": "ok"} | changes


def write_worth(root, config):
    """A file for each grid: plans take a share of dense attention and something more, the rest of a block the same."""
    for side, _ in config.worth.grids:
        dense, rest = float(side**4) / 100, 20.0 * side**2
        rows = [
            worth_row(side, 1.0, "layer", "sdpa_dense", dense),
            worth_row(side, 1.0, "layer", "sdpa_flash", None),
            worth_row(side, 1.0, "block", "sdpa_dense", dense + rest),
        ]
        for asked in config.worth.densities:
            ours, window = 1.2 * asked * dense + 1000, {"window": 2 * int(asked * side) // 2 + 1}
            rows += [
                worth_row(side, asked, "layer", "tilewright", ours, **window),
                worth_row(side, asked, "block", "tilewright", ours + rest, **window),
            ]
            if asked in config.worth.masked_densities:
                rows.append(worth_row(side, asked, "layer", "sdpa_mask", 1.1 * dense, **window))
        write_csv(root / f"results/logs/worth/{side}.csv", "worth", rows)


def gains_row(network, form, way, batch, us, **changes):
    """One row of a whole network in a way of calling; `us` None: skipped."""
    known = {"network": network, "family": gains.parse(network)[0], "resolution": 224, "form": form, "way": way}
    known |= {"batch": batch, "dtype": "float32", "tolerance": 1e-4, "device": DEVICE["name"]}
    if us is None:
        return known | {"status": "skipped", "reason": f"{way}: needs a GPU"} | changes
    times = {"p20_us": 0.9 * us, "p50_us": us, "p80_us": 1.1 * us, "rse": 0.01, "relative_error": 1e-6}
    return known | times | {"status": "ok"} | changes


def write_gains(root, config):
    """A file for each network; every form takes longer than the one before it."""
    for network in config.gains.workloads:
        forms = config.gains.forms[gains.parse(network)[0]]
        rows = [
            gains_row(network, form, way, batch, 1000.0 * batch * place)
            for batch in config.gains.batches
            for place, (form, ways) in enumerate(forms.items(), 1)
            for way in ways
        ]
        write_csv(root / f"results/logs/gains/{network}.csv", "gains", rows)


def neighborhood_row(case, provider, us, **changes):
    """One row of a layer on a grid; `us` None: skipped."""
    found = neighborhood.layer(case)
    known = {"case": case, "grid": "x".join(map(str, found.grid)), "axes": len(found.grid), "provider": provider}
    known |= {"window": "x".join(map(str, found.rule.window)), "tokens": math.prod(found.grid), "dtype": "float32"}
    known |= {"heads": found.heads, "head_dim": found.head_dim, "pairs": found.rule.pairs(found.grid)}
    known |= {"device": DEVICE["name"], "tolerance": 1e-4}
    if us is None:
        return known | {"status": "skipped", "reason": TOO_LONG} | changes
    times = {"p20_us": 0.9 * us, "p50_us": us, "p80_us": 1.1 * us, "rse": 0.005, "relative_error": 1e-6}
    return known | times | {"status": "ok", "useful_gflops": 4e-3 * known["pairs"] / us} | changes


def write_neighborhood(root, config):
    """A file for each layer: boxes of which the chosen one is nearly the fastest, and contenders that are slower."""
    for case in config.neighborhood.layers:
        us = neighborhood.layer(case).rule.pairs(neighborhood.layer(case).grid) / 1000
        rows = [
            neighborhood_row(case, "tilewright", us, box="4x4", chosen="True", predicted=1, visited=int(2e3 * us)),
            neighborhood_row(
                case, "tilewright", 0.98 * us, box="2x8", chosen="False", predicted=1.01, visited=int(3e3 * us)
            ),
            neighborhood_row(
                case, "tilewright", 1.3 * us, box="8x8", chosen="False", predicted=1.2, visited=int(4e3 * us)
            ),
            neighborhood_row(case, "gather", 20 * us, variant="eager"),
            neighborhood_row(case, "flex", 3 * us, variant="boxes"),
            neighborhood_row(case, "natten", None),
            neighborhood_row(case, "sdpa_dense", 9 * us, variant="torch"),
        ]
        write_csv(root / f"results/logs/neighborhood/{case}.csv", "neighborhood", rows)


def write_configure(root, config):
    """A file for each stream and engine."""
    for stream, engines in config.push.streams.items():
        for engine in engines:
            case = f"{stream}.{engine}"
            rows = [configure_row(case), *([configure_row(case, "agg")] if engine == "bmc" else [])]
            write_csv(root / f"results/logs/configure/{case}.csv", "configure", rows)


# Blocks of the synthetic network with paths: what leaving one out saves, in microseconds, and loses, in mean IoU.
SAVED, LOST = (400.0, 300.0, 250.0, 250.0, 200.0, 200.0, 150.0, 150.0), (0.08, 0.02, 0.05, 0.01, 0.04, 0.01, 0.06, 0.02)


def path_row(case, rung, skipped, part, **changes):
    """One row of a path that skips the blocks of these numbers, of eight; times and losses add up."""
    bits = "".join("01"[at not in skipped] for at in range(8))
    blocks, knobs = ".".join(bits[at : at + 2] for at in range(0, 8, 2)), "levels=1234 scale=1 decoder=folded"
    saved, lost = sum(SAVED[at] for at in skipped), sum(LOST[at] for at in skipped) / (1 + (rung == "statistics"))
    us = 3000 - saved
    facts = {"case": case, "network": "segformer-b0-64", "checkpoint": "ab12", "data": "scenes", "rung": rung}
    facts |= {"base": f"11.11.11.11 {knobs}", "part": part, "path": f"{blocks} {knobs}", "dtype": "float32", "batch": 1}
    facts |= {"macs": int(5e7 - 4e6 * len(skipped)), "skipped": len(skipped), "status": "ok"}
    facts |= {
        "device": DEVICE["name"],
        "p50_us": us,
        "saved_us": saved,
        "predicted_us": 1.01 * us,
        "fit": 0.6 - lost,
        "lost": lost,
    }
    facts |= {"predicted": 0.605 - lost, "loss_error": 0.004, "pairs": "stage, log", "choice": 0.59 - lost}
    if part in ("single", "drawn", "seen"):
        facts["held_out"] = 0.61 - lost
    if part == "seen" and "proposed" not in changes:
        del facts["p50_us"], facts["saved_us"]
    if part in ("base", "proposed"):
        facts |= {"p99_us": 1.1 * us, "promise_us": 1.2 * us, "test": 0.58 - lost, "novel": 0.4 - lost}
    return facts | changes


def write_paths(root, config):
    """A file of paths and one of streams for each network."""
    for case in experiments.cases("paths", config):
        rows = []
        for rung in config.paths.rungs:
            rows.append(path_row(case, rung, (), "base"))
            rows += [path_row(case, rung, (at,), "single") for at in range(8)]
            rows += [path_row(case, rung, sets, "drawn") for sets in ((0, 1), (2, 5, 7))]
            rows += [path_row(case, rung, (3, 6), "seen"), path_row(case, rung, (2, 3), "seen", proposed="highs 9")]
            rows += [path_row(case, rung, sets, "proposed") for sets in ((1, 3), (1, 3, 5, 7))]
        write_csv(root / f"results/logs/paths/{case}.csv", "paths", rows)
        write_path_pictures(root / f"results/logs/paths/{case}.npz", case)
        known = {"case": case, "network": "segformer-b0-64", "rung": "trained", "dtype": "float32", "status": "ok"}
        known |= {"device": DEVICE["name"], "part": "frames"}
        rows = []
        for trace in config.stream.traces:
            for place, contender in enumerate(config.stream.contenders):
                own = known | {"trace": trace, "contender": contender}
                # The oracle is never late. A static network is named by its own case.
                late, path = (0.0 if contender == "oracle" else 0.1 * place), (case if contender == "static" else "x")
                for frame in range(10):
                    told = {"frame": frame, "budget_us": 3000, "path": path, "promised_us": 2900, "slowdown": 1}
                    rows.append(own | told | {"measured_us": 2500 + 100 * frame, "loaded": float(frame > 5)})
                all_frames = {
                    "frames": 10,
                    "missed": late,
                    "miou": 0.6,
                    "mean_miou": 0.5 + 0.01 * place,
                    "timely_miou": (0.5 + 0.01 * place) * (1 - late),
                    "p50_us": 2900,
                }
                rows.append(own | all_frames | {"p99_us": 3400, "paths": 3, "pick_us": 0.5})
        rows.append(known | {"part": "switching", "path": "x | y", "measured_us": 4.0})
        write_csv(root / f"results/logs/stream/{case}.csv", "stream", rows)


def write_path_pictures(path, case):
    """Two scenes, and what two paths see of them."""
    drawn = np.random.default_rng(0)
    arrays = {"pictures": drawn.integers(0, 255, (2, 8, 8, 3), np.uint8)}
    arrays |= {
        "labels": drawn.integers(0, 3, (2, 8, 8), np.uint8),
        "seen": drawn.integers(0, 3, (2, 2, 8, 8), np.uint8),
    }
    texts = [f"{blocks} levels=1234 scale=1 decoder=folded" for blocks in ("11.11.11.11", "10.11.11.10")]
    header = {"device": DEVICE["name"], "network": case, "classes": ["background", "face", "hand"], "paths": texts}
    header |= {"p50_us": [3000, 2000], "miou": [0.5, 0.4]}
    artifacts.write_npz(path, path_pictures.KIND, path_pictures.VERSION, arrays, header)


def slices_row(case, order, provider, us, **changes):
    """One row of attention by slice lists in `case`; `us` None: no time was taken."""
    shape, grid = case.split("-")
    # The case of a network is called after its weights.
    trained = "x" not in shape
    heads, head_dim = ["6", "128"] if trained else shape.split("x")
    sizes = [int(size) for size in grid.split("x")]
    source = {"maps": "trained", "network": shape, "weights": "9 steps", "clip_noise": 0.5}
    facts = {
        **(source if trained else {"maps": "planted"}),
        **{"heads": heads, "head_dim": head_dim, "grid": grid, "tokens": np.prod(sizes)},
        **{"token_order": order, "provider": provider, "call": "attend" if provider else "", "status": "ok"},
        **{"dtype": "float32", "density": 1.0, "recall": 1.0, "device": DEVICE["name"]},
    }
    times = {} if us is None else {"p20_us": 0.9 * us, "p50_us": us, "p80_us": 1.1 * us, "rse": 0.01}
    judged = {} if us is None else {"relative_error": 1e-6, "tolerance": 1e-5, "useful_gflops": 1e6 / us}
    return {**facts, **times, **judged, **changes}


def slices_skipped(case, order, provider):
    """One row of a baseline that cannot run."""
    return slices_row(case, order, provider, None, status="skipped", reason="runs on an NVIDIA GPU only, found cpu")


def slices_lists(group, chosen_by, density, recall, **how):
    """Columns of lists."""
    errors = {"l1_error": 1 - recall, "cosine": recall, "largest_error": 1, "error_bound": 2}
    kept = {"least_density": density, "most_density": density, "least_recall": recall}
    return {"group": group, "chosen_by": chosen_by, "density": density, "recall": recall, **errors, **kept, **how}


# What groups keep of attention beside slices, and the time that their kernel takes beside that of slices.
GROUP_RECALL, GROUP_TIME = {"128x1": 1.0, "128x64": 0.9, "128x128": 0.8}, {"128x1": 1.0, "128x64": 0.9, "128x128": 0.8}
DENSE_US = 1000.0


def write_slices(root, config):
    """A file for each case: slices take 1.2 times the time that is in proportion to the keys kept, choosing a tenth of
    dense attention."""
    for case in experiments.cases("slices", config):
        rows = [row for sparsity in config.slices.sparsities for row in _at_sparsity(config.slices, case, sparsity)]
        write_csv(root / f"results/logs/slices/{case}.csv", "slices", rows)


def _at_sparsity(settings, case, sparsity):
    keep, place = 1 - sparsity, (case, settings.order)
    ours_us = 1.2 * keep * DENSE_US
    rows = [slices_row(*place, "sdpa_dense", DENSE_US), slices_skipped(*place, "flex")]
    for group in settings.groups:
        lists = slices_lists(group, "oracle", keep, GROUP_RECALL[group] * (1 - sparsity / 10), keep=keep)
        rows.append(slices_row(*place, "tilewright", GROUP_TIME[group] * ours_us, **lists))
    uneven = slices_lists("128x1", "oracle", keep, 0.99, mass=0.98)
    rows.append(slices_row(*place, "tilewright", 1.25 * keep * DENSE_US, **uneven))
    for name in settings.predictors:
        lists = slices_lists("128x1", name, keep, 0.95, keep=keep)
        times = {"attend": ours_us, "predict": 0.1 * DENSE_US, "predict_attend": ours_us + 0.1 * DENSE_US}
        rows += [slices_row(*place, "tilewright", us, **{**lists, "call": call}) for call, us in times.items()]
    return [{**row, "sparsity": sparsity} for row in rows]


def write_recall(root, config):
    """A file for each case: blocks keep twice the keys of slices, predictors a half more, later orders more."""
    settings = config.recall
    for case in experiments.cases("recall", config):
        rows = []
        for place, order in enumerate(settings.orders):
            for target in settings.recalls:
                timed = place == 0 and target == settings.timed
                if timed:
                    rows.append(slices_row(case, order, "sdpa_dense", DENSE_US, target=target))
                least = 0.3 * target * (1 + place / 2)
                kept = {name: least if name.endswith("x1") else 2 * least for name in settings.groups}
                lists = [slices_lists(name, "oracle", density, target, mass=target) for name, density in kept.items()]
                if place == 0:
                    lists += [slices_lists("128x1", name, 1.5 * least, target) for name in settings.predictors]
                for facts in lists:
                    us = 1.2 * facts["density"] * DENSE_US if timed else None
                    provider = "tilewright" if timed else ""
                    rows.append(slices_row(case, order, provider, us, **facts, target=target))
        write_csv(root / f"results/logs/recall/{case}.csv", "recall", rows)


# Error of a single share of the keys, over that share; a chooser's is this share of it.
BUDGET_ERROR, BUDGET_LESS = 0.02, {"single": 1.0, "greedy": 0.8, "highs": 0.7, "mass": 1.1}


def write_budgets(root, config):
    """A file for each case: errors fall with the share, and by chooser as `BUDGET_LESS` says; Gurobi is missing."""
    settings = config.budgets
    for case in experiments.cases("budgets", config):
        dense = slices_row(case, "", "", DENSE_US, chosen_by="dense", error=0.0)
        rows = [dense]
        for keep in settings.keeps:
            for name in settings.choosers:
                row = {"chosen_by": name, "keep": keep, "run_us": 10 * keep * DENSE_US, "recall": 0.9, "density": keep}
                if name not in BUDGET_LESS:
                    rows.append(slices_row(case, "", "", None, **row) | {"status": "skipped", "reason": "no licence"})
                else:
                    row["error"] = BUDGET_ERROR / keep * BUDGET_LESS[name]
                    rows.append(slices_row(case, "", "", keep * DENSE_US, **row))
        known = experiments.member("budgets").Row.columns()
        rows = [{"case": case} | {name: value for name, value in row.items() if name in known} for row in rows]
        write_csv(root / f"results/logs/budgets/{case}.csv", "budgets", rows)


def video_row(case, name, chosen, us, **changes):
    """One row of a pass; `us` None: no time was taken."""
    facts = {
        **{"network": case, "weights": "9 steps", "layers": 2, "heads": 3, "grid": "3x4x5", "tokens": 60},
        **{"attention": name, "by": chosen.by, "every": chosen.every, "mode": "eager", "status": "ok"},
        **{"dtype": "float32", "density": 1.0 if chosen.by == "dense" else 0.2, "device": DEVICE["name"]},
        **{"relative_error": 1e-6, "tolerance": 1e-5, "flops_share": 1.0 if chosen.by == "dense" else 0.6},
    }
    parts = {} if us is None else {"attend_us": 0.3 * us, "predict_us": 0.1 * us, "rest_us": 0.6 * us}
    times = {} if us is None else {"p20_us": 0.9 * us, "p50_us": us, "p80_us": 1.1 * us, "rse": 0.01}
    return {**facts, **times, **parts, **changes}


def write_video(root, config):
    """A file for each network, each attention a tenth faster than the one before, and pictures of it."""
    for case in experiments.cases("video", config):
        rows = [
            video_row(case, name, chosen, 1000.0 * 0.9**place)
            for place, (name, chosen) in enumerate(config.video.attention.items())
        ]
        write_csv(root / f"results/logs/video/{case}.csv", "video", rows)
    for path in video_pictures.needs(config):
        write_pictures(root / path)


def write_pictures(path):
    """Maps of two sources."""
    drawn, grid = np.random.default_rng(0), (3, 4, 5)
    arrays, maps = {}, {"planted": ["local", "content"], "trained": ["layer 0, head 0"]}
    for source, heads in maps.items():
        shares = drawn.random((len(heads), *grid)).astype(np.float32)
        arrays |= {f"maps.{source}.shares": shares, f"maps.{source}.kept": shares > 0.7}
        arrays |= {f"maps.{source}.group": drawn.random(grid) > 0.5}
    header = {"device": DEVICE["name"], "mass": 0.9, "noise": 0.5, "grid": grid, "maps": maps, "network": "tiny"}
    header |= {"weights": "9 steps", "reason": ""}
    artifacts.write_npz(path, video_pictures.KIND, video_pictures.VERSION, arrays, header)


def write_attention(root, config, blank=()):
    """Files of baselines and schedules; `blank`: (model, order) whose plans were skipped."""
    for model in config.workloads:
        baselines = [
            row(model, "sdpa_dense", dense_us(model), reorder="none"),
            row(model, "sdpa_mask", 2 * dense_us(model), reorder="none"),
            row(model, "flex", None, reorder="none"),
        ]
        write_csv(root / f"results/logs/{model}/baselines.csv", "attention", baselines)
        for order in config.orders:
            for name, solver in config.attention.runs:
                p50 = None if (model, order) in blank else plan_us(model, order, solver)
                plan = {"reorder": order, "tiles": name, "solver": solver}
                predicted = {"predicted_us": 1.1 * plan_us(model, order, solver), "gap": 0.0}
                rows = [row(model, "tilewright", p50, ordered="True", **plan, **predicted)]
                rows += [row(model, "tilewright", p50 and 1.5 * p50, ordered="False", **plan)]
                write_csv(root / f"results/logs/{model}/{order}/{name}.{solver}.csv", "attention", rows)


def write_heatmap(root, config):
    """A file for each resolution."""
    for resolution in config.heatmap.resolutions:
        cells = [_cell(config, resolution, patch) for patch in config.heatmap.patches]
        write_csv(root / f"results/logs/heatmap/{resolution}.csv", "heatmap", cells)


def write_orders(root, config):
    """The file of times: larger graphs and later orders take longer."""
    rows = [
        {
            **{"model": model, "tokens": 100 * 4**size, "entries": 1000 * 4**size, "distinct_rows": 10},
            **{"reorder": order, "seconds": 0.01 * 3**size * (place + 1), "work_fraction": 0.3 / 2**size / (place + 1)},
            **{"peak_rss_bytes": 2**30, "device": DEVICE["name"]},
        }
        for size, model in enumerate(config.order_times.workloads)
        for place, order in enumerate(config.orders)
    ]
    write_csv(root / "results/logs/orders/times.csv", "orders", rows)


def write_derived(root, config, name):
    """Files of an experiment for which nothing is invented: rows of its type as it plans them, each number 1."""
    of = experiments.member(name)
    for case, path in zip(experiments.cases(name, config), experiments.files(name, config), strict=True):
        known = dict.fromkeys(of.Row.numbers(), 1) | {"device": DEVICE["name"]}
        write_csv(root / path, name, [known | planned for planned in of.planned(case, of.settings(config, case))])


# Times that make sense, for those whose tables and figures are judged by what they show. Streams come with paths.
INVENTED = {
    **{"networks": write_networks, "ragged": write_ragged, "pruned": write_pruned, "pruned_accuracy": write_accuracy},
    **{"accelerator": write_accelerator, "configure": write_configure, "push": write_push, "worth": write_worth},
    "gains": write_gains,
    **{"push_attention": write_push_attention, "push_streams": write_push_streams, "paths": write_paths},
    **{
        "slices": write_slices,
        "recall": write_recall,
        "video": write_video,
        "budgets": write_budgets,
        "heatmap": write_heatmap,
    },
    **{"neighborhood": write_neighborhood, "orders": write_orders, "stream": lambda root, config: None},
}


def write_logs(root, config, blank=()):
    """Files of every experiment; `blank`: (model, order) whose plans were skipped."""
    write_attention(root, config, blank)
    for name in experiments.NAMES:
        if name in INVENTED:
            INVENTED[name](root, config)
        elif name != "attention":
            write_derived(root, config, name)


def _cell(config, resolution, patch):
    tokens = (resolution // patch) ** 2 + 1
    cell = {"resolution": resolution, "patch": patch, "tokens": tokens, "device": DEVICE["name"]}
    if tokens > config.heatmap.max_tokens:
        return {**cell, "status": "skipped", "reason": TOO_LONG}
    speedup = 0.8 + tokens**0.5 / 40
    return {
        **cell,
        "status": "ok",
        "dense": "sdpa_dense",
        "dense_p50_us": 100.0 * speedup,
        "plan_p50_us": 100.0,
        "speedup": speedup,
        "max_abs_error": 1e-6,
    }
