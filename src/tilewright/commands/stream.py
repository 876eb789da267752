"""Label frames of a folder or a camera within a time budget, and show live which promises are kept.

Each network is NAME, NAME=CHECKPOINT, or a CHECKPOINT that says itself what it holds. A table, as `paths.table.write`
keeps it, holds the paths to pick from. Without one the network runs whole. Idle time measures paths again.
"""

import sys
from argparse import ArgumentParser
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter, sleep
from typing import TYPE_CHECKING, Any

from tilewright.commands import table as lines_of
from tilewright.core import flags, images
from tilewright.core.errors import ArtifactError, ConfigError, PatternError, need

if TYPE_CHECKING:
    from tilewright.paths.frame_runner import FrameRunner

CAMERA = "camera"
# Seconds between two lines that are shown, and between two files that are written.
SHOWN_S, WRITTEN_S = 0.1, 1.0
# Idle time that is left alone: a call that begins late delays the next frame.
SPARED_S = 0.005


def arguments(parser: ArgumentParser) -> None:
    """Where frames come from, what runs, and by when."""
    parser.add_argument(
        "--source", required=True, help="a folder of images, or camera or camera:N, which needs opencv-python"
    )
    parser.add_argument(
        "--network",
        nargs="+",
        required=True,
        metavar="NAME[=CHECKPOINT]",
        help="such as segformer-b0-512=b0.pth, or b0.pth",
    )
    parser.add_argument("--table", help="the paths to pick from, a CSV (default: the whole network)")
    parser.add_argument("--classes", type=flags.count, help="classes of the networks (default: the family's)")
    parser.add_argument(
        "--budget-us", type=flags.positive, help="budget of a frame in microseconds (default: the period of --fps)"
    )
    parser.add_argument("--fps", type=flags.positive, help="frames a second (default: as fast as they are labelled)")
    parser.add_argument("--frames", type=flags.count, help="frames in all (default: a folder once, a camera forever)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: cpu)")
    parser.add_argument("--dtype", default="float32", help="type of the weights, such as bfloat16 (default: float32)")
    parser.add_argument("--samples", type=flags.count, default=100, help="calls of each path at first (default: 100)")
    parser.add_argument("--record", type=flags.output, help="JSON file of promises to write every second")
    parser.add_argument("--output", type=flags.folder, help="folder to write class maps to, one PNG a frame")


def run(
    source: str,
    network: list[str],
    table: str | None,
    classes: int | None,
    budget_us: float | None,
    fps: float | None,
    frames: int | None,
    device: str,
    dtype: str,
    samples: int,
    record: str | None,
    output: str | None,
) -> int:
    """Label frames until there are no more. Returns 1 where a frame could not be labelled."""
    import numpy as np

    from tilewright.paths import load

    if budget_us is None and fps is None:
        raise ConfigError("--budget-us: expected a budget, or frames a second by --fps, found neither")
    if table is None and len(network) > 1:
        raise ConfigError(f"--table: expected a table to pick among {len(network)} networks, found none")
    given = frames_of(source, frames)
    rows = None if table is None else load(table, joint=True)
    networks = [_network(text, classes, device, dtype) for text in network]
    runner: Any = None
    shown, written, refused, number = 0.0, 0.0, 0, 0
    begin = due = perf_counter()
    budget = 1e6 / fps if budget_us is None and fps else budget_us
    try:
        for number, (name, frame) in enumerate(given, 1):
            try:
                if isinstance(frame, Path):
                    frame = np.array(images.rgb(frame))
                if runner is None:
                    runner = _runner(networks, rows, frame.shape[:2], samples)
                    begin = due = perf_counter()
                labels, told = runner(frame, budget)
            except (ArtifactError, PatternError) as error:
                refused += 1
                print(f"frame {number}, {name}: {error}", file=sys.stderr)
                continue
            now = perf_counter()
            if sys.stdout.isatty() and now - shown >= SHOWN_S:
                shown = now
                print(f"\r{_line(runner, told, number / max(now - begin, 1e-9), refused)}\033[K", end="", flush=True)
            if record and now - written >= WRITTEN_S:
                written = now
                runner.record.write(record)
            if output:
                _write(labels, Path(output) / f"{Path(name).stem}.{number}.png")
            if fps:
                due = max(due + 1 / fps, perf_counter())
                _idle(runner, due)
    except KeyboardInterrupt:
        pass
    if runner is None:
        raise ArtifactError(f"{source}: expected frames, found none of {number} that can be read")
    if record:
        runner.record.write(record)
    print("\n".join(["\r\033[K" * sys.stdout.isatty() + _summary(runner, number, refused), *_paths(runner)]))
    return 1 if refused else 0


def frames_of(source: str, count: int | None = None) -> Iterator[tuple[str, Any]]:
    """``(name, frame)`` of a folder, by the names of its files, again and again up to `count`; or of a camera.

    Raises `ArtifactError` for a folder without images, or a camera that gives none, and `ConfigError` for its number.
    """
    kind, _, number = source.partition(":")
    if kind == CAMERA and not Path(source).is_dir():
        if number and not number.isdigit():
            raise ConfigError(f"--source: expected camera or camera:N, found {source!r}")
        return _of_camera(int(number or 0), count)
    files = images.files_of(source, "a folder of images or camera")
    return ((file.name, file) for file in (files[at % len(files)] for at in range(count or len(files))))


def _of_camera(number, count):
    cv2 = need("cv2", "cameras", "camera", ConfigError)
    camera = cv2.VideoCapture(number)
    try:
        at = 0
        while count is None or at < count:
            seen, frame = camera.read()
            if not seen:
                raise ArtifactError(f"camera:{number}: expected a frame, found none after {at}")
            # It gives blue first.
            yield f"{at + 1}", frame[:, :, ::-1]
            at += 1
    finally:
        camera.release()


def _network(text, classes, device, dtype):
    """A network by name, with its checkpoint where one is stated, or by its checkpoint."""
    import torch

    from tilewright import devices, networks

    name, _, checkpoint = text.partition("=")
    own = {} if classes is None else {"num_classes": classes}
    known = ("float32", "float16", "bfloat16")
    if dtype not in known:
        raise ConfigError(f"--dtype: expected one of {', '.join(known)}, found {dtype!r}")
    place = devices.facts(device).TORCH_DEVICE
    devices.describe(device)
    if Path(text).exists():
        made = networks.from_checkpoint(text, **own)
    else:
        family, options = networks.parse(name, own)
        made = networks.create(family, checkpoint=checkpoint or None, **options)
    if not hasattr(made, "path"):
        raise ConfigError(f"--network: expected one that makes maps, such as segformer-b0-512, found {name}")
    return made.to(place, getattr(torch, dtype))


def _runner(networks, table, size, samples) -> "FrameRunner":
    """A runner of frames of one size that knows what it can promise."""
    from tilewright.paths import FrameRunner

    runner = FrameRunner(networks, table, size)
    runner.rehearse(count=samples)
    return runner


def _idle(runner, due):
    """Measure paths again until the next frame is due, with time to spare for a call."""
    slowest = max(entry.promise_us for entry in runner.table.rows) / 1e6
    if (free := due - perf_counter() - slowest - SPARED_S) > 0:
        runner.remeasure(free)
    sleep(max(0.0, due - perf_counter()))


def _line(runner, told, rate, refused):
    """What is shown while frames come."""
    kept = runner.record.kept / max(1, runner.record.promised)
    took = "" if told.took_us is None else f" took {told.took_us:,.0f} us of {told.promised_us:,.0f}"
    return (
        f"{runner.record.frames} frames, {rate:.1f} a second, {told.network} {told.path.split(' ')[0]}{took}, "
        f"promises kept {kept:.1%}, below every promise {runner.record.short}, refused {refused}"
    )


def _summary(runner, number, refused):
    record = runner.record
    return (
        f"{number} frames, {record.frames} labelled, {refused} refused; {record.kept} of {record.promised} promises "
        f"kept; {record.short} budgets below every promise"
    )


def _paths(runner):
    """Lines of a table: how many promises each path made and kept, and what it promises now."""
    counts: dict[str, list[int]] = {}
    for paths in runner.record.hours.values():
        for key, (made, kept) in paths.items():
            held = counts.setdefault(key, [0, 0])
            held[0] += made
            held[1] += kept
    if not counts:
        return []
    now = {runner.table.key(entry): f"{entry.promise_us:,.0f}" for entry in runner.table.rows}
    return lines_of(
        [
            {"made": str(made), "kept": str(kept), "promise_us": now.get(key, "-"), "path": key}
            for key, (made, kept) in counts.items()
        ]
    )


def _write(labels, path):
    """A class map as a PNG of its numbers."""
    Image = need("PIL.Image", "images", "study")
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(labels.cpu().numpy()).save(path)
