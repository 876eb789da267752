import os
import resource
import signal
import subprocess
import sys
import time
import tracemalloc
import zipfile

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tilewright.core import artifacts
from tilewright.core.errors import ArtifactError

ARRAYS = {"ids": np.arange(300, dtype=np.int32), "flags": np.ones((4, 5), bool), "none": np.zeros((0, 3))}


def write(path, **keywords):
    artifacts.write_npz(path, "blocks", 1, ARRAYS, {"tile": "64x1"}, {"code": "abc"}, **keywords)


@pytest.mark.parametrize("compress", [False, True])
def test_an_archive_reads_back(tmp_path, compress):
    write(tmp_path / "new" / "a.npz", compress=compress)
    arrays, header = artifacts.read_npz(tmp_path / "new" / "a.npz", "blocks", 1)
    assert arrays.keys() == ARRAYS.keys()
    assert all(np.array_equal(arrays[n], ARRAYS[n]) and arrays[n].dtype == ARRAYS[n].dtype for n in ARRAYS)
    assert header["tile"] == "64x1" and header["made_by"] == {"code": "abc"}
    with np.load(tmp_path / "new" / "a.npz") as archive:
        assert np.array_equal(archive["ids"], ARRAYS["ids"])


def test_a_document_reads_back(tmp_path):
    artifacts.write_json(tmp_path / "p.json", "profile", 2, {"latency_us": 1.5}, {"code": "abc"})
    document = artifacts.read_json(tmp_path / "p.json", "profile", 2)
    assert document == {"kind": "profile", "version": 2, "made_by": {"code": "abc"}, "latency_us": 1.5}


def test_equal_content_gives_equal_bytes(tmp_path):
    write(tmp_path / "a.npz", compress=True)
    before = (tmp_path / "a.npz").read_bytes()
    os.utime(tmp_path / "a.npz", (0, 0))
    write(tmp_path / "a.npz", compress=True)
    assert (tmp_path / "a.npz").read_bytes() == before


def test_a_new_file_has_the_permissions_of_the_umask(tmp_path):
    old = os.umask(0o027)
    try:
        artifacts.write_text(tmp_path / "t.txt", "x")
    finally:
        os.umask(old)
    assert (tmp_path / "t.txt").stat().st_mode & 0o777 == 0o640


def test_writing_holds_no_second_copy_in_memory(tmp_path):
    big = {"big": np.random.default_rng(0).integers(0, 1 << 20, 6_000_000)}
    tracemalloc.start()
    artifacts.write_npz(tmp_path / "a.npz", "blocks", 1, big, {}, compress=False)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < big["big"].nbytes * 0.8


# What cannot be read.


def read_npz(path):
    return artifacts.read_npz(path, "blocks", 1)


def read_json(path):
    return artifacts.read_json(path, "profile", 1)


@pytest.mark.parametrize("read, kind", [(read_npz, "blocks"), (read_json, "profile")])
def test_a_missing_file_is_named(tmp_path, read, kind):
    with pytest.raises(ArtifactError, match=rf"absent: no such file; expected a {kind} file"):
        read(tmp_path / "absent")


@pytest.mark.parametrize("read", [read_npz, read_json])
def test_a_folder_in_place_of_the_file_is_named(tmp_path, read):
    with pytest.raises(ArtifactError, match="cannot be read: Is a directory"):
        read(tmp_path)


@pytest.mark.parametrize(
    "kind, version, message",
    [
        ("graph", 1, "expected kind 'blocks', found 'graph'"),
        ("blocks", 9, "expected blocks version 1, found version 9"),
    ],
)
def test_an_archive_of_another_kind_or_version_is_refused(tmp_path, kind, version, message):
    artifacts.write_npz(tmp_path / "a.npz", kind, version, ARRAYS, {})
    with pytest.raises(ArtifactError, match=rf"a\.npz: {message}"):
        read_npz(tmp_path / "a.npz")


@pytest.mark.parametrize(
    "kind, version, message",
    [
        ("schedule", 1, "expected kind 'profile', found 'schedule'"),
        ("profile", 9, "expected profile version 1, found version 9"),
    ],
)
def test_a_document_of_another_kind_or_version_is_refused(tmp_path, kind, version, message):
    artifacts.write_json(tmp_path / "p.json", kind, version, {})
    with pytest.raises(ArtifactError, match=rf"p\.json: {message}"):
        read_json(tmp_path / "p.json")


def test_a_foreign_archive_is_refused(tmp_path):
    np.savez(tmp_path / "a.npz", data=np.ones(3))
    with pytest.raises(
        ArtifactError, match=r"a\.npz: expected a blocks file, found an \.npz without a tilewright header"
    ):
        read_npz(tmp_path / "a.npz")


@pytest.mark.parametrize("content", [b"", b"no archive", b"\x93NUMPY", b"PK\x03\x04"])
def test_bytes_that_are_no_archive_are_refused(tmp_path, content):
    (tmp_path / "a.npz").write_bytes(content)
    with pytest.raises(ArtifactError, match=r"a\.npz: expected a blocks file, found a damaged archive"):
        read_npz(tmp_path / "a.npz")


def test_a_lone_array_is_refused(tmp_path):
    np.save(tmp_path / "a.npy", np.ones(3))
    with pytest.raises(ArtifactError, match=r"a\.npy: expected a blocks file, found a damaged archive"):
        read_npz(tmp_path / "a.npy")


def test_an_archive_with_an_array_too_few_is_refused(tmp_path):
    write(tmp_path / "a.npz")
    with zipfile.ZipFile(tmp_path / "a.npz") as full, zipfile.ZipFile(tmp_path / "b.npz", "w") as part:
        for name in full.namelist():
            if name != "flags.npy":
                part.writestr(name, full.read(name))
    with pytest.raises(ArtifactError, match=r"expected the arrays \['flags', 'ids', 'none'\], found \['ids', 'none'\]"):
        read_npz(tmp_path / "b.npz")


@pytest.mark.parametrize(
    "text, found",
    [
        ("", "damaged JSON"),
        ('{"kind": "profile", "ver', "damaged JSON"),
        ("[1, 2]", "a JSON list"),
        ("3", "a JSON int"),
    ],
)
def test_text_that_is_no_document_is_refused(tmp_path, text, found):
    (tmp_path / "p.json").write_text(text)
    with pytest.raises(ArtifactError, match=rf"p\.json: expected a profile file, found {found}"):
        read_json(tmp_path / "p.json")


def test_a_document_of_other_bytes_is_refused(tmp_path):
    (tmp_path / "p.json").write_bytes(b"\xff\xfe\x00{")
    with pytest.raises(ArtifactError, match="damaged JSON"):
        read_json(tmp_path / "p.json")


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), compress=st.booleans())
def test_damage_is_refused_or_harmless(tmp_path, data, compress):
    path = tmp_path / "a.npz"
    write(path, compress=compress)
    raw = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(raw[: data.draw(st.sampled_from([len(raw), len(raw) // 2, len(raw) - 1]))])
    try:
        arrays, _ = read_npz(path)
    except ArtifactError as error:
        assert str(error).startswith(str(path))
    else:
        assert arrays.keys() == ARRAYS.keys() and all(np.array_equal(arrays[n], ARRAYS[n]) for n in ARRAYS)


# What cannot be written, or is cut short.


def left_in(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("failing", ["write", "fsync", "replace"])
def test_a_full_disk_leaves_the_earlier_file(tmp_path, monkeypatch, failing):
    path = tmp_path / "a.npz"
    write(path)
    before = path.read_bytes()

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    target = {"write": (np.lib.format, "write_array"), "fsync": (os, "fsync"), "replace": (os, "replace")}[failing]
    monkeypatch.setattr(*target, full)
    with pytest.raises(ArtifactError, match=r"a\.npz: cannot be written: No space left on device; an existing file"):
        artifacts.write_npz(path, "blocks", 1, {"other": np.ones(9)}, {})
    assert path.read_bytes() == before and left_in(tmp_path) == ["a.npz"]


def child(code, **keywords):
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, **keywords)


LARGE = "artifacts.write_npz({path!r}, 'blocks', 1, {{'a': np.ones(1_000_000)}}, {{}})"


def test_a_file_size_limit_leaves_the_earlier_file(tmp_path):
    path = tmp_path / "a.npz"
    write(path)
    before = path.read_bytes()
    code = f"import numpy as np; from tilewright.core import artifacts; {LARGE.format(path=str(path))}"
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))  # noqa: E731
    process = child(code, preexec_fn=limit)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 1 and b"ArtifactError" in stderr and b"cannot be written: File too large" in stderr
    assert path.read_bytes() == before and left_in(tmp_path) == ["a.npz"]


def test_what_killed_writers_left_is_removed_by_the_next_one(tmp_path):
    def left(name, days):
        path = tmp_path / name
        path.write_text("half")
        os.utime(path, times=(time.time() - 86_400 * days,) * 2)
        return path

    old = [left(".a[1].0123456789ab.json", 1.1), left(".a[1].ba9876543210.json", 30)]
    kept = [
        left(".a[1].00112233aabb.json", 0.9),
        left(".a1.0123456789ab.json", 30),
        left(".b.0123456789ab.json", 30),
        left(".a[1].0123456789ab.npz", 30),
        left(".a[1].mine.json", 30),
        left("a[1].0123456789ab.json", 30),
    ]
    artifacts.write_text(tmp_path / "a[1].json", "whole")
    assert not any(path.exists() for path in old) and all(path.exists() for path in kept)
    assert len(list(tmp_path.iterdir())) == len(kept) + 1


def test_a_killed_writer_leaves_the_earlier_file(tmp_path):
    path = tmp_path / "a.npz"
    write(path)
    before = path.read_bytes()
    # The writer stops half-way through an array and waits to be killed.
    code = f"""
import sys, time
import numpy as np
from tilewright.core import artifacts
real = np.lib.format.write_array
def half(stream, array, **keywords):
    if array.size < 1_000_000:
        return real(stream, array, **keywords)
    real(stream, array[:500_000], **keywords)
    stream._fileobj.flush()
    print("half", flush=True)
    time.sleep(60)
np.lib.format.write_array = half
{LARGE.format(path=str(path))}
"""
    process = child(code)
    assert process.stdout.readline() == b"half\n"
    process.send_signal(signal.SIGKILL)
    assert process.wait(timeout=60) == -signal.SIGKILL
    process.stdout.close(), process.stderr.close()
    stale = [name for name in left_in(tmp_path) if name != "a.npz"]
    assert len(stale) == 1 and stale[0].startswith(".a.") and (tmp_path / stale[0]).stat().st_size > 1_000_000
    assert path.read_bytes() == before and read_npz(path)[1]["tile"] == "64x1"
    # What the killed writer left behind hinders nobody.
    artifacts.write_npz(path, "blocks", 1, {"other": np.ones(9)}, {})
    assert read_npz(path)[0]["other"].sum() == 9 and left_in(tmp_path) == sorted(["a.npz", *stale])


def test_an_interrupt_leaves_the_earlier_file(tmp_path):
    path = tmp_path / "a.txt"
    artifacts.write_text(path, "before")
    with pytest.raises(KeyboardInterrupt), artifacts.atomic(path) as temporary:
        temporary.write_text("half")
        raise KeyboardInterrupt
    assert path.read_text() == "before" and left_in(tmp_path) == ["a.txt"]


def test_a_path_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ArtifactError, match=r"a\.npz: cannot be written: (Not a directory|File exists)"):
        write(tmp_path / "file" / "a.npz")
    (tmp_path / "folder.npz").mkdir()
    with pytest.raises(ArtifactError, match=r"folder\.npz: cannot be written: expected a file, found a folder"):
        write(tmp_path / "folder.npz")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_number_that_json_lacks_is_refused_before_anything_is_written(tmp_path, value):
    with pytest.raises(ValueError, match="not JSON compliant"):
        artifacts.write_json(tmp_path / "p.json", "profile", 1, {"latency_us": value})
    assert left_in(tmp_path) == []


# What is no damage of the archive but of what it holds.


def stored(path, method=zipfile.ZIP_STORED, **members):
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, content in members.items():
            archive.writestr(f"{name}.npy", content)


@pytest.mark.parametrize(
    "header", [b"{'descr': '<i4', (", b"(" * 5000, b"{'descr': '|O', 'fortran_order': False, 'shape': (1,)}"]
)
def test_an_array_whose_header_cannot_be_read_is_refused(tmp_path, header):
    header = header.ljust(118 if len(header) < 118 else len(header)) + b"\n"
    stored(tmp_path / "a.npz", tilewright=b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header)
    with pytest.raises(ArtifactError, match=r"a\.npz: expected a blocks file, found a damaged archive"):
        read_npz(tmp_path / "a.npz")


def test_a_document_of_endless_depth_is_refused(tmp_path):
    (tmp_path / "p.json").write_text("[" * 100_000)
    with pytest.raises(ArtifactError, match="damaged JSON"):
        read_json(tmp_path / "p.json")


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_damage_under_any_compression_is_refused(tmp_path, method):
    path = tmp_path / "a.npz"
    content = np.random.default_rng(0).integers(256, size=500, dtype=np.uint8).tobytes()
    stored(path, method, tilewright=content)
    raw = path.read_bytes()
    for at in range(40, len(raw) - 80, 7):
        path.write_bytes(raw[:at] + bytes([raw[at] ^ 255]) + raw[at + 1 :])
        with pytest.raises(ArtifactError, match=r"a\.npz: expected a blocks file, found"):
            read_npz(path)


def test_an_archive_is_unpacked_or_refused(tmp_path):
    stored(tmp_path / "a.zip", one=b"1")
    artifacts.unpack(tmp_path / "a.zip", tmp_path / "out", "plan", "one.npy")
    assert (tmp_path / "out" / "one.npy").read_bytes() == b"1"
    with pytest.raises(ArtifactError, match=r"a\.zip: expected a plan file, found a foreign or damaged archive"):
        artifacts.unpack(tmp_path / "a.zip", tmp_path / "out", "plan", "two.npy")


def test_what_is_no_file_is_not_replaced(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    with pytest.raises(ArtifactError, match=r"pipe: cannot be written: expected a file, found .* a device or a pipe"):
        artifacts.write_text(path, "x")
    assert path.is_fifo() and [*tmp_path.iterdir()] == [path]
