"""An archive that stands by itself: the source of a commit, recorded rows, and the report and crate made of them.

`write` exports the commit, runs the workflow there on recorded rows, and packs both. Nothing in the archive needs the
repository: git writes the commit into commit.txt, and the README's commands work where it is unpacked.
"""

import gzip
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from tilewright.core import artifacts
from tilewright.core.errors import ArtifactError, ConfigError
from tilewright.core.version import __version__
from tilewright_study import provenance
from tilewright_study.stages import crate

# What the workflow leaves in a folder, but for what is shown.
LEFT = (".snakemake", "logs", "build")


def write(checkout, recorded, output, targets=("results/report.html", crate.NAME)):
    """Write the commit of `checkout`, and the `targets` of the workflow on the rows expected/<recorded>/, to `output`.

    Raises `ConfigError` where the checkout has changes or no such rows, `ArtifactError` where the workflow fails.
    """
    commit = provenance.commit()
    if not commit or commit.endswith("+"):
        raise ConfigError(f"expected the checkout of a commit, without changes, found {commit or 'none'}")
    known = sorted(path.parent.name for path in checkout.glob("expected/*/run.json"))
    if recorded not in known:
        raise ConfigError(f"expected rows of one of {', '.join(known)}, found {recorded!r}")
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / f"tilewright-{__version__}"
        command = ["git", "-C", checkout, "archive", f"--prefix={root.name}/", "HEAD"]
        tree = subprocess.run(command, stdout=subprocess.PIPE, check=False)
        _check(tree, "git archive")
        subprocess.run(["tar", "--extract", "--directory", folder], input=tree.stdout, check=True)
        if targets:
            _made(root, recorded, targets)
        with artifacts.atomic(output) as temporary:
            _pack(root, temporary)
    output = Path(output)
    print(f"{output}: commit {commit}, {output.stat().st_size / 1e6:.1f} MB, sha256 {provenance.sha256_file(output)}")


def _made(root, recorded, targets):
    """Make `targets` in `root` of recorded rows, and leave nothing else."""
    own = root / "config" / f"{recorded}.yaml"
    overlay = own if own.is_file() else root / "config/all.yaml"
    command = [sys.executable, "-m", "snakemake", "--cores", "all", "--quiet", "all", "--configfile", overlay]
    command += ["--config", f"recorded=expected/{recorded}", "--", *targets]
    path = os.pathsep.join(filter(None, [str(root / "src"), os.environ.get("PYTHONPATH")]))
    _check(subprocess.run(command, cwd=root, env=os.environ | {"PYTHONPATH": path}, check=False), "the workflow")
    for name in LEFT:
        shutil.rmtree(root / name, ignore_errors=True)
    for path in root.rglob("__pycache__"):
        shutil.rmtree(path)


def _pack(root, output):
    """Write the folder as a .tar.gz, the same for the same files."""
    with (
        open(output, "wb") as stream,
        gzip.GzipFile(filename="", fileobj=stream, mode="wb", mtime=0) as packed,
        tarfile.open(fileobj=packed, mode="w") as archive,
    ):
        for path in sorted(root.rglob("*")):
            if path.is_file():
                archive.add(path, path.relative_to(root.parent).as_posix(), filter=_plain)


def _plain(member):
    member.mtime = member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member


def _check(done, what):
    if done.returncode:
        raise ArtifactError(f"expected {what} to succeed, found exit status {done.returncode}")
