"""The networks themselves. Their attention, or a DeiT's batching, can be exchanged: same weights and logits.

Contract of a member module (a family of networks, named as its family of graphs in `tilewright.masks`):
    ``Options``: a frozen `msgspec.Struct` (``forbid_unknown_fields``) of everything that decides the network, among it
        ``variant`` and ``image_size`` (pixels a side, or height and width).
    ``EXCHANGED``: the family of what can be exchanged, `attentions` or `batching`; its first member is the oracle.
    ``Network(options, name)``: an `nn.Module` from images [B, 3, R, R] to logits, with its parameters under the names
        of the official code. ``name`` is one of ``EXCHANGED.NAMES``. Networks of maps take images [B, 3, H, W] of any
        size and a path (`path.Path`), and return logits [B, classes, rows, columns]; ``image_size`` is that of tables.
    ``adapt(state, network) -> state``: the official checkpoint's tensors under this network's own names and shapes:
        aliases dropped, position tables resized as the original code does. Tensors it does not know stay in, so that
        they are reported.
    ``name(options) -> str``: the network's name in files and figures, e.g. ``vil-tiny-224``.
    ``timm_name(options) -> str``: for families whose official weights timm or the hub holds, under which name.
    ``recognised(state) -> dict | None``: for networks of maps, what of ``Options`` a checkpoint's tensors state.
    ``stated(options) -> dict``: for families whose parts have settings, such as pruners: what a user states, as fields
        of ``Options``.
    ``Options.needs``: for families that may need more than random weights, what of a checkpoint, or None.

Members of `VIDEO` take latents of a video, a time and a prompt instead of images, and are made by `create_video`: their
``EXCHANGED`` is `video_attentions`, ``Network(options, name, settings, order)`` is as `create_video` says, and the rest
of the contract is the same.

How names are read stands with the graphs of the family (``network_fields``, see `tilewright.masks`). Importing this
package does not import torch.
"""

from collections.abc import Iterable, Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from tilewright.core import arguments, contents, sides
from tilewright.core.errors import ConfigError, PatternError, UnknownNameError
from tilewright.core.registry import member
from tilewright.networks.plans import Plans

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

    from tilewright.networks import path as route
    from tilewright.networks.wan import Network

NAMES = ("vision_longformer", "regionvit", "dynamicvit", "deit", "segformer", "swin")
VIDEO = ("wan",)
# Those from images to maps, which a file of weights may be of.
MAPS = ("segformer", "swin")
# Of a side of images. ASSUME: as `core.flags.pixels`.
MOST_PIXELS = 65536


def parse(name: str, overrides: Mapping[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
    """Read a network's name into ``(family, options)``, as `create` takes them; `overrides` replaces or adds options.

    Raises `UnknownNameError` for a name of no family; options are checked by `create`.
    """
    return _parsed("network", name, overrides, NAMES)


def parse_video(name: str, overrides: dict[str, int] | None = None) -> tuple[str, dict[str, Any]]:
    """As `parse`, for the names of `VIDEO` networks, such as ``wan-1.3b-480p-81f``."""
    return _parsed("video network", name, overrides, VIDEO)


def _parsed(what, name, overrides, families):
    members = {family: import_module(f"tilewright.masks.{family}") for family in families}
    for family, module in members.items():
        if (fields := module.network_fields(name)) is not None:
            return family, {**fields, **(overrides or {})}
    raise UnknownNameError(what, name, [module.NETWORK_NAMING for module in members.values()])


def exchanged(family: str) -> tuple[str, tuple[str, ...]]:
    """What can be exchanged in networks of `family`: ``("attention" or "batching", names)``, the oracle's name first.

    Raises `UnknownNameError`.
    """
    return _exchanged(member(__name__, "network", family, NAMES))


def _exchanged(module):
    return module.EXCHANGED.WHAT, module.EXCHANGED.NAMES


def create(
    family: str,
    *,
    variant: str,
    image_size: int = 224,
    checkpoint: str | Path | None = None,
    attention: str | None = None,
    plans: Plans | dict[str, Any] | None = None,
    batching: str | None = None,
    seed: int = 0,
    **options: Any,
) -> "torch.nn.Module":
    """Build a network in evaluation mode; ``network.weights`` is the file of its weights, None for random ones.

    Parameters
    ----------
    family : str
        ``vision_longformer``, ``regionvit``, ``dynamicvit``, ``deit``, ``segformer`` or ``swin``.
    variant : str
        Size of the network, such as ``tiny``.
    image_size : int or (int, int)
        Pixels of a side, or height and width. Networks of maps take images of other sizes, too.
    checkpoint : str or Path, optional
        An official file (``.pth`` or ``.safetensors``). ``cached`` takes the file that timm or the official code has
        downloaded, and random weights with a warning where there is none. None draws random weights from `seed`.
    attention : str, optional
        ``tilewright``, ``native`` (the published formulation), ``flex``, ``dense`` (masked SDPA, the oracle) or
        ``full`` (all keys, which is another network). None takes the first of the family.
    plans : Plans or dict, optional
        Order, solver and tiles of attention ``tilewright``.
    batching : str, optional
        How images of different length share a batch of a DeiT, such as ``ragged``.
    seed : int
        Of random weights.
    **options
        The family's own, see its ``Options``; of a DeiT also the settings of its pruner.

    Returns
    -------
    torch.nn.Module
        From images [B, 3, H, W] to logits [B, classes], or maps [B, classes, rows, columns].

    Raises
    ------
    UnknownNameError, ConfigError
        For options that are unknown or out of range, or that need a checkpoint.
    ArtifactError
        For a checkpoint that does not fit; nothing has been loaded then.

    Examples
    --------
    >>> import torch
    >>> import tilewright as tw
    >>> net = tw.networks.create("vision_longformer", variant="tiny", image_size=64, attention="native")
    >>> net(torch.randn(1, 3, 64, 64)).shape
    torch.Size([1, 1000])
    """
    module, seed = member(__name__, "network", family, NAMES), arguments.whole("seed", seed, 0, 2**64 - 1)
    checkpoint = None if checkpoint is None else arguments.path("checkpoint", checkpoint)
    name = _chosen(module, family, {"attention": attention, "batching": batching})
    stated = {"variant": variant, "image_size": image_size, **options}
    stated = module.stated(stated) if hasattr(module, "stated") else stated
    chosen = _options(module, family, stated)
    if str(checkpoint) == "cached":
        from tilewright.core import checkpoints

        if not hasattr(module, "timm_name"):
            raise ConfigError(f"checkpoint: expected a file, found 'cached': timm publishes no weights of {family}")
        checkpoint = checkpoints.cached(module.timm_name(chosen))
    if checkpoint is None and getattr(chosen, "needs", None):
        raise ConfigError(f"checkpoint: expected one with {chosen.needs}, found none")
    network = _built(module, checkpoint, seed, chosen, name)
    if plans is not None:
        _plan_as(network, name, plans)
    return network


def from_checkpoint(
    path: str | Path, *, image_size: int | tuple[int, int] = 512, attention: str | None = None, **options: Any
) -> "torch.nn.Module":
    """Build the network of maps whose weights a file holds, in evaluation mode.

    Family, variant, head, its channels and the number of classes are those of the tensors. ``network.labels`` has the
    names of the classes where a ``config.json`` lies beside the file, else it is empty. Nothing is downloaded.

    Parameters
    ----------
    path : str or Path
        A SegFormer or a Swin: an official file of NVlabs or Microsoft, one of mmsegmentation 1.x, or a file or folder
        of transformers 4 and 5.
    image_size : int or (int, int)
        Pixels of a side, or height and width.
    attention : str, optional
        As `create` takes it.
    **options
        Replace those of the file, such as ``decoder``. A backbone alone needs ``num_classes``.

    Returns
    -------
    torch.nn.Module
        From images [B, 3, H, W] to maps [B, classes, rows, columns].

    Raises
    ------
    ArtifactError
        For a file that is missing or damaged, and for weights of another network, with what was expected and found.
    ConfigError
        For options that are unknown or out of range.

    Examples
    --------
    >>> import tilewright as tw
    >>> net = tw.networks.from_checkpoint("segformer.b0.512x512.ade.160k.pth")  # doctest: +SKIP
    """
    return import_module(f"{__name__}._recognised").opened(path, image_size, attention, options)


def create_video(
    name: str,
    *,
    checkpoint: str | Path | None = None,
    attention: str = "dense",
    settings: dict[str, Any] | None = None,
    order: str | None = None,
    seed: int = 0,
    **options: Any,
) -> "Network":
    """Build a video network in evaluation mode; ``network.weights`` is the file of its weights, None for random ones.

    Parameters
    ----------
    name : str
        Such as ``wan-1.3b-480p-81f``.
    checkpoint : str or Path, optional
        An official or a diffusers file (``.safetensors``, ``.pth``, or the ``.index.json`` of several). None draws
        random weights from `seed`.
    attention : str
        ``dense`` (the oracle), or another one of `video_attentions.NAMES`.
    settings : dict, optional
        Of the attention, such as ``{"keep": 0.3, "budget": 0.3}``.
    order : str, optional
        Order of the tokens, of `slices.orders.NAMES`; None takes the attention's own.
    seed : int
        Of random weights.
    **options
        Replace or join those of the name, see the family's ``Options``.

    Returns
    -------
    torch.nn.Module

    Raises
    ------
    UnknownNameError, ConfigError, ArtifactError
        As `create` does.
    """
    family, stated = parse_video(name, options)
    module = member(__name__, "video network", family, VIDEO)
    return _built(module, checkpoint, seed, _options(module, family, stated), attention, settings, order)


def sequence_parallel(network: "torch.nn.Module", group: "ProcessGroup | None" = None) -> "Network":
    """This very video network, its weights shared, with the tokens of a clip shared out among processes.

    group: a process group of torch.distributed, None for the default one. Each rank is given the same latents, time and
    text and returns the whole velocity, as one process would. In between it has N / P of the tokens, at their places in
    the order and with their rotary angles; before and after self-attention it changes tokens for heads, and attention
    is chosen and made for its own heads (`slices.parallel`). The weights, the prompt, and the embedding of patches are
    whole on every rank. Raises `ConfigError` for other networks; in the first call with a clip `PatternError` for fewer
    tokens or heads than ranks, and `DeviceError` without a process group.
    """
    # By its name: experiments on images do not depend on it.
    return import_module(f"{__name__}._sequence_parallel").shared(network, group)


def choose_kernels(
    network: "torch.nn.Module",
    images: "torch.Tensor",
    paths: "Iterable[route.Path | str | None]" = (None,),
    *,
    anew: bool = False,
) -> list[dict[str, Any]]:
    """Choose, for each operator that paths of a network of maps run on such images, the fastest kernel that is right.

    paths: or their texts; None is the full one. Those of other scales or levels have operators of other sizes, for
    which torch's run until others are chosen; sets of blocks have not. What was chosen before stays. On a device with
    such kernels the weights of convolutions lie channels last in memory from then on, which ``safetensors`` does not
    save as they are.

    Candidates are torch's operators, and the forms of kernels that the images' device has for them. Each is first
    compared with float32, of the same arguments; then timed. The network runs the chosen ones from then on. What was
    fastest is kept on disk (`$TILEWRIGHT_CACHE`) for this device, torch, triton and this code: where it is there it is
    compared again, not timed. anew: time all.

    Returns a dict a candidate: operator, dtype, shapes, form, status (``ok``, ``failed``, ``skipped``), reason, error,
    tolerance, us, chosen; one that was kept has no ``us``. Raises `ConfigError` for a network without such operators,
    and what its call raises.
    """
    return import_module(f"{__name__}._kernels").choose(network, images, paths, anew)


def _options(module, family, stated):
    """The ``Options`` of a family. Raises `ConfigError`."""
    stated = arguments.plain(stated)
    try:
        options = msgspec.convert(stated, module.Options)
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"{family}: {contents.said(error, module.Options)}; options: {', '.join(module.Options.__struct_fields__)}"
        ) from None
    if max(sides.pair(getattr(options, "image_size", 1))) > MOST_PIXELS:
        raise ConfigError(
            f"image_size: expected at most {MOST_PIXELS} pixels a side, found {arguments.shown(options.image_size)}"
        )
    return options


def _built(module, checkpoint, seed, *arguments):
    """``module.Network(*arguments)`` with the weights of a file, or those that `seed` draws."""
    import torch

    from tilewright.core import checkpoints, weight_files

    with torch.random.fork_rng(devices=[]), torch.inference_mode(False):
        torch.manual_seed(seed)
        network = module.Network(*arguments).eval()
    if checkpoint is not None:
        checkpoints.load(network, checkpoint, module.adapt)
        # Of a folder the file in it.
        checkpoint = weight_files.located(checkpoint)
    network.weights = None if checkpoint is None else str(checkpoint)
    return network


def _plan_as(network, attention, plans):
    """Let a new network make its plans as `plans` says. Raises `ConfigError` for one that makes none."""
    from tilewright.networks import attention_sites

    try:
        plans = plans if isinstance(plans, Plans) else msgspec.convert(plans, Plans)
    except msgspec.ValidationError as error:
        raise ConfigError(f"plans: {error}; settings: {', '.join(Plans.__struct_fields__)}") from None
    plans.check()
    sites = {module.site for module in network.modules() if isinstance(module, attention_sites.Attend)}
    if attention != "tilewright" or not sites:
        raise ConfigError(
            "plans: expected attention 'tilewright' over fixed patterns, found "
            + (f"attention {attention!r}" if attention != "tilewright" else "patterns that depend on the image")
        )
    for site in sites:
        site.planned = plans


def _chosen(module, family, stated):
    """The name of the member that is exchanged in; stated: names or None by what they are.

    Raises `ConfigError` for one that the family does not have and `UnknownNameError` for its name.
    """
    what, known = _exchanged(module)
    (other,) = (name for name in stated if name != what)
    if stated[other] is not None:
        raise ConfigError(f"{other}: {family} takes {what} instead, found {other}={stated[other]!r}")
    name = known[0] if stated[what] is None else stated[what]
    member(module.EXCHANGED.__name__, what, name, known)
    return name


def check_images(images: "torch.Tensor", size: int | tuple[int, int] | None) -> None:
    """Raise `PatternError` unless `images` is a floating tensor [B ≥ 1, 3, H, W]; size: of both, or (H, W), or any."""
    import torch

    height, width = ("H", "W") if size is None else sides.pair(size)
    expected = f"[B, 3, {height}, {width}] with B at least 1"
    if not isinstance(images, torch.Tensor) or images.is_nested:
        raise PatternError(f"images: expected a tensor {expected}, found {arguments.shown(images)}")
    fits = images.ndim == 4 and images.shape[1] == 3 and len(images)
    if not fits or (size is not None and tuple(images.shape[2:]) != (height, width)):
        raise PatternError(f"images: expected a tensor {expected}, found {list(images.shape)}")
    if not images.is_floating_point():
        raise PatternError(f"images: expected floating point, found {images.dtype}")
