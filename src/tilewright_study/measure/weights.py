"""Weights of video networks that experiments measure: files of the user's own, or trained by a rule of the study."""

import shlex

import msgspec

from tilewright import devices, networks
from tilewright.core import weight_files
from tilewright.core.errors import ArtifactError, Unavailable
from tilewright_study import sections

# Where the rule `video_weights` writes what it trains.
TRAINED = "results/video/{}.safetensors"


class Weights(sections.Section, frozen=True):
    """A video network and its weights.

    network: by its name
    options: of the network, such as fewer layers
    path: a file or a folder of weights, official or of diffusers; null where they are trained here
    recipe: how they are trained, see tilewright_study.training.video; null is that of wan-tiny
    """

    network: str
    options: dict[str, int | str]
    path: str | None
    recipe: dict | None

    def file(self, name):
        """Where the weights called `name` are."""
        return self.path or TRAINED.format(name)

    def at(self, name):
        """These weights with their path stated."""
        return msgspec.structs.replace(self, path=self.file(name), recipe=None)


def check(place, found):
    """Raise `ConfigError` for weights of no video network."""
    for name, weights in found.items():
        sections.at(f"{place}.{name}", networks.parse_video, weights.network, weights.options)


def arguments(weights, config):
    """The flags of ``train_video.py`` that train `weights`: a list of words for a shell, quoted."""
    options = [shlex.quote(f"{key}={value}") for key, value in weights.options.items()]
    recipe = [] if weights.recipe is None else ["--recipe", shlex.quote(msgspec.json.encode(weights.recipe).decode())]
    stated = ["--set", *options] if options else []
    compiled = ["--compiled"] if devices.facts(config.device).GPU_TIMER else []
    return ["--network", weights.network, *recipe, "--device", config.device, *compiled, *stated]


def sources(weights):
    """Files that a case with these weights reads; none that are the user's and missing, which its rows say."""
    if weights.path.startswith(TRAINED.partition("{")[0]):
        return [weights.path]
    file = weight_files.located(weights.path)
    if file is None:
        return []
    try:
        return [str(each) for each in dict.fromkeys((file, *weight_files.parts(file)))]
    except ArtifactError:
        return [str(file)]


def load(weights, place):
    """``(network, columns)``: the network on `place`, and what rows say of its weights.

    maps is ``trained`` for weights that were trained here, with the steps in ``weights``, else ``official``. Raises
    `Unavailable` where there are none, and `ArtifactError` for those of another network.
    """
    from tilewright_study.training import video

    file = weight_files.located(weights.path)
    if file is None:
        raise Unavailable(f"no weights at {weights.path}")
    network = networks.create_video(weights.network, checkpoint=file, **weights.options).to(place)
    steps = video.steps_of(file)
    facts = (
        {"maps": "official", "weights": file.name}
        if steps is None
        else {"maps": "trained", "weights": f"{steps} steps"}
    )
    return network, {"network": weights.network, **facts}


def maps(weights, layers, noise, grid, order, *, device, dtype, seed):
    """`slices.run.Maps` of the heads of `layers` layers, on a clip at a level of noise. Raises as `load` does."""
    from tilewright_study.experiments.slices import run
    from tilewright_study.scenes import captured

    place = devices.facts(device).TORCH_DEVICE
    network, origin = load(weights, place)
    clean = captured.photographs(grid, seed=seed, device=place) if origin["maps"] == "trained" else None
    chosen = captured.spread(network.options.depth, layers)
    made = captured.tokens(network, grid, noise, chosen, clean=clean, seed=seed)
    stated = {"device": device, "dtype": dtype, "seed": seed, "made": made, "origin": origin | {"clip_noise": noise}}
    return run.Maps(len(made.heads), made.q.shape[-1], grid, order, **stated)


def absent(weights, grid, reason, how):
    """The columns of a row that says why there is none."""
    from tilewright_study.measure.rows import machine, now

    known = {"network": weights.network, "grid": "x".join(map(str, grid)), "dtype": how.dtype, "time": now()}
    return known | machine(devices.describe(how.device)) | {"status": "skipped", "reason": str(reason)}
