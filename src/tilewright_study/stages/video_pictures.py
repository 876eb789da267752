"""What figures of video networks draw: attention maps with the keys that were chosen."""

import math

import msgspec

from tilewright import devices
from tilewright.core import artifacts
from tilewright.core.errors import Unavailable
from tilewright_study import experiments
from tilewright_study.cli import settings

KIND, VERSION = "video pictures", 1
# Kinds of planted heads, and the share of keys that lists of them keep.
PLANTED = (("local", 0.1), ("spatial", 0.2), ("temporal", 0.4), ("content", 0.2))
# Heads of a network; the share of attention that lists are to keep; the share of noise in a network's clip.
HEADS, MASS, NOISE = 4, 0.9, 0.5
# Queries of a group, and of a pool of the predictor.
ROWS, POOL = 128, 32


def run(case, output, device, seed, stated):
    """Write the pictures of a `case` of the experiment ``video`` to `output`, an ``.npz``; stated: its settings.

    Maps are planted and, where the case has weights that are there, those of its network; ``maps.<source>.shares``
    float32 [heads, T, H, W] are the shares of a group's attention that keys get, ``.kept`` bool those that `predict`
    lists, ``.group`` bool the queries. What is missing has its reason in the header. Raises `TilewrightError`.
    """

    from tilewright import networks
    from tilewright.masks import wan as pattern
    from tilewright.networks import wan
    from tilewright_study.measure import weights as _weights
    from tilewright_study.scenes import captured, planted

    chosen = experiments.parse("video", settings(stated))
    devices.describe(device)
    place = devices.facts(device).TORCH_DEVICE
    header = {"device": devices.describe(device)["name"], "mass": MASS, "noise": NOISE, "reason": ""}
    weights = chosen.weights
    name = case if weights is None else weights.network
    _, options = networks.parse_video(name, {} if weights is None else weights.options)
    network, origin = None, {}
    if weights is None:
        header["reason"] = f"{case}: its weights are random"
    else:
        try:
            network, origin = _weights.load(weights, place)
        except Unavailable as reason:
            header["reason"] = str(reason)
    grid = pattern.grid(msgspec.convert(options, wan.Options).latents)
    arrays, header = {}, header | {"network": name, "weights": origin.get("weights", ""), "grid": list(grid)}
    # On a small grid a group is itself a large share of the tokens.
    least = min(0.9, 2 * ROWS / math.prod(grid))
    heads = tuple(planted.Head(kind, max(density, least), MASS) for kind, density in PLANTED)
    made = planted.tokens(grid, pattern.HEAD_DIM, heads, seed=seed, device=place)
    arrays |= _maps("planted", made.q, made.k, grid)
    header["maps"] = {"planted": [head.kind for head in heads]}
    if network is None:
        return _write(output, arrays, header)
    # A head of each of some layers, another one each time.
    layers = captured.spread(network.options.depth, HEADS)
    clean = captured.photographs(grid, seed=seed, device=place) if origin["maps"] == "trained" else None
    found = captured.tokens(network, grid, NOISE, layers, clean=clean, seed=seed)
    each = len(found.heads) // len(layers)
    taken = [at * each + (at + again) % each for again in range(-(-HEADS // len(layers))) for at in range(len(layers))]
    arrays |= _maps(origin["maps"], found.q[:, taken], found.k[:, taken], grid)
    named = [f"layer {found.heads[at][0]}, head {found.heads[at][1]}" for at in taken]
    header["maps"][origin["maps"]] = named
    return _write(output, arrays, header)


def _maps(source, q, k, grid):
    """Arrays of one source: the middle group of each head of q, k [1, H, N, D], tokens in raster order."""
    import torch

    from tilewright import slices
    from tilewright.slices import orders
    from tilewright_study.measure import slice_shares

    order = torch.from_numpy(orders.order("hilbert", grid)).to(q.device)
    back = torch.argsort(order)
    q, k = q[:, :, order].contiguous(), k[:, :, order].contiguous()
    lists = slices.predict(q, k, by="pooled", pool=POOL, rows=ROWS, mass=MASS, budget=1.0)
    group = (q.shape[2] // ROWS) // 2
    chosen = torch.tensor([group], device=q.device)
    shares = [slice_shares.group_shares(q[0, h], k[0, h], chosen, rows=ROWS)[0] for h in range(q.shape[1])]
    kept = torch.zeros(q.shape[1], q.shape[2], dtype=torch.bool, device=q.device)
    for head in range(q.shape[1]):
        count = int(lists.counts[0, head, group])
        kept[head, lists.keys[0, head, group, :count].long()] = True
    queries = torch.zeros(q.shape[2], dtype=torch.bool, device=q.device)
    queries[group * ROWS : (group + 1) * ROWS] = True
    named = {"shares": torch.stack(shares).float(), "kept": kept, "group": queries}
    return {f"maps.{source}.{what}": x[..., back].unflatten(-1, grid).cpu().numpy() for what, x in named.items()}


def _write(output, arrays, header):
    artifacts.write_npz(output, KIND, VERSION, arrays, header, compress=True)


def read(path):
    """``(arrays, header)`` of pictures. Raises `ArtifactError`."""
    return artifacts.read_npz(path, KIND, VERSION)


def needs(config):
    """The files of pictures that a study makes, one for each network with weights."""
    cases = experiments.cases("video", config)
    return [f"{experiments.LOGS}video/{case}.npz" for case in cases if case in config.video.weights]
