"""Whole networks in several forms and ways of calling: each result is compared with the oracle and only then timed, in
turns with the others of its batch (stage T5).

A row that did not pass has the status ``failed`` and no time; one that could not run has ``skipped``; both say why.
"""

import copy
import gc
import time
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from tilewright import devices, networks
from tilewright.attention.profile import DTYPES
from tilewright.core import _internals, registry, timing
from tilewright.core.errors import PatternError, Unavailable
from tilewright.networks import attentions
from tilewright.nn import patterns
from tilewright_study.experiments.gains import COMPILED, EAGER, GRAPH, REDUCE, TIMM, parse
from tilewright_study.experiments.networks import run as _networks
from tilewright_study.experiments.networks import side
from tilewright_study.measure import oracles
from tilewright_study.measure.checks import checked, refusal, settled
from tilewright_study.measure.rows import machine, now

CHECKS = _networks.CHECKS[:1]
# What torch's compiler, a capture and a form's tables refuse by.
_REFUSALS = (RuntimeError, AssertionError, PatternError)
# Calls by reduce-overhead before its graph is replayed.
RECORDED = 3


def run(case, settings, how):
    """Yield the rows of the network `case`. Raises `TilewrightError`."""
    try:
        network = Case(case, settings, how)
    except Unavailable as reason:
        known = _known(case, how) | {"status": "skipped", "reason": str(reason), "time": now()}
        of_all = [call for batch in settings.batches for call in calls(settings, batch)]
        yield from (known | {"form": form, "batch": batch, "way": way} for form, batch, way in of_all)
        return
    for batch in settings.batches:
        for form, _, way in calls(settings, batch):
            network.prepare(form, batch, way)
        yield from network.rows(batch)


def first_calls(case, settings, how):
    """Yield the forms, batches and ways of the network `case` that were compiled. Raises `TilewrightError`."""
    try:
        network = Case(case, settings, how)
    except Unavailable:
        # Where it is timed, its rows say so.
        return
    for batch in settings.batches:
        for form, _, way in calls(settings, batch):
            if (way in COMPILED or form in attentions.COMPILED) and network.prepare(form, batch, way):
                yield f"{form}, batch {batch}, {way}"


def calls(settings, batch):
    """Forms, the batch and ways: those first that take no compiler, and forms side by side in each way."""
    ways = {way for each in settings.forms.values() for way in each}
    found = [
        (form, batch, way)
        for way in sorted(ways, key=(EAGER, GRAPH, *COMPILED).index)
        for form in settings.forms
        if way in settings.forms[form]
    ]
    return sorted(found, key=lambda call: (call[0] in attentions.COMPILED, call[2] in COMPILED))


def _known(case, how):
    """What all rows of a network say."""
    registry.check("dtype", how.dtype, DTYPES)
    family, options = parse(case)
    known = {"network": case, "family": family, "resolution": side(options["image_size"]), "dtype": how.dtype}
    return known | machine(devices.describe(how.device))


@dataclass
class _Run:
    """A row and, where it passed its check, the call to be timed."""

    row: dict
    timed: timing.Checked | None


class Case:
    """A network in the forms of `settings`: its calls are prepared one by one, and timed together in the end."""

    @torch.inference_mode()
    def __init__(self, case, settings, how):
        """Make the networks and what their logits are compared with. Raises `TilewrightError`."""
        self.settings, self.effort, self.runs = settings, how.effort(settings.max_seconds), {}
        known = _known(case, how)
        made = _timm if known["family"] == TIMM else _own
        self.networks, self.oracles, self.inputs, own = made(case, settings, how)
        parameters = sum(each.numel() for each in next(iter(self.networks.values())).parameters())
        self.known = {**known, **own, "status": "ok", "parameters": parameters}
        # What was compiled before counts against the limit of torch's cache, and is forgotten.
        torch.compiler.reset()

    @torch.inference_mode()
    def prepare(self, form, batch, way):
        """Make a call, compare its result, and say whether it can be timed."""
        begin, oracle = time.perf_counter(), self.oracles[form]
        row = self.known | {"form": form, "batch": batch, "way": way, **oracle.columns, "time": now()}
        run = self.runs[form, batch, way] = _Run(row, None)
        try:
            with _internals.recompile_limit():
                call = _called(self.networks[form], self.inputs[:batch], way)
                timing.wait(call())
                run.row |= {"first_call_s": time.perf_counter() - begin}
                run.row, run.timed = checked(call, partial(_look, oracle.logits[:batch]), run.row, CHECKS)
        except Unavailable as reason:
            run.row |= {"status": "skipped", "reason": str(reason)}
        except _REFUSALS as error:
            run.row |= {"status": "failed", "reason": refusal(error)}
        gc.collect()
        return run.timed is not None

    @torch.inference_mode()
    def rows(self, batch):
        """Time the calls of a batch that were prepared, in turns, and yield their rows. They are let go then: what a
        form keeps for one batch, and a graph reads, may be another thing after the next."""
        runs = [self.runs.pop(call) for call in list(self.runs) if call[1] == batch]
        passed = [run for run in runs if run.timed is not None]
        with _internals.recompile_limit():
            for _ in range(RECORDED):
                for run in passed:
                    run.timed()
                    run.timed.result = None
            taken = timing.time_together([run.timed for run in passed], **self.effort.limits)
        for run, found in zip(passed, taken, strict=True):
            run.row = settled(run.row, run.timed, found.columns)
        yield from (run.row for run in runs)


def _called(network, images, way):
    """A call of a network on `images` in a `way`, until its logits are there. Raises `Unavailable`."""
    forward = {EAGER: _plain, GRAPH: _captured, REDUCE: _reduced}.get(way, _compiled)(network, images)

    def call():
        logits = forward(images)
        timing.wait(images)
        return logits

    return call


def _plain(network, images):
    return network


def _compiled(network, images):
    """A network as torch.compile makes it, once it was called: see `networks.run`."""
    network(images)
    return torch.compile(network, dynamic=False)


def _reduced(network, images):
    if not images.is_cuda:
        raise Unavailable("reduce-overhead: needs a GPU; on a CPU it is torch.compile")
    network(images)
    compiled = torch.compile(network, mode="reduce-overhead", dynamic=False)
    for _ in range(RECORDED):
        compiled(images)
    # The graph of another call may write over what this one returns.
    return lambda images: compiled(images).clone()


def _captured(network, images):
    """A CUDA graph of a call, replayed on a copy of the images."""
    if not images.is_cuda:
        raise Unavailable("graph: needs a GPU")
    static, graph, stream = images.clone(), torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(RECORDED):
            network(static)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        logits = network(static)

    def forward(images):
        static.copy_(images)
        graph.replay()
        return logits

    return forward


def _look(expected, logits):
    """Columns of logits beside those that are expected."""
    if logits.shape != expected.shape:
        raise ValueError(f"expected logits of {list(expected.shape)}, found {list(logits.shape)}")
    return {
        "max_abs_error": float((logits - expected).abs().max()),
        "relative_error": oracles.logits_error(logits, expected),
    }


def _own(case, settings, how):
    """``(networks by form, oracles by form, images, columns)`` of one of Tilewright's networks."""
    batches = [dict.fromkeys(settings.forms, settings.batches)]
    create, inputs = _networks.prepared(case, batches, how.device, how.dtype, how.seed)
    _, names = networks.exchanged(parse(case)[0])
    oracles = dict.fromkeys(settings.forms, _tolerant(_networks.oracle_of(create(names[0]), inputs), inputs.dtype))
    for other in set(attentions.OTHERS) & set(settings.forms):
        oracles[other] = _networks.oracle_of(create(other), inputs)
    return {form: create(form) for form in settings.forms}, oracles, inputs, {}


def _tolerant(oracle, dtype):
    """An `Oracle` of a network that drops tokens: where rounding alone makes dense attention drop another one, logits
    are off by what that token says, in each form by another one."""
    most = _networks.MOST_ROUNDOFFS * torch.finfo(dtype).eps / 2
    return replace(oracle, tolerance=_networks.WORST) if oracle.tolerance > max(most, _networks.TOLERANCE) else oracle


def _timm(case, settings, how):
    """The same of one of timm's, and the pattern of its sparse form. Raises `Unavailable` without timm."""
    try:
        import timm
    except ImportError as error:
        raise Unavailable(f"timm cannot be imported: {error}") from error
    from tilewright.integrations.timm import sparsify

    _, options = parse(case)
    place, kind = devices.facts(how.device).TORCH_DEVICE, getattr(torch, how.dtype)
    # As a user makes them: layers go by the versions of parameters, which inference tensors do not have.
    with torch.inference_mode(False):
        torch.manual_seed(how.seed)
        model = timm.create_model(options["variant"], img_size=options["image_size"]).eval().requires_grad_(False)
        _networks.peaked(_scaled(model)).to(place, kind)
        grid, special = tuple(model.patch_embed.grid_size), model.num_prefix_tokens
        window = min(settings.window, max(1, min(grid) - 1 | 1))
        pattern = f"window-{window}-g{special}"
        sparse = copy.deepcopy(model)
        sparsify(sparse, pattern)
        masked = Masked(model, _mask(patterns.graph(pattern, grid, special)).to(place))
        made = {"tilewright": sparse, "dense": masked, "full": model}
        inputs = _networks.photographs(max(settings.batches), options["image_size"]).to(place, kind)
    oracle = _networks.oracle_of(copy.deepcopy(masked), inputs)
    oracles = dict.fromkeys(("tilewright", "dense"), oracle)
    if "full" in settings.forms:
        oracles["full"] = _networks.oracle_of(copy.deepcopy(model), inputs)
    return {form: made[form] for form in settings.forms}, oracles, inputs, {"pattern": pattern}


class Masked(torch.nn.Module):
    """A network of timm's that takes a mask, bool [N, N], in every call."""

    def __init__(self, network, mask):
        """network: it stays as it is."""
        super().__init__()
        self.network = network
        self.register_buffer("mask", mask)

    def forward(self, images):
        """Logits."""
        return self.network(images, attn_mask=self.mask)


def _mask(graph):
    indptr, indices = graph.expand()
    mask = torch.zeros(graph.shape, dtype=torch.bool)
    mask[np.repeat(np.arange(graph.n_rows), np.diff(indptr)), indices] = True
    return mask


@torch.no_grad()
def _scaled(model):
    """`model` with layer scales of one: as timm draws those of DINOv2, a layer adds next to nothing."""
    for name, weight in model.named_parameters():
        if name.endswith("gamma"):
            weight.fill_(1.0)
    return model
