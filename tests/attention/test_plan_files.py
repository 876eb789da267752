"""Plan files that were damaged or made to mislead: refused by an error of this package, or giving right results."""

import contextlib
import copy
import io
import json
import os
import tempfile
import zipfile
from collections import Counter
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
import torch

import tilewright as tw
from tilewright import devices, graph, reference
from tilewright.attention import blocks, profile, reorder
from tilewright.attention import plan as api
from tilewright.attention.blocks import tiles
from tilewright.attention.cuda import tile_lists
from tilewright.attention.masks import Bias
from tilewright.attention.schedule import record
from tilewright.core.errors import ArtifactError, VersionError

H, D, N = 2, 8, 48
DAMAGED, CRAFTED = 200, 300


def pattern():
    """Windows, a row that sees all keys, and one that sees none."""
    rows, keys = np.ogrid[:N, : N + 8]
    dense = rows // 8 == keys // 8
    dense |= np.random.default_rng(0).random(dense.shape) < 0.03
    dense[5], dense[11] = True, False
    return dense


@pytest.fixture
def scratch(tmp_path, monkeypatch):
    """A folder for thousands of files, of the test and of `tw.load`: in memory where the system has such a place."""
    memory = "/dev/shm"
    if not os.access(memory, os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


@pytest.fixture(scope="module")
def qkv():
    torch.manual_seed(0)
    return [torch.randn(1, H, n, D) for n in (N, N + 8, N + 8)]


@pytest.fixture(scope="module")
def archives(tmp_path_factory):
    """Members of three plan files: with a bias for each pair, with a table, and without one. A block is split."""
    path = tmp_path_factory.mktemp("plans") / "p.plan"
    generator = torch.Generator().manual_seed(1)
    table = Bias(torch.randn(H, 5, generator=generator), lambda rows, keys: (rows + keys) % 5)
    options = {"heads": H, "head_dim": D, "tiles": ("16x1", "16x16"), "solver": "greedy", "region_rows": 16}
    plan, found = tw.plan(pattern(), **options, split_keys=16), []
    assert plan.schedule.split.any()
    for bias in (torch.randn(H, N, N + 8, generator=generator), table, None):
        plan.with_bias(bias).save(path)
        with zipfile.ZipFile(path) as archive:
            found.append({name: archive.read(name) for name in archive.namelist()})
    return found


def written(members, path):
    """Write a plan file of `members` [(name, bytes)]."""
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members:
            archive.writestr(name, content)


def arrays_of(content):
    """Arrays, which are not to be written to, and the header of a member."""
    arrays, header = read(content)
    return dict(arrays), json.loads(header)


@lru_cache(maxsize=64)
def read(content):
    """As `arrays_of`. Most members of most files are those of `archives`."""
    with np.load(io.BytesIO(content)) as archive:
        arrays = {name: archive[name] for name in archive.files}
    for array in arrays.values():
        array.flags.writeable = False
    return arrays, bytes(arrays.pop("tilewright"))


def npz(arrays, header):
    header = {**header, "arrays": sorted(arrays)}
    text = np.frombuffer(json.dumps(header).encode(), np.uint8)
    stream = io.BytesIO()
    np.savez(stream, tilewright=text, **arrays)
    return stream.getvalue()


def expected(plan, qkv):
    """What a plan says that its result is: by its own pattern, order, bias and scale."""
    dense = np.zeros(plan.graph.shape, bool)
    dense[np.ix_(plan.graph.row_order, plan.graph.col_order)] = plan.graph.to_dense()
    bias = plan.bias
    if isinstance(bias, Bias):
        bias = bias.table[:, torch.from_numpy(bias.index(*np.ogrid[: dense.shape[0], : dense.shape[1]]))]
    return reference.attention(*qkv, torch.from_numpy(dense), bias=bias, scale=plan.scale)


def outcome(path, qkv):
    """``refused`` or ``right``; fails for any other error, for an index out of range and for a wrong result."""
    try:
        plan = tw.load(path)
        out = plan(*qkv)
    except tw.TilewrightError:
        return "refused"
    executor, (n_q, n_k) = next(iter(plan._prepared.values())), plan.graph.shape
    for launch in executor.launches:
        for chunk in launch.chunks:
            assert chunk.rows.min() >= 0 and chunk.rows.max() < n_q
            assert chunk.keys.min() >= 0 and chunk.keys.max() < n_k
    for _, sources in executor.merges:
        assert sources.min() >= 0 and sources.max() < executor.n_parts
    assert executor.back.min() >= 0 and executor.back.max() <= executor.n_results
    for t in np.unique(plan.schedule.tile):
        name, mine = plan.schedule.tiles[t], plan.schedule.tile == t
        columns = (getattr(plan.schedule, column)[mine] for column in ("block", "run_lo", "run_hi"))
        # What a GPU would read; with a bias, since factors of masks take long to find.
        lists = tile_lists.build(plan.blocks[name], *columns, 64, lambda rows, keys: 0 * (rows + keys))
        assert lists.keys.min() >= 0 and lists.keys.max() < n_k
        assert lists.items[:, :2].min() >= 0 and lists.items[:, :2].sum(1).max() <= n_q
    torch.testing.assert_close(out.double(), expected(plan, qkv), atol=1e-4, rtol=1e-4, equal_nan=True)
    return "right"


def damaged(rng, members):
    """Bytes of a plan file after an accident."""
    names = list(members)
    what = rng.integers(6)
    listed = [(name, members[name]) for name in names]
    if what == 0:
        del listed[rng.integers(len(listed))]
    elif what == 1:
        listed.append(listed[rng.integers(len(listed))])
    elif what == 2:
        name, content = listed[rng.integers(len(listed))]
        listed.append((name, content[: rng.integers(len(content))]))
    stream = io.BytesIO()
    written(listed, stream)
    raw = bytearray(stream.getvalue())
    if what == 3:
        del raw[rng.integers(len(raw)) :]
    elif what == 4:
        lo = rng.integers(len(raw))
        del raw[lo : lo + rng.integers(1, 64)]
    elif what == 5:
        for _ in range(rng.integers(1, 4)):
            raw[rng.integers(len(raw))] = rng.integers(256)
    return bytes(raw)


def altered_member(rng, content):
    """A member with a byte changed, and a checksum of the archive that agrees: only what is inside can tell."""
    raw = bytearray(content)
    raw[rng.integers(len(raw))] ^= 1 << rng.integers(8)
    return bytes(raw)


WRONG = (None, True, False, -1, 0, 1, 2, 7, 1.5, -0.5, 1e6, float("nan"), float("inf"), 10**30, "", "x", "../x", [], {})


def altered_json(rng, document):
    """A document with one of its values, at any depth, changed, lost or doubled."""
    while True:
        spot = document
        while True:
            keys = list(spot) if isinstance(spot, dict) else range(len(spot))
            if not len(keys):
                break
            key = keys[rng.integers(len(keys))]
            if not isinstance(spot[key], (dict, list)) or not len(spot[key]) or rng.random() < 0.2:
                break
            spot = spot[key]
        if len(keys):
            break
    what = rng.integers(4)
    if what == 0:
        del spot[key]
    elif what == 1 and isinstance(spot, list):
        other = rng.integers(len(spot))
        spot[key], spot[other] = spot[other], spot[key]
    elif what == 2 and isinstance(spot[key], (int, float)):
        spot[key] += int(rng.choice([-1, 1]))
    else:
        spot[key] = copy.deepcopy(WRONG[rng.integers(len(WRONG))])


def altered_array(rng, arrays):
    """One array with values, form or place changed."""
    names = [name for name in arrays if name != "format"]
    if not names:
        return
    name = names[rng.integers(len(names))]
    array = arrays[name].copy()
    flat, what = array.reshape(-1), rng.integers(10)
    at = int(rng.integers(flat.size)) if flat.size else None
    if what <= 4 and at is not None:
        wrong = (-1, -2, 0, 1, N, N + 8, flat.size, 127, 255, 1 << 20, (1 << 31) - 1, -(1 << 31))
        wrong = (-1.0, 0.0, 50.0, np.nan, np.inf, -np.inf) if array.dtype.kind == "f" else wrong
        near = (flat[at].item() + 1, flat[at].item() - 1, flat[rng.integers(flat.size)])
        value = near[rng.integers(3)] if what < 3 else wrong[rng.integers(len(wrong))]
        with np.errstate(all="ignore"):
            flat[at] = np.asarray(value).astype(array.dtype)
    elif what == 5 and at is not None:
        other = rng.integers(flat.size)
        flat[at], flat[other] = flat[other], flat[at]
    elif what == 6:
        array = array[:-1] if rng.random() < 0.5 else np.concatenate([array, array], -1)
    elif what == 7:
        kinds = ("int8", "int16", "int32", "int64", "uint32", "float32", "float64", "bool", "complex64")
        with np.errstate(all="ignore"):
            array = array.astype(kinds[rng.integers(len(kinds))])
    elif what == 8:
        array = array[None] if rng.random() < 0.5 else array.T[::-1]
    else:
        arrays["extra" if rng.random() < 0.3 else list(arrays)[rng.integers(len(arrays))]] = array
        if rng.random() < 0.5:
            del arrays[name]
        return
    arrays[name] = array


def signed(name, members):
    """Give the graph, blocks or profiles in `members` the digests of what they hold now, and all who refer to them."""
    if name == "graph.npz":
        arrays, header = arrays_of(members[name])
        old = header["id"]
        kept = {what: arrays.get(what) for what in ("row_order", "col_order")}
        indptr, indices, classes = arrays["indptr"], arrays["indices"], arrays["row_class"]
        if header["storage"] == "full":
            indptr, indices = graph.take_rows(indptr, indices, np.unique(classes, return_index=True)[1])
        made = graph.Graph(indptr, indices, classes, header["shape"][1], **kept)
        header |= {"id": made.id, "entries": made.entries}
        members[name] = npz(arrays, header)
        replace(members, old, header["id"])
        for other in [other for other in members if other.startswith("blocks-")]:
            signed(other, members)
    elif name.startswith("blocks-"):
        arrays, header = arrays_of(members[name])
        old, tile, stored = header["id"], tiles.parse(header["tile"]), arrays
        if not tile.gathered:
            arrays = {**arrays, "run_keys": tiles.aligned_keys(arrays["run_keys"], tile.run, header["shape"][1])}
        facts = header["graph_id"], header["meta"], header["region_rows"]
        header["id"] = blocks.Blocks(tile, header["shape"], *facts, **arrays).id
        members[name] = npz(stored, header)
        replace(members, old, header["id"])
    elif name.startswith("profile-"):
        document = json.loads(members[name])
        old, document["device_id"] = document["device_id"], devices.device_id(document["device"])
        members[name] = json.dumps(document).encode()
        replace(members, old, document["device_id"])


def replace(members, old, new):
    """Write `new` wherever `members` refer to the digest `old`."""
    for name, content in members.items():
        if name.endswith(".json"):
            members[name] = content.replace(json.dumps(old).encode(), json.dumps(new).encode())
        elif name.startswith("blocks-"):
            arrays, header = arrays_of(content)
            if header["graph_id"] == old:
                members[name] = npz(arrays, header | {"graph_id": new})


def crafted(rng, members):
    """Members of a plan file whose digests are those of what they hold, though something in it was changed."""
    members, names = dict(members), list(members)
    name = names[rng.integers(len(names))]
    what = rng.random()
    if what < 0.03:
        other = names[rng.integers(len(names))]
        members[name], members[other] = members[other], members[name]
        return members
    if what < 0.06:
        members[name] = altered_member(rng, members[name])
        return members
    for _ in range(rng.integers(1, 3)):
        if name.endswith(".json"):
            document = json.loads(members[name])
            altered_json(rng, document)
            members[name] = json.dumps(document).encode()
        else:
            arrays, header = arrays_of(members[name])
            altered_json(rng, header) if rng.random() < 0.15 else altered_array(rng, arrays)
            members[name] = npz(arrays, header)
    # What cannot be read to be signed stays as it is.
    with contextlib.suppress(Exception):
        signed(name, members)
    return members


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_no_damaged_file_is_misread(scratch, archives, qkv):
    rng, found = np.random.default_rng(1), Counter()
    for i in range(DAMAGED):
        (scratch / "p.plan").write_bytes(damaged(rng, archives[i % len(archives)]))
        found[outcome(scratch / "p.plan", qkv)] += 1
    # Flips of what an archive says of no member's content do no harm, nor does a member that is there twice.
    assert found["refused"] > DAMAGED / 2 and found["right"] > DAMAGED / 20, found


def test_no_crafted_file_is_misread(scratch, archives, qkv):
    rng, found = np.random.default_rng(2), Counter()
    for i in range(CRAFTED):
        written(crafted(rng, archives[i % len(archives)]).items(), scratch / "p.plan")
        found[outcome(scratch / "p.plan", qkv)] += 1
    assert found["refused"] > CRAFTED / 2 and found["right"] > CRAFTED / 20, found


def change(member, alter):
    """``change(members)``: `member` altered by ``alter(its arrays)`` or ``alter(its document)``."""

    def changed(members):
        members = dict(members)
        if member.endswith(".json"):
            document = json.loads(members[member])
            alter(document)
            members[member] = json.dumps(document).encode()
        else:
            arrays, header = arrays_of(members[member])
            alter(arrays)
            members[member] = npz(arrays, header)
        with contextlib.suppress(Exception):
            signed(member, members)
        return members

    return changed


def put(name, value, at=-1):
    def alter(arrays):
        arrays[name] = arrays[name].copy()
        arrays[name][at] = value

    return alter


def shift(column, by):
    return lambda document: document["work"][column].append(document["work"][column].pop() + by)


@pytest.mark.parametrize(
    ("member", "alter", "message"),
    [
        ("graph.npz", put("indices", N + 8), r"indices: 0\.\.55, found 0\.\.56"),
        ("graph.npz", put("indptr", 1 << 40, 3), r"indptr: 0\.\.\d+, found 0\.\.1099511627776"),
        ("graph.npz", put("row_order", 0, slice(2)), r"row_order: each of 0\.\.47 once, found no "),
        ("graph.npz", put("col_order", -1), r"col_order: 0\.\.55, found -1"),
        ("graph.npz", put("row_class", 999), r"row_class: 0\.\.\d+, found 0\.\.999"),
        ("graph.npz", lambda arrays: arrays.pop("row_order"), "an ordered graph, found none"),
        ("blocks-16x1.npz", put("run_keys", 1 << 30, (-1, 0)), r"first of run_keys: 0\.\.55"),
        ("blocks-16x1.npz", put("run_keys", -1, (0, 0)), r"first of run_keys: 0\.\.55"),
        ("blocks-16x1.npz", put("run_mask", 1000), r"run_mask: -1\.\.\d+, found .*\.\.1000"),
        ("blocks-16x1.npz", put("row_ptr", 40, 1), r"steps of row_ptr: 1\.\.16"),
        ("blocks-16x1.npz", put("run_ptr", -5, 1), r"run_ptr: 0\.\.\d+, found -5"),
        ("blocks-16x1.npz", put("masks", 0, 0), r"each pair of graph \w+ covered once, found others"),
        ("blocks-16x16.npz", put("run_keys", 8), "run_keys: multiples of 16"),
        ("bias.npz", put("index", 5), r"index: 0\.\.4, found 0\.\.5"),
        ("bias.npz", put("pair", 1 << 40), "the pairs of the pattern"),
        ("bias.npz", put("table", np.nan), "a bias below infinity, found infinity or NaN"),
        ("profile-16x1.json", lambda document: document.update(head_dim=-1), "head_dim: expected int >= 1"),
        ("schedule.json", lambda document: document["work"]["shape"].append(3), "columns of one length"),
        ("schedule.json", shift("run_hi", 1), "run_hi of the work items of its regions"),
        ("schedule.json", shift("block", 999), r"block: 0\.\.\d+, found"),
        ("schedule.json", shift("shape", 1), "shape of the work items of its regions"),
        ("schedule.json", shift("tile", 1 << 20), "numbers of the columns' types"),
        ("plan.json", lambda document: document.update(scale="NaN"), r"a complete plan file.*scale: expected float"),
        ("plan.json", lambda document: document.update(tiles=["../x"]), r"tiles such as .*, found '\.\./x'"),
        ("plan.json", lambda document: document.pop("reorder"), "missing required field `reorder`"),
    ],
    ids=lambda value: value if isinstance(value, str) and value.endswith(("npz", "json")) else "",
)
def test_what_is_wrong_is_named(tmp_path, archives, member, alter, message):
    written(change(member, alter)(archives[1]).items(), tmp_path / "p.plan")
    with pytest.raises(ArtifactError, match=rf"p\.plan: .*{message}"):
        tw.load(tmp_path / "p.plan")


def other(device, **changes):
    """A device that differs in some facts, or in the versions of some packages."""
    versions = {name: changes.pop(name) for name in list(changes) if name in ("torch", "numpy", "triton")}
    return device | changes | {"versions": device["versions"] | versions}


@pytest.mark.parametrize("change", [{"numpy": "99.0"}, {"triton": "9.9"}, {"memory_bytes": 1}], ids=str)
def test_a_plan_outlives_what_does_not_change_timing(tmp_path, archives, qkv, monkeypatch, caplog, change):
    written(archives[2].items(), tmp_path / "p.plan")
    here = other(devices.describe("cpu"), **change)
    monkeypatch.setattr(devices, "describe", lambda kind: here)
    assert outcome(tmp_path / "p.plan", qkv) == "right" and not caplog.records


@pytest.mark.parametrize("change", [{"torch": "2.99.1"}, {"threads": 7}, {"l2_bytes": 1 << 30}], ids=str)
def test_a_plan_runs_where_its_times_no_longer_hold(tmp_path, archives, qkv, monkeypatch, caplog, change):
    written(archives[2].items(), tmp_path / "p.plan")
    here = other(devices.describe("cpu"), **change)
    monkeypatch.setattr(devices, "describe", lambda kind: here)
    assert outcome(tmp_path / "p.plan", qkv) == "right"
    assert f"p.plan: {next(iter(change))} differ from those that it was profiled with" in caplog.text


# Written by version 0.1.0 on some processor; more are added when a format changes, and none is replaced.
WRITTEN = sorted((Path(__file__).parent / "plans").glob("version-*.plan"))


def planned_on(path):
    """The device that a plan file was profiled on."""
    with zipfile.ZipFile(path) as archive:
        profile = next(name for name in archive.namelist() if name.startswith("profile-"))
        return json.loads(archive.read(profile))["device"]


@pytest.mark.parametrize("path", WRITTEN, ids=lambda path: path.stem)
def test_plans_that_were_written_by_every_version_are_read(tmp_path, qkv, monkeypatch, path):
    here = planned_on(path)
    monkeypatch.setattr(devices, "describe", lambda kind: here)
    assert outcome(path, qkv) == "right"
    plan = tw.load(path)
    assert plan.graph.id == reorder.apply(graph.from_pattern(pattern()), plan.reorder["order"])[0].id
    assert isinstance(plan.bias, Bias)
    # Written again, it is the same plan in today's formats.
    plan.save(tmp_path / "again.plan")
    assert tw.load(tmp_path / "again.plan").digest() == plan.digest()


def test_todays_formats_are_among_those_that_were_written():
    def versions(path):
        with zipfile.ZipFile(path) as archive:
            members = {name: archive.read(name) for name in archive.namelist()}
        headers = {
            name: json.loads(content) if name.endswith(".json") else arrays_of(content)[1]
            for name, content in members.items()
        }
        return {(header["kind"], header["version"]) for header in headers.values()}

    modules = {"graph": graph, "blocks": blocks, "profile": profile, "schedule": record}
    today = {(kind, module.VERSION) for kind, module in modules.items()}
    today |= {("plan", api.VERSION), ("bias", api.VERSION)}
    assert WRITTEN and today in [versions(path) for path in WRITTEN]


@pytest.mark.parametrize(
    ("member", "version", "writer", "advice"),
    [
        ("plan.json", 0, "0.0.9", "an older tilewright 0.0.9 wrote this plan: plan the pattern again and save it"),
        ("profile-16x1.json", 0, None, "an older tilewright wrote this plan: plan the pattern again and save it"),
        (
            "plan.json",
            99,
            "9.1",
            rf"a newer tilewright 9.1 wrote this plan: upgrade this one, {tw.__version__}, or plan",
        ),
        ("graph.npz", 99, "9.1", r"a newer tilewright 9.1 wrote this plan"),
    ],
)
def test_a_plan_of_another_version_says_what_to_do(tmp_path, archives, member, version, writer, advice):
    members = dict(archives[1])
    if member.endswith(".json"):
        members[member] = json.dumps(json.loads(members[member]) | {"version": version}).encode()
    else:
        arrays, header = arrays_of(members[member])
        members[member] = npz(arrays, header | {"version": version})
    document = json.loads(members["plan.json"])
    document["made_by"] = {} if writer is None else {"tilewright": writer}
    members["plan.json"] = json.dumps(document).encode()
    written(members.items(), tmp_path / "p.plan")
    kind = member.partition(".")[0].partition("-")[0]
    with pytest.raises(
        VersionError, match=rf"p\.plan: {member}: expected {kind} version \d+, found version {version}; {advice}"
    ):
        tw.load(tmp_path / "p.plan")
