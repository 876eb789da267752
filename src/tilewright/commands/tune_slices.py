"""Choose how many keys each head of a video model lists: measure its errors in a few runs, and write a table."""

from argparse import ArgumentParser
from pathlib import Path
from typing import Any

from tilewright.attention.profile import DTYPES
from tilewright.commands import table
from tilewright.core import arguments as checks
from tilewright.core import flags
from tilewright.core.errors import ConfigError, Unavailable

# What a folder of diffusers has: of a whole pipeline, or of a network.
PIPELINE, NETWORK = "model_index.json", "config.json"
# The class of a network that is run without a pipeline.
CLASS = "WanTransformer3DModel"


def arguments(parser: ArgumentParser) -> None:
    """The model, its runs, and the choice."""
    add = parser.add_argument
    add("model", help=f"network such as wan-1.3b-480p-81f, or a folder of diffusers: a pipeline's or a {CLASS}'s")
    add("--output", "-o", type=flags.output, required=True, help="file to write, e.g. budgets.json")
    add("--checkpoint", help="weights of a named network (default: random ones)")
    add("--set", nargs="+", default=[], metavar="KEY=NUMBER", help="options of a named network, e.g. layers=2")
    add("--video", type=flags.count, nargs=3, metavar=("FRAMES", "HEIGHT", "WIDTH"), help="pixels, for a folder")
    add("--prompt", default="", help="for a pipeline (default: empty)")
    add("--steps", type=flags.count, default=50, help="denoising steps of a run (default: 50)")
    add("--parts", type=flags.count, default=3, help="parts of a run, each with its budgets (default: 3)")
    add("--runs", type=flags.count, default=1, help="runs that are measured; one more is for the check (default: 1)")
    add("--keep", type=flags.share, default=0.2, help="share of the keys whose time is allowed (default: 0.2)")
    add("--solver", default="highs", help="highs, gurobi, greedy or single (default: highs)")
    add("--rows", type=flags.count, default=128, help="queries of a group (default: 128)")
    add("--device", default="cpu", help="cpu or cuda (default: cpu)")
    add("--dtype", choices=DTYPES, default=DTYPES[0], help=f"type of the network (default: {DTYPES[0]})")
    add("--seed", type=flags.seed, default=0, help="of weights and noise (default: 0)")


def run(model: str, output: str, **chosen: Any) -> None:
    """Measure, choose, check on another run, and write the table."""
    from tilewright.integrations import tuning
    from tilewright.slices import budgets
    from tilewright.slices.budgets import choice

    checks.name_of("solver", chosen["solver"], choice.NAMES)
    steps, seed = chosen["steps"], chosen["seed"]
    begins = budgets.parts(steps, chosen["parts"])
    tuning.check_keep(chosen["keep"], tuning.SHARES)
    network, sample, name = _loaded(model, chosen)

    def passes(run: int) -> list[tuning.Pass]:
        return tuning.passes(network, lambda: sample(seed + run), steps, begins)

    taken = [one for run in range(chosen["runs"]) for one in passes(run)]
    found = tuning.measure(taken, name, steps, begins, show=print, rows=chosen["rows"])
    limit = found.limit_us(chosen["keep"])
    solvers = dict.fromkeys(("single", "greedy", chosen["solver"]))
    made = {solver: choice.choose(found.velocity, found.us, limit, solver) for solver in solvers}
    apart, rows = passes(chosen["runs"]), []
    for solver, each in made.items():
        if wrong := choice.violations(each.chosen, found.velocity, found.us, limit):
            raise ConfigError(f"{solver}: {wrong[0]}")
        error = tuning.error_of(found.table(each.chosen), apart, rows=chosen["rows"])
        rows.append(
            {
                **{"solver": solver, "time": f"{each.us / limit:.3f}", "predicted error": f"{each.error**0.5:.4f}"},
                **{"error of another run": f"{error:.4f}", "status": each.status},
            }
        )
    print("\n".join(table(rows)))
    facts = {"rows": chosen["rows"], "keep": chosen["keep"], "runs": chosen["runs"], "seed": seed, "choices": rows}
    found.table(made[chosen["solver"]].chosen).save(output, facts)
    print(f"saved  {output}")


def _loaded(model, chosen):
    """``(network, sample, name)``: ``sample(seed)`` makes a video."""
    import torch

    place, dtype = checks.device("device", chosen["device"]), getattr(torch, chosen["dtype"])
    folder = Path(model)
    if (folder / PIPELINE).is_file():
        return _pipeline(folder, chosen, place, dtype)
    if (folder / NETWORK).is_file():
        return _network(folder, chosen, place, dtype)
    from tilewright import networks

    options: dict[str, Any] = {}
    for text in chosen["set"]:
        key, _, value = text.partition("=")
        if not value.isdigit():
            raise ConfigError(f"--set: expected KEY=NUMBER, found {text!r}")
        options[key] = int(value)
    made = networks.create_video(model, checkpoint=chosen["checkpoint"], seed=chosen["seed"], **options)
    made = made.to(place).lowered(dtype)
    return made, lambda seed: made.sample(steps=chosen["steps"], seed=seed), made.options.model


def _diffusers():
    try:
        import diffusers
    except ImportError as error:
        raise Unavailable(f"diffusers cannot be imported: {error}") from error
    return diffusers


def _pipeline(folder, chosen, place, dtype):
    """A pipeline of diffusers; its transformer is tuned."""
    import torch

    pipe = _diffusers().DiffusionPipeline.from_pretrained(folder, torch_dtype=dtype).to(place)
    size = {} if chosen["video"] is None else dict(zip(("num_frames", "height", "width"), chosen["video"], strict=True))
    if getattr(pipe, "transformer", None) is None:
        raise ConfigError(f"{folder}: expected a pipeline with a transformer, found {type(pipe).__name__}")

    def sample(seed):
        generator = torch.Generator().manual_seed(seed)
        stated = {"num_inference_steps": chosen["steps"], "generator": generator, "output_type": "latent"}
        return pipe(chosen["prompt"], **size, **stated)

    return pipe.transformer, sample, type(pipe.transformer).__name__


def _network(folder, chosen, place, dtype):
    """A network of diffusers alone, in Euler's steps, with a prompt that is drawn."""
    import torch

    from tilewright.core import checkpoints, weight_files
    from tilewright.masks import wan
    from tilewright.networks import rectified_flow

    known = getattr(_diffusers(), CLASS)
    config = known.load_config(folder)
    if config.get("_class_name") != CLASS:
        raise ConfigError(f"{folder}: expected a {CLASS}, or a pipeline, found {config.get('_class_name')}")
    torch.manual_seed(chosen["seed"])
    network = known.from_config(config)
    # Diffusers needs another package to load some of its networks.
    if file := weight_files.located(folder):
        checkpoints.load(network, file, lambda state, _: state)
    network = network.to(place, dtype).eval()
    if chosen["video"] is None:
        raise ConfigError("--video: expected frames, height and width for a network of diffusers, found none")
    frames, height, width = chosen["video"]
    size = (network.config.in_channels, *wan.latent_shape(frames, height, width)[1:])

    @torch.no_grad()
    def sample(seed):
        generator = torch.Generator().manual_seed(seed)
        noise, text = (
            torch.randn(1, *sizes, generator=generator).to(place)
            for sizes in (size, (wan.TEXT_TOKENS, network.config.text_dim))
        )

        def velocity(x, sigma, _):
            time = torch.full((1,), rectified_flow.SCALE * sigma, device=place)
            given = {"hidden_states": x.to(dtype), "timestep": time, "encoder_hidden_states": text.to(dtype)}
            return network(**given, return_dict=False)[0]

        return rectified_flow.euler(velocity, noise, rectified_flow.sigmas(chosen["steps"], wan.SHIFTS["480p"]))

    return network, sample, CLASS
