"""Jobs of a run on this machine that start as forks of a process which has loaded libraries already.

Torch and its compiler take two to four seconds to load, longer than many jobs run. `begin` starts a server for each
number of threads, since libraries read that number while they load, and defines a function for bash: with it,
``python`` of a rule's command asks a server for a fork. The fork has the command's arguments, environment, folder and
streams and loads its own code, and the command ends as the fork does. A fork whose command is killed is, too. A server
ends with the process that began it, after its jobs.
"""

import marshal
import os
import socket
import sys

# A server loads these, and nothing of the package but what each command loads.
LIBRARIES = (
    "torch._inductor.compile_fx",
    "numba",
    "scipy.ndimage",
    "scipy.optimize",
    "scipy.sparse.csgraph",
    "pandas",
    "seaborn",
    "matplotlib.backends.backend_agg",
    "matplotlib.backends.backend_pdf",
    "matplotlib.backends.backend_svg",
)
# Whether this system can tell a server of the end of a fork.
POSSIBLE = hasattr(os, "pidfd_open")
# What Snakemake sets for a job.
THREADS = tuple(f"{name}_NUM_THREADS" for name in ("OMP", "GOTO", "OPENBLAS", "MKL", "VECLIB", "NUMEXPR"))
# The end of their standard input tells servers that this process has ended.
_SERVERS = []


def begin(threads, libraries=LIBRARIES):
    """Start a server for each number of `threads`. Returns the definition of ``python`` for bash."""
    import shlex
    import subprocess
    import tempfile

    folder = tempfile.mkdtemp(prefix="tilewright-starts-")
    for number in map(str, sorted(set(threads))):
        path = os.path.join(folder, number)
        # Whether there is a GPU is asked without CUDA, which no fork can use afterwards.
        variables = dict.fromkeys(THREADS, number) | {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path)
            # A command that asks before all is loaded waits.
            listener.listen(128)
            _SERVERS.append(
                subprocess.Popen(
                    [sys.executable, "-P", __file__, "--serve", path, str(listener.fileno()), *libraries],
                    env=os.environ | variables,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    pass_fds=[listener.fileno()],
                )
            )
    return f'python() (exec python -IS {shlex.quote(__file__)} {folder} "$@")'


def _serve(path, listener, *libraries):
    """Fork for each request at the socket `path`, until standard input and all forks have ended."""
    import contextlib
    import signal

    # Ctrl-C reaches the forks, too, and the server waits for them.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with socket.socket(fileno=int(listener)) as listener:
        _load(libraries)
        job = _Server(listener).run()
    if job is not None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        _end(_execute(*job))
    os.unlink(path)
    with contextlib.suppress(OSError):
        # Of another server is something left.
        os.rmdir(os.path.dirname(path))


def _load(libraries):
    import contextlib
    import gc
    import importlib

    # It states what torch reads while it loads.
    importlib.import_module("tilewright_study.cli")
    for name in libraries:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    # Collections of forks leave alone, and so share, what is here.
    gc.collect()
    gc.freeze()


class _Server:
    """Forks and the commands that wait for them."""

    def __init__(self, listener):
        """listener: a socket for requests."""
        import selectors

        self._listener, self._events = listener, selectors.DefaultSelector()
        self._watch(listener, self._fork)
        self._watch(0, self._close)

    def _watch(self, file, call, *arguments):
        """``call(*arguments)`` when there is something to read."""
        self._events.register(file, 1, (call, arguments))

    def run(self):
        """Serve until all has ended. In a fork, returns what `_execute` takes."""
        while self._events.get_map():
            # The first event may undo what the others are about.
            call, arguments = self._events.select()[0][0].data
            if (job := call(*arguments)) is not None:
                return job
        return None

    def _fork(self):
        link, _ = self._listener.accept()
        try:
            size, streams, *_ = socket.recv_fds(link, 8, 3)
            request = marshal.loads(link.recv(int.from_bytes(size), socket.MSG_WAITALL))
        except (OSError, EOFError, ValueError):
            # The command was killed meanwhile.
            link.close()
            return None
        if (fork := os.fork()) == 0:
            for watched in list(self._events.get_map().values()):
                watched.fileobj.close() if isinstance(watched.fileobj, socket.socket) else os.close(watched.fd)
            self._events.close()
            link.close()
            return streams, *request
        for stream in streams:
            os.close(stream)
        link.sendall(b".")
        ended = os.pidfd_open(fork)
        self._watch(link, self._kill, link, fork)
        self._watch(ended, self._answer, ended, link, fork)
        return None

    def _kill(self, link, fork):
        """The command of a fork was killed."""
        self._events.unregister(link)
        os.kill(fork, 15)

    def _answer(self, ended, link, fork):
        """A fork has ended: say how."""
        self._events.unregister(ended)
        os.close(ended)
        status = os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1])
        if link in self._events.get_map():
            self._events.unregister(link)
            link.send(status.to_bytes(2, signed=True))
        link.close()

    def _close(self):
        """Who began the server has ended."""
        self._events.unregister(0)
        self._events.unregister(self._listener)


def _execute(streams, words, folder, variables):
    """Be the process of a command: run the script that `words` begin with. Returns its status."""
    import runpy
    import traceback
    import weakref

    for finalizer in list(weakref.finalize._registry):
        # What the server holds, the server frees.
        finalizer.atexit = False
    for place, stream in enumerate(streams):
        os.dup2(stream, place)
        os.close(stream)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(variables)
    sys.argv = words
    sys.path.insert(0, os.path.dirname(os.path.abspath(words[0])))
    try:
        runpy.run_path(words[0], run_name="__main__")
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def _end(status):
    """End this process as Python does, but leave its memory as it is: to free it takes half a second."""
    import atexit
    import threading

    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _command(folder, *words):
    """What ``python`` of a rule's command runs: have a fork run `words`, and end as it does."""
    with socket.socket(socket.AF_UNIX) as link:
        if not words[0].endswith(".py") or not _asked(link, folder, words):
            os.execvp("python", ["python", *words])
        while True:
            try:
                status = int.from_bytes(link.recv(2), signed=True)
                break
            except KeyboardInterrupt:
                # The fork is interrupted, too, and says how it ends.
                continue
    if status < 0:
        os.kill(os.getpid(), -status)
    sys.exit(status)


def _asked(link, folder, words):
    """Whether a server has forked."""
    try:
        link.connect(os.path.join(folder, os.environ.get("OMP_NUM_THREADS", "")))
        request = marshal.dumps((list(words), os.getcwd(), dict(os.environ)))
        socket.send_fds(link, [len(request).to_bytes(8)], [0, 1, 2])
        link.sendall(request)
        return link.recv(1) == b"."
    except OSError:
        return False


if __name__ == "__main__":
    if sys.argv[1] == "--serve":
        _serve(*sys.argv[2:])
    else:
        _command(*sys.argv[1:])
