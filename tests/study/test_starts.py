"""Jobs that start as forks of a server: each is as if started alone, and none outlives its command."""

import os
import signal
import subprocess
import sys
import time

import pytest

from tilewright_study import starts

pytestmark = pytest.mark.skipif(not starts.POSSIBLE, reason="this system tells no server of the end of a fork")
SAYS = (
    "import os, sys; print(sys.argv[1:], sys.path[0], os.getcwd(), os.environ['SAID'], {}, 'colorsys' in sys.modules)"
)
SLEEPS = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: (open('ended', 'w').close(), sys.exit(5)))
open('begun', 'w').write(str(os.getpid()))
time.sleep(60)
"""


@pytest.fixture(scope="module")
def defined():
    """What bash has to know, of a server for one thread that has loaded a module."""
    before = list(starts._SERVERS)
    yield starts.begin([1], ("colorsys", "no_such_library"))
    server = starts._SERVERS.pop()
    assert before == starts._SERVERS
    server.stdin.close()
    assert server.wait(60) == 0


@pytest.fixture
def bash(defined, tmp_path):
    def start(command, threads=1, **options):
        variables = {**os.environ, "PATH": f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"}
        variables |= {"OMP_NUM_THREADS": str(threads)}
        given = {"cwd": tmp_path, "env": variables, "text": True, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return subprocess.Popen(["bash", "-c", f"set -euo pipefail; {defined}; {command}"], **given | options)

    def run(command, **options):
        done = start(command, **options)
        return (*done.communicate(timeout=60), done.returncode)

    start.run = run
    return start


def waited(path):
    deadline = time.monotonic() + 60
    while not (path.exists() and path.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return int(path.read_text())


def test_a_fork_is_as_its_command_states(bash, tmp_path):
    (tmp_path / "says.py").write_text(SAYS.format("__name__"))
    told, _, status = bash.run("SAID='a b' python says.py --one 'two 3' 2>&1 | tee log")
    assert (status, told) == (0, f"['--one', 'two 3'] {tmp_path} {tmp_path} a b __main__ True\n")
    assert (tmp_path / "log").read_text() == told


@pytest.mark.parametrize("command", ["SAID=1 command python says.py", 'SAID=1 python -c "$(cat says.py)"'])
def test_other_commands_start_alone(bash, tmp_path, command):
    (tmp_path / "says.py").write_text(SAYS.format("0"))
    told, _, status = bash.run(command)
    assert status == 0 and told.endswith("False\n")


def test_threads_without_a_server_start_alone(bash, tmp_path):
    (tmp_path / "says.py").write_text(SAYS.format("0"))
    told, _, status = bash.run("SAID=1 python says.py", threads=7)
    assert status == 0 and told.endswith("False\n")


@pytest.mark.parametrize(
    ("script", "status", "said"),
    [
        ("raise SystemExit(3)", 3, ""),
        ("raise SystemExit('error: no such file')", 1, "error: no such file"),
        ("def wrong(): return 1 / 0\nwrong()", 1, "ZeroDivisionError: division by zero"),
        ("import os; os.kill(os.getpid(), 9)", 137, "Killed"),
        ("import atexit; atexit.register(print, 'ended'); print('begun')", 0, ""),
    ],
)
def test_a_command_ends_as_its_fork_does(bash, tmp_path, script, status, said):
    (tmp_path / "ends.py").write_text(script)
    told, errors, found = bash.run("python ends.py")
    assert found == status and said in errors
    assert told == ("begun\nended\n" if status == 0 else "")


def test_a_fork_is_killed_with_its_command(bash, tmp_path):
    (tmp_path / "sleeps.py").write_text(SLEEPS)
    command = bash("python sleeps.py", start_new_session=True)
    fork = waited(tmp_path / "begun")
    assert os.getpgid(fork) != os.getpgid(command.pid)
    os.killpg(command.pid, signal.SIGKILL)
    deadline = time.monotonic() + 60
    while not (tmp_path / "ended").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_an_interrupt_ends_forks_and_not_their_server(defined, bash, tmp_path):
    """As from a terminal, to all at once."""
    (tmp_path / "sleeps.py").write_text(
        f"try:\n  {SLEEPS.strip().replace(chr(10), chr(10) + '  ')}\nexcept KeyboardInterrupt: sys.exit(130)"
    )
    command = bash("python sleeps.py | cat")
    fork = waited(tmp_path / "begun")
    starts._SERVERS[-1].send_signal(signal.SIGINT)
    os.kill(fork, signal.SIGINT)
    assert command.wait(60) == 130
    (tmp_path / "ends.py").write_text("raise SystemExit(4)")
    assert bash.run("python ends.py")[-1] == 4


def test_a_server_ends_with_who_began_it_after_its_jobs(tmp_path):
    """Its beginner is killed: the job is not, and nothing is left."""
    (tmp_path / "job.py").write_text("import sys; open('begun', 'w').write('1'); sys.stdin.read(); open('done', 'w')")
    words = (
        "import sys; from tilewright_study import starts; print(starts.begin([1], ()), flush=True); sys.stdin.read()"
    )
    given = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    beginner = subprocess.Popen([sys.executable, "-c", words], **given)
    defined = beginner.stdout.readline()
    folder = defined.split()[-2]
    variables = {**os.environ, "OMP_NUM_THREADS": "1"}
    job = subprocess.Popen(["bash", "-c", f"{defined}python job.py"], cwd=tmp_path, env=variables, **given)
    waited(tmp_path / "begun")
    beginner.kill()
    beginner.communicate()
    assert not (tmp_path / "done").exists()
    job.communicate("", timeout=60)
    assert job.returncode == 0 and (tmp_path / "done").exists()
    deadline = time.monotonic() + 60
    while os.path.exists(folder):
        assert time.monotonic() < deadline
        time.sleep(0.01)
