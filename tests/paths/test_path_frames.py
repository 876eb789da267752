"""From a frame to its class map within a budget: what comes before and after the network, and who picks what runs."""

import json
import logging
from itertools import chain, repeat
from time import sleep

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image

from tilewright import networks, paths
from tilewright.core.errors import ArtifactError, BudgetError, ConfigError, PatternError
from tilewright.paths import frame_runner, frames, record, table
from tilewright.paths.frame_runner import FrameRunner
from tilewright.paths.lateness import Closed
from tilewright.paths.record import HOUR, Record
from tilewright.paths.runner import Runner, facts
from tilewright.paths.table import Entry, Table

CUDA = torch.cuda.is_available()
DEVICE, DTYPE = ("cuda", torch.bfloat16) if CUDA else ("cpu", torch.float32)
SIZE, CLASSES = (40, 56), 7
FULL, SOME = "2.2.2.2", "1.0.1.0"


def network(variant="b0", size=32, classes=CLASSES, seed=0):
    made = networks.create("segformer", variant=variant, image_size=size, num_classes=classes, seed=seed)
    torch.nn.init.normal_(made.decode_head.linear_pred.weight, generator=torch.Generator().manual_seed(seed))
    return made.to(DEVICE, DTYPE).eval()


def entry(of, path, choice, **more):
    known = {"rung": "trained", "batch": 1, "macs": 1, "p50_us": 9e3 * choice, "promise_us": 1e4 * choice, **facts(of)}
    return Entry(**(known | {"path": path, "choice": choice} | more))


@pytest.fixture(scope="module")
def several():
    """Two networks, of two sizes of images."""
    return network(), network("b1", 64, seed=1)


@pytest.fixture(scope="module")
def joint(several):
    small, large = several
    rows = [entry(small, SOME, 0.2), entry(small, FULL, 0.4), entry(large, SOME, 0.3), entry(large, FULL, 0.5)]
    return Table(rows, joint=True)


@pytest.fixture(scope="module")
def runner(several, joint):
    made = FrameRunner(several, joint, SIZE)
    promised(made)
    return made


def promised(made):
    """Let a runner promise what the table says about frames of its size, unmeasured."""
    made.table = Table([change(x, frame="x".join(map(str, SIZE))) for x in made.table.rows], joint=True)


def change(row, **fields):
    return Entry(**({name: getattr(row, name) for name in Entry.__struct_fields__} | fields))


@pytest.fixture(scope="module")
def frame():
    return torch.randint(0, 256, (*SIZE, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


@torch.inference_mode()
def by_hand(of, path, frame):
    """The class map as the libraries that people use make it, and where its largest logits are hardly apart."""
    images = torch.empty(1, 3, *of.options.pixels)
    frames.images_of(frame[None], images)
    maps = of(images.to(DEVICE, DTYPE), path).float().cpu()
    large = F.interpolate(maps, size=SIZE, mode="bilinear", align_corners=False)[0]
    top = large.topk(2, 0).values
    return large.argmax(0), top[0] - top[1] <= (0.05 if CUDA else 1e-4) * large.abs().max()


def test_each_network_and_path_labels_a_frame(runner, several, frame):
    seen = set()
    for row, of in zip(runner.table.rows, (several[0], several[1], several[0], several[1]), strict=True):
        # The device does not keep these promises.
        runner.control = Closed(0.01)
        labels, told = runner(frame, row.promise_us)
        assert (told.network, told.path, told.short) == (row.network, row.path, False)
        assert labels.dtype == torch.uint8 and labels.shape == SIZE
        expected, near = by_hand(of, row.path, frame)
        assert not ((labels != expected) & ~near).any() and near.float().mean() < (0.5 if CUDA else 0.2)
        seen.add(labels.numpy().tobytes())
    assert len(seen) == 4


def test_a_class_map_is_the_caller_s(runner, frame):
    first, _ = runner(frame, 1e9)
    kept = first.clone()
    runner(255 - frame, 1e9)
    assert torch.equal(first, kept)


def test_frames_of_all_kinds_give_the_same(runner, frame, tmp_path):
    expected, _ = runner(frame, 1e9)
    image = Image.fromarray(frame.numpy())
    image.save(tmp_path / "frame.png")
    # Turned by a quarter, and said to be.
    exif = Image.Exif()
    exif[274] = 6
    image.transpose(Image.Transpose.ROTATE_90).save(tmp_path / "turned.png", exif=exif)
    others = [frame.numpy(), frame.numpy()[:, ::-1][:, ::-1], frame.flip(1).flip(1), image, str(tmp_path / "frame.png")]
    for other in (*others, tmp_path / "turned.png", frame.to(DEVICE), frame[None]):
        labels, told = runner(other, 1e9)
        assert torch.equal(labels.cpu().view(SIZE), expected)
        assert labels.ndim == getattr(other, "ndim", 3) - 1
        assert (told.took_us is None) == labels.is_cuda == (isinstance(other, torch.Tensor) and other.is_cuda)


def damaged(path):
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (*SIZE, 3), dtype=np.uint8)).save(path)
    path.write_bytes(path.read_bytes()[:-4000])
    return path


BAD = {
    "size": (np.zeros((40, 55, 3), np.uint8), PatternError, "expected 1x40x56x3 of the runner, found 1x40x55x3"),
    "planes first": (torch.zeros(3, 40, 56, dtype=torch.uint8), PatternError, "found 1x3x40x56"),
    "two": (torch.zeros(2, 40, 56, 3, dtype=torch.uint8), PatternError, "found 2x40x56x3"),
    "type": (torch.zeros(40, 56, 3), PatternError, "expected uint8 1x40x56x3 or an image, found torch.float32"),
    "empty": (np.zeros((0, 56, 3), np.uint8), PatternError, "found 1x0x56x3"),
    "nothing": (np.zeros(0, np.uint8), PatternError, "found 0"),
    "meta": (torch.zeros(40, 56, 3, dtype=torch.uint8, device="meta"), PatternError, "expected uint8 1x40x56x3"),
    "sparse": (torch.zeros(40, 56, 3, dtype=torch.uint8).to_sparse(), PatternError, "expected uint8 1x40x56x3"),
    "none": (None, PatternError, "or an image, found None"),
    "mode L": (Image.new("L", (56, 40)), PatternError, "expected an RGB image, found mode L"),
    "mode I;16": (Image.new("I;16", (56, 40)), PatternError, "expected an RGB image, found mode I;16"),
    "mode RGBA": (Image.new("RGBA", (56, 40)), PatternError, "expected an RGB image, found mode RGBA"),
    "no file": ("nowhere.png", ArtifactError, "nowhere.png: no such file; expected an image"),
}


@pytest.mark.parametrize("kind", BAD)
def test_frames_that_are_none(runner, kind):
    value, error, message = BAD[kind]
    before = runner.record.frames
    with pytest.raises(error, match=message):
        runner(value, 1e9)
    assert runner.record.frames == before


@pytest.mark.parametrize("as_image", [False, True])
def test_a_truncated_file_is_one_line(runner, tmp_path, as_image):
    path = damaged(tmp_path / "half.png")
    with pytest.raises(ArtifactError, match=r"expected an? (whole )?image, found") as raised:
        runner(Image.open(path) if as_image else path, 1e9)
    assert "\n" not in str(raised.value)


def test_a_file_that_is_refused_is_named(runner, tmp_path):
    Image.new("L", SIZE[::-1]).save(tmp_path / "gray.png")
    with pytest.raises(PatternError, match=r"gray\.png: expected an RGB image, found mode L"):
        runner(tmp_path / "gray.png", 1e9)
    with pytest.raises(ArtifactError, match=r": expected an image, found a folder$"):
        runner(tmp_path, 1e9)


def test_a_budget_below_the_fastest_path_is_said(several, joint, runner, frame, caplog):
    fresh = FrameRunner(several, joint, SIZE)
    promised(fresh)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            labels, told = fresh(frame, 1.0)
    assert told.short and told.path == SOME and labels.shape == SIZE and fresh.record.short == 3
    assert [x.getMessage() for x in caplog.records if "budget" in x.getMessage()] == [
        "budget: expected at least 2000 us, which the fastest path promises, found 1 us; the fastest path runs"
    ]
    strict = FrameRunner(several, joint, SIZE, late="error")
    promised(strict)
    with pytest.raises(BudgetError, match="expected at least 2000 us"):
        strict(frame, 1.0)
    for budget in (0, 10**400, "9", True, float("inf")):
        with pytest.raises(BudgetError, match="expected microseconds above 0, found "):
            runner(frame, budget)
    assert runner(frame, np.float32(1))[1].short is True


def test_promises_are_about_frames(several, joint, frame, tmp_path):
    made = FrameRunner(several, joint, SIZE)
    with pytest.raises(ConfigError, match=r"frames of 40x56, found those about maps; call runner.rehearse"):
        made(frame, 1e9)
    found = made.rehearse(frame[None], 3)
    assert {len(times) for times in found.values()} == {3} and len(found) == 4
    for row in made.table.rows:
        parts = [getattr(row, name) for name in paths.PARTS]
        assert row.frame == "40x56" and all(us >= 0 for us in parts) and sum(parts) > 0
        assert row.p50_us == pytest.approx(np.median(found[made.table.key(row)]))
    assert made(frame, 1e9)[1].promised_us == made.table.rows[-1].promise_us
    table.write(tmp_path / "t.csv", made.table.rows)
    again = FrameRunner(several, paths.load(tmp_path / "t.csv", joint=True), SIZE)
    assert again(frame, 1e9)[1].path == made.table.rows[-1].path
    with pytest.raises(ConfigError, match="frames of 40x57, found those of 40x56"):
        FrameRunner(several, again.table, (40, 57)).pick(1e9)
    with pytest.raises(ConfigError, match="of one network, found one of frames; a FrameRunner takes it"):
        Runner(several[0], Table([*made.table.rows][:1]))
    with pytest.raises(ConfigError, match="of one network, found one of several networks; a FrameRunner takes it"):
        Runner(several[0], joint)


def test_a_promise_is_about_all_that_the_host_does(several, joint, frame, monkeypatch):
    made, opened = FrameRunner(several, joint, SIZE), frames.opened

    def slowly(*given):
        sleep(0.2)
        return opened(*given)

    monkeypatch.setattr(frames, "opened", slowly)
    made.rehearse(frame[None], 1)
    assert min(row.promise_us for row in made.table.rows) > 2e5 and made.record.frames == 0
    for shown, counts in ((frame, True), (frame.numpy(), True), (Image.fromarray(frame.numpy()), False)):
        assert (made(shown, 1e9)[1].took_us > 2e5) == counts


def taking(monkeypatch, made, frame, took_us, budget_us, counting_us=0):
    """What a runner tells of frames that take so long, and of which it then takes so long to count them."""
    told: list = []
    monkeypatch.setattr(made, "run", lambda entry, given: given[..., 0])
    for us in took_us:
        times = chain([0, int(1e3 * us)], repeat(int(1e3 * (us + counting_us))))
        monkeypatch.setattr(frame_runner, "perf_counter_ns", lambda times=times: next(times))
        told.append(made(frame, budget_us)[1])
    return told


def test_promises_grow_while_too_many_are_broken(several, joint, frame, monkeypatch):
    made = FrameRunner(several, joint, SIZE)
    promised(made)
    # A device that became slower: those of before would be broken each time.
    us = made.table.rows[-1].promise_us
    told = taking(monkeypatch, made, frame, [1.04 * us] * 300, 1e9)
    broken = [x.took_us > x.promised_us for x in told]
    assert broken[0] and sum(broken) <= 6 and told[-1].promised_us < 1.2 * us
    # A stall of some frames delays those that follow, and no others.
    told = taking(monkeypatch, made, frame, [2 * us] * 3 + [us] * 20, 1e9)
    assert [x.took_us > x.promised_us for x in told] == [True] + [False] * 22
    assert told[2].promised_us >= 2 * us > 1.3 * us > told[-1].promised_us


def test_a_frame_s_time_holds_what_its_caller_waits_for(several, joint, frame, monkeypatch):
    """Frames of 5,000 us, and another 30 until what ran is counted: promises are of both."""
    made = FrameRunner(several, joint, SIZE)
    promised(made)
    told = taking(monkeypatch, made, frame, [5000] * 40, 1e9, counting_us=30)
    assert told[-1].took_us == pytest.approx(5030, abs=0.1)


def test_a_share_of_late_frames_is_spent(several, joint, frame, monkeypatch):
    made = FrameRunner(several, joint, SIZE, late_share=0.1)
    promised(made)
    with pytest.raises(ConfigError, match=r"price: call runner.rehearse"):
        made(frame, 1e9)
    # The best path keeps most of its calls within half of its promise: a budget between them gets it all the same.
    calls = {made.table.key(row): np.full(1000, 10.0 + at) for at, row in enumerate(made.table.rows)}
    best = [*calls][-1]
    made._promise(calls | {best: np.repeat([20.0, 40.0], [980, 20])})
    assert [made.table.key(row) for row in made.table.rows][-1] == best and made.table.rows[-1].promise_us == 40
    assert {x.network for x in taking(monkeypatch, made, frame, [20.0] * 3, 25.0)} == {"segformer-b1-64"}
    assert made.table.select(25.0).choice < 0.5 and made.record.short == 0
    with pytest.raises(ConfigError, match=r"late_share: expected a finite number above 0, at most 1, found 1\.5"):
        FrameRunner(several, joint, SIZE, late_share=1.5)


def test_idle_time_renews_promises(several, joint, frame, monkeypatch):
    monkeypatch.setattr(frame_runner, "FEWEST", 3)
    made = FrameRunner(several, joint, SIZE)
    made.rehearse(frame[None], 3)
    for times in made._samples.values():
        times.clear()
        times.extend([1e7] * 3)
    made.control.level_us = 7.0
    assert made.remeasure(0.05, seed=0) >= 1
    # What frames taught stays: idle calls may be faster than frames.
    assert made.control.level_us == 7.0
    assert made.table.rows[-1].promise_us >= 1e7 * 0.99
    with pytest.raises(ConfigError, match="seconds: expected a finite number above 0"):
        made.remeasure(0)


def test_networks_that_do_not_go_together(several, joint):
    small, _ = several
    with pytest.raises(ConfigError, match="expected classes 7 of all as of segformer-b0-32, found 8 of"):
        FrameRunner([small, network("b1", classes=8)], joint, SIZE)
    with pytest.raises(ConfigError, match="expected those of the path table, segformer-b1-64 with random weights"):
        FrameRunner(small, joint, SIZE)
    with pytest.raises(ConfigError, match="each once, found segformer-b0-32 with random weights again"):
        FrameRunner([small, small], joint, SIZE)
    with pytest.raises(ConfigError, match="networks: expected some that take paths"):
        FrameRunner(torch.nn.Linear(1, 1), joint, SIZE)
    with pytest.raises(ConfigError, match="at most 256 classes, found 257"):
        FrameRunner(network(classes=257), joint, SIZE)
    with pytest.raises(ConfigError, match="table: expected one to pick among 2 networks, found none"):
        FrameRunner(several, None, SIZE)
    other = Table([entry(small, FULL, 0.4, device="another")])
    with pytest.raises(ConfigError, match=r"path table: expected one of device .*, found another"):
        FrameRunner(small, other, SIZE)
    with pytest.raises(ConfigError, match=r"folded: expected batch-norm statistics of 2\.2\.2\.2, found none"):
        FrameRunner(small, Table([entry(small, FULL, 0.4, rung="statistics")]), SIZE)
    for name, value, message in [("mean", (1, 2), "mean: expected a number"), ("std", (1, 1, 0), "std: expected")]:
        with pytest.raises(ConfigError, match=message):
            FrameRunner(small, Table([entry(small, FULL, 0.4)]), SIZE, **{name: value})
    with pytest.raises(ConfigError, match=r"pixels: expected 2 integers of at least 32, found \(31, 32\)"):
        FrameRunner(small, None, SIZE, pixels=(31, 32))
    with pytest.raises(ConfigError, match="frame: expected 2 integers of at least 1, found 40"):
        FrameRunner(small, Table([entry(small, FULL, 0.4)]), 40)
    with pytest.raises(ConfigError, match="frame: expected at most 2147483647 numbers in a call, found 3000000000"):
        FrameRunner(small, None, (10**5, 10**4))


scores = st.lists(st.tuples(st.integers(1, 60), st.integers(0, 40)), min_size=1, max_size=30)


@settings(max_examples=30)
@given(scores, scores)
@example([(at, at) for at in range(1, 33, 2)], [(at, at) for at in range(2, 33, 2)])
def test_a_joint_table_never_sees_less_than_either(one, other):
    """Of every single budget: static switching and paths are tables of their own."""
    known = {"checkpoint": "", "rung": "trained", "batch": 1, "device": "x", "dtype": "float32", "macs": 1}
    tables = [
        [Entry(network=name, path="11", p50_us=1.0, promise_us=float(us), choice=x / 40, **known) for us, x in found]
        for name, found in (("a", one), ("b", other))
    ]
    both = Table([*tables[0], *tables[1]], joint=True)
    for each in tables:
        alone = Table(each, joint=True)
        for budget in range(int(alone.rows[0].promise_us), 61):
            assert both.select(budget).choice >= alone.select(budget).choice - table.ROUNDING


def test_resizing_is_pillow_s():
    for size, pixels in (((37, 53), (16, 24)), ((20, 21), (32, 40))):
        frame = torch.randint(0, 256, (1, *size, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
        found = frames.images_of(frame, torch.empty(1, 3, *pixels), (0, 0, 0), (1, 1, 1))[0].permute(1, 2, 0) * 255
        image = Image.fromarray(frame[0].numpy()).resize(pixels[::-1], Image.Resampling.BILINEAR)
        # It rounds twice, to whole levels.
        assert (found - torch.from_numpy(np.array(image)).float()).abs().max() <= 1.1


def test_a_record_counts_by_hour_and_warns_once(monkeypatch, caplog, tmp_path):
    now = [1000.0 * HOUR]
    monkeypatch.setattr(record, "time", lambda: now[0])
    seen = Record()
    with caplog.at_level(logging.WARNING):
        for number in range(3000):
            seen.saw("good", 10.0, 11.0 if number % 100 == 0 else 9.0)
        assert caplog.records == []
        for number in range(200):
            seen.saw("bad", 10.0, 11.0 if number % 10 == 0 else 10.0)
        assert len(caplog.records) == 1 and "broke their promise this hour; expected at most 1%" in caplog.text
        now[0] += HOUR
        for _ in range(10):
            seen.saw("bad", 10.0, 11.0)
        assert len(caplog.records) == 2
    seen.saw("bad", 10.0, None, short=True)
    seen.write(tmp_path / "r.json")
    told = json.loads((tmp_path / "r.json").read_text())
    assert (told["frames"], told["promised"], told["kept"]) == (3211, 3210, 2970 + 180)
    assert (told["short"], told["unseen"], len(told["warnings"])) == (1, 1, 2)
    rows = {(row["hour"][:13], row["path"]): (row["made"], row["kept"]) for row in told["hours"]}
    assert list(rows.values()) == [(3000, 2970), (200, 180), (10, 0)]
    now[0] += record.HOURS * HOUR
    seen.saw("good", 1.0, 1.0)
    assert [*seen.hours] == [1000 + 1 + record.HOURS]
    with pytest.raises(ConfigError, match="expected the path of a file"):
        seen.write("")
