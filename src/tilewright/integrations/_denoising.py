"""Where a pipeline of diffusers is: what slices have to know of the networks that call them.

Text, first frames and references are found in what a network is called with, by its class. The branch is the name of
diffusers' cache context, and the layer the number of the call in a pass. The pipeline's callback tells the step.
"""

import inspect
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import prod
from typing import Any

import msgspec

from tilewright import slices
from tilewright.core import _internals
from tilewright.core.errors import ConfigError, PatternError
from tilewright.integrations.sdpa import DTYPES, Dense, Place, Slices
from tilewright.slices.layout import HEAD_DIMS

# Passes of a network in a step that diffusers gives one name; more are those of another step.
PASSES = 8

Given = dict[str, Any]


class Family(msgspec.Struct, frozen=True):
    """Where a class of networks has its text. text: arguments with tokens of text; first: text comes first.

    frame: tokens of a frame by the network's configuration and what it is called with. reference: ranges of reference
    tokens, counted from the first one of the video. pairs: see `Dense`.
    """

    text: tuple[str, ...] = ()
    first: bool = False
    frame: Callable[[Any, Given], int] | None = None
    reference: Callable[[Given], tuple[int, int]] | None = None
    pairs: bool = False


def _of_latents(config, given):
    """Of latents [.., H, W] in square patches."""
    patch = config.patch_size
    side = patch if isinstance(patch, int) else patch[-1]
    return prod(n // side for n in given["hidden_states"].shape[-2:])


def _of_sizes(config, given):
    """Of tokens whose number of frames, rows and columns is stated."""
    return given["height"] * given["width"] // config.patch_size**2


def _references(given):
    """Images beside the first one."""
    sizes = given["img_shapes"][0]
    images = [prod(size) for size in (sizes if isinstance(sizes, list) else [sizes])]
    return images[0], sum(images)


_TEXT = ("encoder_hidden_states",)
_WAN = Family(frame=_of_latents)
_LTX = Family(frame=_of_sizes)
FAMILIES = {
    "WanTransformer3DModel": _WAN,
    "WanVACETransformer3DModel": _WAN,
    "LTXVideoTransformer3DModel": _LTX,
    "LTX2VideoTransformer3DModel": _LTX,
    "HunyuanVideoTransformer3DModel": Family(_TEXT, frame=_of_latents),
    "HunyuanVideo15Transformer3DModel": Family(
        ("image_embeds", "encoder_hidden_states_2", *_TEXT), frame=_of_latents, pairs=True
    ),
    "CogVideoXTransformer3DModel": Family(_TEXT, first=True, frame=_of_latents),
    "FluxTransformer2DModel": Family(_TEXT, first=True),
    "QwenImageTransformer2DModel": Family(_TEXT, first=True, reference=_references),
}


class Denoising:
    """A pipeline of diffusers in the context of `denoising`, which makes it.

    Parameters
    ----------
    attention : Slices
        The backend that the networks choose.

    Attributes
    ----------
    step : int
        The step that the pipeline is at.
    """

    def __init__(self, attention: Slices):
        """At the first step, of no network."""
        self.attention, self.step = attention, 0
        self._networks: list[_Network] = []

    def step_end(self, pipe: Any, step: int, timestep: Any, tensors: Given) -> Given:
        """Go to the next step: for ``callback_on_step_end`` of the pipeline.

        Parameters
        ----------
        pipe, step, timestep, tensors
            As pipelines call it. A callback of your own calls this one with the same.

        Returns
        -------
        dict
            `tensors`, as they are.

        Raises
        ------
        PatternError
            For a step other than that which this context is at.
        """
        if step != self.step:
            raise PatternError(f"step_end: expected step {self.step} of one pipeline, found step {step}")
        self._go_to(step + 1)
        if step + 1 == getattr(pipe, "num_timesteps", None):
            self.clear()
        return tensors

    def clear(self) -> None:
        """Forget kept lists: the next pass begins a run."""
        self._go_to(0)
        for network in self._networks:
            if network.steps is not None:
                network.steps.clear()

    @property
    def memory_bytes(self) -> int:
        """Bytes of the lists that are kept."""
        return sum(network.steps.memory_bytes for network in self._networks if network.steps is not None)

    def _go_to(self, step):
        self.step = step
        for network in self._networks:
            network.passes.clear()

    def begin(self, pipe: Any) -> None:
        """Before a pass: a scheduler that was set anew begins a run, as after one that was interrupted."""
        if self.step and getattr(getattr(pipe, "scheduler", None), "_step_index", self) is None:
            self.clear()


class _Network:
    """A network that is followed. It is left as it was by `leave`."""

    def __init__(self, run, model, pipe):
        """Refuses what slices cannot take, before anything is changed. Raises `ConfigError`."""
        self.run, self.model, self.pipe = run, model, pipe
        self.passes: Counter[str | None] = Counter()
        self.branch = None
        self._entered: list[Callable[[], None]] = []
        settings = run.attention.settings
        self.name = type(model).__name__
        family = FAMILIES.get(self.name)
        if family is None:
            if not (settings.first or settings.last) or any(isinstance(each, str) for each in settings.dense):
                raise ConfigError(
                    f"{self.name}: expected first or last, as its text is not known, and ranges alone in dense, found "
                    f"others; classes known: {', '.join(FAMILIES)}"
                )
            family = Family()
        self.family = family
        heads = getattr(model.config, "attention_head_dim", None)
        if heads not in HEAD_DIMS:
            raise ConfigError(f"{self.name}: expected heads of {' or '.join(map(str, HEAD_DIMS))}, found {heads}")
        dtype = getattr(model, "dtype", None)
        if dtype not in DTYPES:
            raise ConfigError(f"{self.name}: expected float32, float16 or bfloat16, found {dtype}")
        known = {"text": self.family.text, "first_frame": self.family.frame, "reference": self.family.reference}
        for each in settings.dense:
            if isinstance(each, str) and not known.get(each):
                has = ", ".join(name for name, found in known.items() if found) or "none"
                raise ConfigError(f"{self.name}: expected dense tokens that it has by name, {has}, found {each!r}")
        steps = settings.steps
        self.steps = None if steps is None else slices.Steps(**msgspec.structs.asdict(steps), joins=True)

    def follow(self, choose):
        """Be told of passes and their names. choose: has the network call slices, and returns how to leave them."""
        model = self.model
        theirs = getattr(model, "cache_context", None)
        if theirs is not None:

            @contextmanager
            def cache_context(name, *args, **kwargs):
                with theirs(name, *args, **kwargs):
                    self.branch = name
                    try:
                        yield
                    finally:
                        self.branch = None

            model.cache_context = cache_context
            self._entered.append(lambda: delattr(model, "cache_context"))
        before = model.register_forward_pre_hook(_internals.uncompiled(self._begin), with_kwargs=True, prepend=True)
        after = model.register_forward_hook(_internals.uncompiled(self._end), always_call=True)
        self._entered += [before.remove, after.remove]
        self._entered.append(choose(model))

    def leave(self):
        while self._entered:
            self._entered.pop()()

    def _begin(self, model, args, kwargs):
        run, attention = self.run, self.run.attention
        run.begin(self.pipe)
        given = inspect.signature(type(model).forward).bind_partial(model, *args, **kwargs).arguments
        attention.stated_dense = self._dense(given)
        if self.steps is None:
            return
        if self.steps.budgets is not None:
            found = {"model": self.name, "shape": tuple(given["hidden_states"].shape[1:])}
            number = getattr(self.pipe, "num_timesteps", None)
            self.steps.budgets.check(**found, **({} if number is None else {"steps": number}))
        number = self.passes[self.branch]
        if number == PASSES:
            raise PatternError(
                f"{self.name}: expected callback_on_step_end=step_end of denoising, found {PASSES} passes of branch "
                f"{self.branch!r} in step {run.step}"
            )
        self.passes[self.branch] += 1
        branch = self.branch if not number else f"{self.branch} {number}"
        attention.place = Place(self.steps, run.step, branch)

    def _end(self, model, args, out):
        attention = self.run.attention
        place, attention.stated_dense, attention.place = attention.place, None, None
        # A pass that failed gives None. Where no layer called slices, torch attended.
        if out is not None and place is not None and place.layer and place.steps.budgets is not None:
            place.steps.budgets.check(layers=place.layer)

    def _dense(self, given):
        """The `Dense` tokens of a pass."""
        settings, family = self.run.attention.settings, self.family
        first, last = settings.first, settings.last
        if not first and not last:
            text = sum(given[name].shape[1] for name in family.text if given.get(name) is not None)
            first, last = (text, 0) if family.first else (0, text)
        ranges = []
        for each in settings.dense:
            if each == "first_frame" and family.frame:
                ranges.append((first, first + family.frame(self.model.config, given)))
            elif each == "reference" and family.reference:
                begin, end = family.reference(given)
                ranges += [(first + begin, first + end)] if begin < end else []
            elif not isinstance(each, str):
                ranges.append(each)
        return Dense(first, last, tuple(ranges), family.pairs)


@contextmanager
def following(attention: Slices, networks: list, pipe: Any, choose: Callable) -> Iterator[Denoising]:
    """Context in which `networks` call slices. choose: ``choose(network)`` has one call them."""
    run = Denoising(attention)
    run._networks = [_Network(run, network, pipe) for network in networks]
    try:
        for network in run._networks:
            network.follow(choose)
        yield run
    finally:
        for network in reversed(run._networks):
            network.leave()
        run.clear()
