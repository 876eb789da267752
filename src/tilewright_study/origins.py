"""What decides the files of a job of the workflow, as parameters of its rule: code, settings and all that is upstream.

Snakemake records parameters with what a job writes and makes the job again where they differ. It knows only values of
its own kinds, takes no notice of their names and order, and forgets that a job was due once one of its files is gone.
So each rule has its parameters from `Origins.parameters`, with ``origin`` among them: one digest of the parameters with
their names, of inputs in their order, and of the origins of the jobs that make these. Whatever was made before a
change, at any depth, differs in it, also after the job that was due has been interrupted.
"""

import hashlib
import json
import os
import re
import shlex
from functools import cache, wraps

from snakemake.io import AnnotatedString

from tilewright.core.errors import ConfigError
from tilewright_study import provenance

# Bytes of a file that is not read each time that a workflow is planned.
LARGE = 1 << 26
# A text in JSON.
_JSON = re.compile(r'"(?:[^"\\]|\\.)*"')


class Origins:
    """The parameters of one workflow's rules. workflow: Snakemake's; root: this checkout."""

    def __init__(self, workflow, root):
        self._workflow, self._root = workflow, root
        # A path of this workflow, as a workflow names it that has this one as a module with a prefix.
        self.under_prefix = workflow.modifier.modify_path
        self._dag, self._jobs, self._digests = None, {}, {}

    def parameters(self, stage, modules, shipped=(), **stated):
        """Parameters of a rule whose command is the script `stage`: ``script`` and those `shipped`, quoted for a shell,
        ``code``, those `stated`, and ``origin``.

        modules: dotted names of what the script enters by name, or a function of wildcards that gives them. shipped:
        ``{name: paths}``, files of this checkout that a job reads; they count by what they hold, wherever the checkout
        lies. stated: texts, numbers and lists of them. Of all these, functions of wildcards may give the values.
        """
        files = {name: _kept(paths) for name, paths in dict(shipped).items()}
        own = {"code": _kept(Code(os.path.join(self._root, f"workflow/scripts/{stage}.py"), modules))}
        own |= {name: _kept(value) for name, value in stated.items()}
        own |= {
            name: _kept(lambda wildcards, of=of: list(map(self._shipped, of(wildcards)))) for name, of in files.items()
        }

        # Snakemake records nothing that depends on output: where this checkout lies decides no result.
        def script(wildcards, output):
            return shlex.quote(self.here(f"workflow/scripts/{stage}.py"))

        def quoted(paths):
            return lambda wildcards, output: " ".join(shlex.quote(self.here(path)) for path in paths(wildcards))

        def origin(wildcards):
            return self._origin(origin, own, wildcards)

        return {"script": script, **own, **{name: quoted(of) for name, of in files.items()}, "origin": origin}

    def here(self, path):
        """A path of this checkout as seen from where Snakemake runs, so that a printed command can be pasted there."""
        return os.path.relpath(os.path.join(self._root, path))

    def placed(self, words, paths):
        """`words` of a command for a shell, whose values in JSON name files of `paths` and results/ `under_prefix`."""

        def prefixed(found):
            path = json.loads(found[0])
            return json.dumps(self.under_prefix(path)) if path in paths or path.startswith("results/") else found[0]

        return [shlex.quote(_JSON.sub(prefixed, *shlex.split(word))) for word in words]

    def upstream(self, paths):
        """`paths` and all files of jobs that they are made by, at any depth."""
        todo, found = list(map(self.under_prefix, paths)), {}
        while todo:
            path = todo.pop()
            rule = None if path in found else next((rule for rule in self._rules() if rule.is_producer(path)), None)
            if rule is not None:
                wildcards = rule.get_wildcards(path)
                found |= dict.fromkeys(rule.expand_output(wildcards)[0])
                todo.extend(rule.expand_input(wildcards)[0])
        return list(map(_uncaptioned, found))

    def _rules(self):
        return self._workflow.rules

    def _shipped(self, path):
        """A path of this checkout and what it holds."""
        return f"{path}:{_content(os.path.join(self._root, path))}"

    def _origin(self, function, own, wildcards):
        """The digest of the job of these wildcards whose rule has `function` as its parameter ``origin``."""
        if not self._workflow.is_main_process:
            # A job's own Snakemake, on a cluster, knows nothing of other jobs, and records nothing.
            return ""
        job = self._job(function, wildcards)
        if job not in self._digests:
            made = {path: maker for maker, paths in self._dag.dependencies[job].items() for path in paths}
            parts = {
                "rule": job.rule.shellcmd,
                "parameters": [[name, _plain(name, value(wildcards))] for name, value in own.items()],
                "input": [[path, self._source(path, made.get(path))] for path in job.input],
                "threads": job.threads if _counts_cores(job) else None,
            }
            self._digests[job] = hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]
        return self._digests[job]

    def _job(self, function, wildcards):
        if self._dag is not self._workflow.dag:
            self._dag, self._digests = self._workflow.dag, {}
            # A rule that is used under several names has one function: its jobs differ by wildcards.
            self._jobs = {(job.rule.params.get("origin"), _key(job.wildcards)): job for job in self._dag.jobs}
        return self._jobs[function, _key(wildcards)]

    def _source(self, path, maker):
        """What an input of a job is: the origin of its `maker`, what it holds where it is a file of the user's own.

        Raises `ConfigError` for what a rule makes, but cannot now: Snakemake would take what was made before.
        """
        if maker is not None:
            function = maker.rule.params.get("origin")
            return function(maker.wildcards) if function else maker.rule.shellcmd
        for rule in self._rules():
            if rule.is_producer(path):
                missing = [name for name in rule.expand_input(rule.get_wildcards(path))[0] if not os.path.exists(name)]
                raise ConfigError(f"{path}: expected what it is made from, found no {', '.join(missing)}")
        return _content(path)


class Code:
    """A parameter: the digest of a script, of what it imports, and of the `modules` that it enters by name."""

    def __init__(self, script, modules):
        self._script, self._modules = script, modules

    def __call__(self, wildcards):
        """The digest."""
        return provenance.script_digest(self._script, *self._entered(wildcards))

    def covered(self, wildcards):
        """Dotted names of all modules that count."""
        return provenance.script_closure(self._script, *self._entered(wildcards))

    def _entered(self, wildcards):
        return self._modules(wildcards) if callable(self._modules) else self._modules


def _uncaptioned(path):
    """`path` without its caption for Snakemake's own report."""
    found = AnnotatedString(path)
    found.flags = {name: value for name, value in path.flags.items() if name != "report"}
    return found


def _kept(value):
    """A function of wildcards that gives `value`, or what it gives, each time after the first one from memory."""
    found = {}
    if not callable(value):
        return lambda wildcards: value

    @wraps(value)
    def kept(wildcards):
        key = _key(wildcards)
        if key not in found:
            found[key] = value(wildcards)
        return found[key]

    return kept


def _key(wildcards):
    return tuple(sorted(wildcards.items()))


def _plain(name, value):
    """`value`, of a kind that Snakemake records. Raises `TypeError`."""
    for each in value if isinstance(value, list) else [value]:
        if not isinstance(each, str | int | float):
            raise TypeError(f"parameter {name}: expected a text, a number or a list of them, found {each!r}")
    return value


def _counts_cores(job):
    """Whether a job's result depends on the cores that it gets: it is timed on them, or its command names them."""
    timed = bool(job.resources.get("timing")) and not job.resources.get("gpu")
    return timed or "{threads}" in (job.rule.shellcmd or "")


@cache
def _content(path):
    """What a file holds: a digest of its bytes, or of a large one when it was written."""
    stat = os.stat(path)
    return provenance.sha256_file(path)[:16] if stat.st_size <= LARGE else f"{stat.st_size}-{stat.st_mtime_ns}"
