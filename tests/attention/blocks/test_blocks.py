import dataclasses
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.files import run_script
from tilewright import graph
from tilewright.attention import blocks
from tilewright.attention.blocks import tiles
from tilewright.attention.blocks.cut import cut, regions
from tilewright.core import artifacts
from tilewright.core.errors import ArtifactError, TileError
from tilewright_study.stages import blocks as stage

SCRIPT = Path(__file__).parents[3] / "workflow/scripts/extract_blocks.py"
TILES = ["1x1", "16x1", "32x1", "64x1", "128x1", "4x8", "16x16", "32x32", "64x16", "64x64", "128x128"]


def windowed(n_windows=6, rows=49, keys=50):
    """Rows of a window see the window's keys and the first key; the first row sees all."""
    dense = np.kron(np.eye(n_windows, dtype=bool), np.ones((rows, keys), bool))
    dense[:, 0] = dense[0] = True
    return graph.from_pattern(dense)


@st.composite
def patterns(draw):
    n_rows, n_cols = draw(st.integers(1, 140)), draw(st.integers(1, 150))
    rng = np.random.default_rng(draw(st.integers(0, 10**6)))
    dense = rng.random((n_rows, n_cols)) < draw(st.sampled_from([0.01, 0.2, 0.9]))
    # Equal neighbours, rows without keys and global rows and keys, as models have them.
    dense = np.repeat(dense, draw(st.sampled_from([1, 5, 40])), axis=0)[:n_rows]
    dense[rng.random(n_rows) < draw(st.sampled_from([0.0, 0.3]))] = False
    dense[rng.random(n_rows) < draw(st.sampled_from([0.0, 0.05]))] = True
    dense[:, rng.random(n_cols) < draw(st.sampled_from([0.0, 0.2]))] = True
    dense[n_rows // 2, n_cols // 2] = True
    return dense


def check(cover, dense, tile, region_rows):
    """Assert every promise of `Blocks` against the dense pattern, from the arrays alone."""
    counts = np.zeros(dense.shape, int)
    assert cover.region_ptr[0] == cover.row_ptr[0] == cover.run_ptr[0] == 0
    assert cover.region_ptr[-1] == cover.row_ptr[-1] == len(dense) and cover.run_ptr[-1] == len(cover.run_keys)
    assert set(cover.region_ptr.tolist()) <= set(cover.row_ptr.tolist())
    assert 0 < np.diff(cover.region_ptr).min() <= np.diff(cover.region_ptr).max() <= region_rows
    assert 0 < cover.rows.min() <= cover.rows.max() <= tile.rows
    masks = np.unpackbits(cover.masks, axis=2, bitorder="little").astype(bool)
    for b in range(cover.n_blocks):
        rows = np.arange(cover.row_ptr[b], cover.row_ptr[b + 1])
        seen_before = []
        for r in range(cover.run_ptr[b], cover.run_ptr[b + 1]):
            keys = cover.run_keys[r]
            real = keys[keys >= 0]
            assert len(real) and (keys[len(real) :] == -1).all()
            if tile.gathered:
                assert dense[np.ix_(rows, real)].any(0).all()
                assert len(real) == tile.run or r == cover.run_ptr[b + 1] - 1
            else:
                expected = np.arange(keys[0], keys[0] + tile.run)
                assert keys[0] % tile.run == 0 and np.array_equal(real, expected[expected < dense.shape[1]])
            truth = np.zeros((tile.rows, tile.run), bool)
            truth[: len(rows), : len(real)] = dense[np.ix_(rows, real)]
            full = len(real) == tile.run and truth[: len(rows)].all()
            assert (cover.run_mask[r] == -1) == full
            if not full:
                assert np.array_equal(masks[cover.run_mask[r]][:, : tile.run], truth)
                assert not masks[cover.run_mask[r]][:, tile.run :].any()
            assert cover.run_entries[r] == truth.sum()
            counts[np.ix_(rows, real)] += truth[: len(rows), : len(real)]
            seen_before.extend(real.tolist())
        assert len(set(seen_before)) == len(seen_before)
        if tile.gathered:
            by_all = dense[np.ix_(rows, seen_before)].all(0)
            assert (np.diff(by_all.astype(int)) <= 0).all()
            assert (np.diff(np.array(seen_before)[by_all]) > 0).all()
            assert (np.diff(np.array(seen_before)[~by_all]) > 0).all()
        else:
            assert sorted(seen_before) == seen_before
    assert np.array_equal(counts, dense)
    assert len(np.unique(cover.masks, axis=0)) == len(cover.masks)
    assert set(cover.run_mask.tolist()) - {-1} == set(range(len(cover.masks)))


@settings(max_examples=60, deadline=None)
@given(dense=patterns(), name=st.sampled_from(TILES), region_rows=st.sampled_from([1, 7, 64, 128, 1000]))
def test_blocks_cover_each_entry_exactly_once(dense, name, region_rows):
    pattern, tile = graph.from_pattern(dense), tiles.parse(name)
    try:
        tiles.check_fits(tile, dense.shape)
    except TileError:
        tile = tiles.parse("1x1")
    cover = blocks.extract(pattern, tile, region_rows)
    check(cover, dense, tile, region_rows)
    assert np.array_equal(cover.to_dense(), dense)
    assert cover.entries.sum() == cover.run_entries.sum() == pattern.entries == stage.summary(cover)["entries"]


@settings(max_examples=30, deadline=None)
@given(dense=patterns(), name=st.sampled_from(["1x1", "16x1", "4x8"]), chunk=st.sampled_from([1, 50, 1000]))
def test_blocks_do_not_depend_on_how_much_is_counted_at_a_time(dense, name, chunk):
    pattern, tile = graph.from_pattern(dense), tiles.parse(name)
    if dense.shape[0] < 3 or dense.shape[1] < 5:
        tile = tiles.parse("1x1")
    whole = blocks.extract(pattern, tile)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tilewright.attention.blocks.cut._CHUNK", chunk)
        parts = blocks.extract(pattern, tile)
        check(parts, dense, tile, 128)
    assert parts.id == whole.id


def test_extract_leaves_its_graph_as_it_was():
    pattern = windowed()
    before = pattern.id, pattern.row_id.copy()
    blocks.extract(pattern, tiles.parse("16x1"))
    assert pattern.id == before[0] and np.array_equal(pattern.row_id, before[1])
    assert graph.from_pattern(pattern.to_dense()).id == before[0]


@pytest.mark.parametrize("name", TILES)
def test_every_tile_refines_the_same_regions(name):
    pattern = windowed()
    cover = blocks.extract(pattern, tiles.parse(name))
    assert cover.region_ptr.tolist() == regions(pattern).tolist()
    assert cover.region.tolist() == np.repeat(np.arange(cover.n_regions), np.bincount(cover.region)).tolist()
    assert cover.row_ptr.tolist() == cut(pattern, *_arguments(cover.tile), cover.region_ptr).tolist()


def _arguments(tile):
    return tile.rows, tile.run, tile.gathered


def test_rows_of_a_window_make_full_runs_and_share_the_padded_one():
    cover = blocks.extract(windowed(), tiles.parse("64x1"))
    summary = stage.summary(cover)
    # The global row sees 300 keys, the rest of its window 50, each other window 51: every block ends in a padded run.
    assert summary["blocks"] == 7 and summary["runs"] == 19 + 6 * 4 and summary["full_runs"] == 18 + 6 * 3
    assert summary["masks"] == 3
    assert summary["area"] == summary["runs"] * 64 * 16 == cover.area.sum()
    assert summary["fill"] == summary["entries"] / summary["area"]


def test_more_masks_than_the_first_table_holds_are_told_apart():
    rng = np.random.default_rng(0)
    dense = rng.random((64, 900)) < 0.5
    cover = blocks.extract(graph.from_pattern(dense), tiles.parse("16x8"))
    assert len(cover.masks) > 400
    check(cover, dense, cover.tile, 128)


def test_one_token_is_covered():
    cover = blocks.extract(graph.from_pattern(np.ones((1, 1), bool)), tiles.parse("1x1"))
    assert cover.run_keys.tolist() == [[0] + [-1] * 15] and cover.masks.tolist() == [[[1, 0]]]
    assert cover.density.tolist() == [1 / 16]


def test_rows_without_keys_have_no_run_and_no_density():
    dense = np.zeros((40, 40), bool)
    dense[:8, :16] = True
    cover = blocks.extract(graph.from_pattern(dense), tiles.parse("8x16"))
    assert cover.runs.tolist()[0] == 1 and not cover.runs[1:].any()
    assert cover.density[0] == 1 and np.isnan(cover.density[1:]).all()


def test_a_tile_larger_than_the_graph_is_refused():
    with pytest.raises(TileError, match="tile 128x1 is larger than the graph"):
        blocks.extract(graph.from_pattern(np.eye(50, dtype=bool)), tiles.parse("128x1"))


@pytest.mark.parametrize("name", ["16x16", "64x1"])
def test_saved_blocks_load_as_they_were(tmp_path, name):
    cover = blocks.extract(windowed(), tiles.parse(name))
    blocks.save(tmp_path / "b.npz", cover)
    loaded = blocks.load(tmp_path / "b.npz")
    for field in dataclasses.fields(cover):
        one, other = getattr(cover, field.name), getattr(loaded, field.name)
        if isinstance(one, np.ndarray):
            assert one.dtype == other.dtype and np.array_equal(one, other), field.name
        else:
            assert one == other, field.name
    assert loaded.id == cover.id


def test_the_id_tells_covers_apart():
    pattern = windowed()
    covers = [blocks.extract(pattern, tiles.parse(name), rows) for name in ("16x1", "32x1") for rows in (64, 128)]
    covers.append(blocks.extract(windowed(keys=40), tiles.parse("16x1")))
    assert len({cover.id for cover in covers}) == 5


def _rewritten(path, change_arrays=None, change_header=None):
    arrays, header = artifacts.read_npz(path, blocks.KIND, blocks.VERSION)
    (change_arrays or (lambda a: None))(arrays)
    (change_header or (lambda h: None))(header)
    header = {k: v for k, v in header.items() if k not in ("kind", "version", "made_by")}
    artifacts.write_npz(path, blocks.KIND, blocks.VERSION, arrays, header)


@pytest.mark.parametrize(
    "change",
    [
        {"change_arrays": lambda a: a.pop("masks")},
        {"change_arrays": lambda a: a.update(extra=a["masks"])},
        {"change_header": lambda h: h.pop("tile")},
        {"change_header": lambda h: h.update(tile="7x7")},
        {"change_header": lambda h: h.update(shape=3)},
        {"change_header": lambda h: h.update(tile="32x16")},
        {"change_header": lambda h: h.pop("id")},
    ],
    ids=["no-masks", "extra", "no-tile", "bad-tile", "bad-shape", "other-tile", "no-id"],
)
def test_an_incomplete_file_is_refused(tmp_path, change):
    path = tmp_path / "b.npz"
    blocks.save(path, blocks.extract(windowed(), tiles.parse("16x16")))
    _rewritten(path, **change)
    with pytest.raises(ArtifactError, match=r"b\.npz: expected (a complete blocks file|a known tile|the arrays|masks)"):
        blocks.load(path)


@pytest.mark.parametrize(
    "change",
    [
        {"change_arrays": lambda a: a.update(run_entries=np.maximum(a["run_entries"] - 1, 1))},
        {"change_header": lambda h: h.update(graph_id="other")},
    ],
    ids=["entries", "graph"],
)
def test_an_altered_file_is_refused(tmp_path, change):
    path = tmp_path / "b.npz"
    blocks.save(path, blocks.extract(windowed(), tiles.parse("16x16")))
    _rewritten(path, **change)
    with pytest.raises(ArtifactError, match="the file was altered"):
        blocks.load(path)


def test_the_command_writes_the_file_or_one_line(tmp_path):
    graph.save(tmp_path / "A_ic.npz", windowed())

    def call(tile):
        flags = ["--input", tmp_path / "A_ic.npz", "--tile", tile, "--output", tmp_path / "out" / "b.npz"]
        return run_script(SCRIPT, *flags, "--region-rows", "64")

    wrong = call("48x1")
    assert wrong.returncode == 2 and wrong.stderr.startswith("error: tile '48x1'") and wrong.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()
    right = call("64x1")
    assert right.returncode == 0, right.stderr
    cover = blocks.load(tmp_path / "out" / "b.npz")
    assert cover.region_rows == 64 and cover.graph_id == windowed().id


def test_extracting_blocks_needs_no_compiler():
    code = (
        "import sys; import numpy as np;"
        "from tilewright import graph; from tilewright.attention import blocks;"
        "from tilewright.attention.blocks import tiles, work;"
        "work.items(blocks.extract(graph.from_pattern(np.eye(40, dtype=bool)), tiles.parse('16x1')), None);"
        "sys.exit('numba' in sys.modules or 'torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
