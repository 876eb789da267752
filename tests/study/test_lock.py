"""The lock on a GPU, with an nvidia-smi that the test writes."""

import fcntl
import os
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from tilewright import devices
from tilewright.core.errors import ConfigError, DeviceError
from tilewright_study.measure import lock as _lock


@pytest.fixture
def gpus(tmp_path, monkeypatch):
    """Two GPUs that the driver's tool lists, and a folder for their locks."""
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho GPU-a\necho GPU-b\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(_lock, "FOLDER", tmp_path)
    # Set first, so that it is restored: the lock changes it.
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    return tmp_path


def seen():
    return os.environ["CUDA_VISIBLE_DEVICES"]


def test_each_holder_has_a_gpu(gpus, monkeypatch):
    with _lock.exclusive("cuda"):
        assert seen() == "GPU-a"
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
        with _lock.exclusive("cuda"):
            assert seen() == "GPU-b"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with _lock.exclusive("cuda"):
        assert seen() == "GPU-a"


def test_only_gpus_of_this_process_are_taken(gpus, monkeypatch):
    for stated in ("1", "GPU-b"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", stated)
        with _lock.exclusive("cuda"):
            assert seen() == "GPU-b"


def test_who_comes_second_waits(gpus, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    came = []

    def second():
        with _lock.exclusive("cuda"):
            came.append("second")

    with _lock.exclusive("cuda"):
        waiting = threading.Thread(target=second)
        waiting.start()
        waiting.join(3 * _lock.PAUSE)
        came.append("first")
    waiting.join(30)
    assert came == ["first", "second"]


def test_whoever_waits_gets_a_turn(gpus, monkeypatch):
    """Also where another one asks again as soon as it is done, and never sleeps."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    came, over = [], threading.Event()

    def greedy():
        while not over.is_set():
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
            with _lock.exclusive("cuda"):
                came.append("greedy")
                time.sleep(0.02)

    def patient():
        with _lock.exclusive("cuda"):
            came.append("patient")

    threads = [threading.Thread(target=greedy) for _ in range(2)]
    for thread in threads:
        thread.start()
    while len(came) < 3:
        time.sleep(0.01)
    waiting = threading.Thread(target=patient)
    waiting.start()
    begun = len(came)
    waiting.join(30)
    over.set()
    for thread in threads:
        thread.join(30)
    assert came.index("patient") - begun < 8


def test_who_waits_for_another_gpu_does_not_stand_in_line(gpus, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with _lock.exclusive("cuda"):
        waiting = threading.Thread(target=lambda: _lock.exclusive("cuda").__enter__(), daemon=True)
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
        waiting.start()
        waiting.join(3 * _lock.PAUSE)
        assert waiting.is_alive()
        other = elsewhere(gpus, 'print(os.environ["CUDA_VISIBLE_DEVICES"])', CUDA_VISIBLE_DEVICES="1")
        assert other.stdout.strip() == "GPU-b"
    waiting.join(30)


def test_a_gpu_is_lent_while_nothing_is_timed(gpus, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    came, lent = [], threading.Event()

    def borrower():
        with _lock.exclusive("cuda"):
            came.append("borrowed")
            lent.set()
            # Until the owner waits for it.
            threading.Event().wait(3 * _lock.PAUSE)
            came.append("returned")

    other = threading.Thread(target=borrower)
    with _lock.exclusive("cuda"):
        other.start()
        other.join(3 * _lock.PAUSE)
        assert came == []
        with _lock.untimed():
            assert lent.wait(30)
        came.append("held again")
    other.join(30)
    assert came == ["borrowed", "returned", "held again"]


def test_a_program_that_is_being_ended_does_not_wait_for_its_device(gpus, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with ExitStack() as stack, _lock.exclusive("cuda"), pytest.raises(KeyboardInterrupt), _lock.untimed():
        # Another holds it from now on.
        other = stack.enter_context(open(gpus / "tilewright-GPU-a.lock"))
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        raise KeyboardInterrupt
    with _lock.exclusive("cuda"):
        with pytest.raises(ConfigError), _lock.untimed():
            raise ConfigError("what an experiment may catch")
        with open(gpus / "tilewright-GPU-a.lock") as other, pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_without_a_lock_nothing_is_lent():
    with _lock.exclusive("cpu"), _lock.untimed():
        pass


def test_a_process_that_dies_gives_its_lock_back(gpus):
    assert elsewhere(gpus, "os._exit(9)").returncode == 9
    with _lock.exclusive("cuda"):
        assert seen() == "GPU-a"


def elsewhere(folder, then, **environment):
    """A process that holds a GPU while it does `then`."""
    program = f"""
import os, pathlib
from tilewright_study.measure import lock as _lock
_lock.FOLDER = pathlib.Path({str(folder)!r})
with _lock.exclusive("cuda"):
    {then}
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(_lock.__file__).parents[2]), **environment}
    return subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)


def test_users_share_the_locks_whatever_their_temporary_folders(gpus, tmp_path):
    (tmp_path / "own").mkdir()
    holding = 'print(os.environ["CUDA_VISIBLE_DEVICES"])'
    with _lock.exclusive("cuda"):
        assert seen() == "GPU-a"
        other = {"TMPDIR": str(tmp_path / "own"), "CUDA_VISIBLE_DEVICES": ""}
        assert elsewhere(gpus, holding, **other).stdout.strip() == "GPU-b"


def test_a_lock_is_for_every_user(gpus):
    before = os.umask(0o077)
    try:
        with _lock.exclusive("cuda"):
            locks = list(gpus.glob("*.lock"))
    finally:
        os.umask(before)
    assert len(locks) == 2 and gpus / "tilewright-GPU-a.lock" in locks
    assert all(lock.stat().st_mode & 0o777 == 0o644 for lock in locks)


def test_what_stands_in_place_of_a_lock_is_not_touched(gpus):
    kept = gpus / "kept"
    kept.write_text("kept")
    lock = gpus / "tilewright-GPU-a.lock"
    os.link(kept, lock)
    with _lock.exclusive("cuda"):
        assert seen() == "GPU-a" and kept.read_text() == "kept"


@pytest.mark.parametrize("target", ["kept", "absent"])
def test_a_link_in_place_of_a_lock_is_refused(gpus, target):
    (gpus / "kept").write_text("kept")
    (gpus / "tilewright-GPU-a.lock").symlink_to(gpus / target)
    message = r"expected a lock file .*GPU-a\.lock that every user can read, found: "
    with pytest.raises(DeviceError, match=message), _lock.exclusive("cuda"):
        pass
    assert (gpus / "kept").read_text() == "kept" and not (gpus / "absent").exists()


def test_a_cpu_needs_no_lock(monkeypatch):
    monkeypatch.setattr(devices.facts("cuda"), "available", lambda: pytest.fail("asked for GPUs"))
    with _lock.exclusive("cpu"), _lock.exclusive("cpu"):
        pass


def test_a_machine_without_a_gpu_says_so(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(DeviceError, match="expected an NVIDIA GPU that nvidia-smi lists"), _lock.exclusive("cuda"):
        pass
