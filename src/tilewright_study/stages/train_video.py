"""Training of a video network on clips of moving photographs."""

import msgspec
import numpy as np

from tilewright import devices
from tilewright_study.cli import settings

# Clips of the sheet: drawn ones and sampled ones of each stage, frames of a clip, and pixels of a row.
DRAWN, SAMPLED, FRAMES, ROW = 1, 3, 6, 120
# A clip that no recipe trains on.
UNSEEN = 10**6


def run(network, output, losses, samples, device, recipe, seed, limit_s, compiled, set):
    """Train the video network of a name; see ``train_video.py --help``.

    output: weights to write. losses: CSV of the loss of each step, or None. samples: a picture of clips, or None.
    recipe: JSON file of a `tilewright_study.training.video.Recipe`, or None for that of ``wan-tiny``. seed: instead of
    the recipe's, or None. set: options of the network, ``KEY=VALUE``. limit_s, compiled: as
    `tilewright_study.training.video.train` takes them. Raises `TilewrightError`.
    """
    # Here, so that the settings of `cli` come before torch.
    from tilewright import networks
    from tilewright_study.scenes import clips
    from tilewright_study.training import video

    chosen = video.TINY if recipe is None else video.read_recipe(recipe)
    if seed is not None:
        chosen = msgspec.structs.replace(chosen, seed=seed)
    devices.describe(device)
    place = devices.facts(device).TORCH_DEVICE
    made = networks.create_video(network, seed=chosen.seed, **settings(set)).to(place)

    def latents(*arguments):
        return clips.latents(*arguments, device=place)

    def show(line):
        print(f"{network}: {line}", flush=True)

    trained = video.train(made, latents, chosen, output, limit_s=limit_s, compiled=compiled, show=show)
    if losses is not None:
        video.write_losses(losses, trained)
    if done := len(trained.losses):
        last = slice(-min(done, 50), None)
        print(
            f"{network}: step {done} of {chosen.steps}, loss {np.mean(trained.losses[last]):.4f} in the last steps, "
            f"{np.mean(trained.constant[last]):.4f} of the best constant answer"
        )
    so_far = "" if trained.done else f" as of step {done}, before the end; the same command goes on"
    print(f"{output}: written{so_far}", flush=True)
    if samples is not None:
        shown = []
        for stage in chosen.stages:
            size = stage.frames, stage.height, stage.width
            shown += latents(range(UNSEEN, UNSEEN + DRAWN), *size, chosen.seed)
            shown += video.samples(made, stage, SAMPLED, seed=chosen.seed)
        clips.write_sheet(samples, shown, FRAMES, ROW)
        print(f"{samples}: of each stage {DRAWN} clip as drawn and {SAMPLED} as sampled, {FRAMES} frames of each")
