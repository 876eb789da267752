"""What a run of the workflow made and from what, as a Workflow Run RO-Crate (stage T6).

`write` reads what Snakemake recorded of each job. It names rules, jobs, inputs and outputs, and each file's sha256, in
``ro-crate-metadata.json``, which makes the folder a crate: https://www.researchobject.org/workflow-run-crate/.
"""

import base64
import json
import mimetypes
import shlex
from datetime import UTC, datetime
from importlib import metadata

import yaml

from tilewright.core import artifacts
from tilewright.core.errors import ArtifactError
from tilewright_study import provenance

NAME = "ro-crate-metadata.json"
RECORDS = ".snakemake/metadata"
CONTEXT = ["https://w3id.org/ro/crate/1.1/context", "https://w3id.org/ro/terms/workflow-run/context"]
PROFILES = {
    "https://w3id.org/ro/wfrun/process/0.5": "Process Run Crate",
    "https://w3id.org/ro/wfrun/workflow/0.5": "Workflow Run Crate",
    "https://w3id.org/ro/wfrun/provenance/0.5": "Provenance Run Crate",
    "https://w3id.org/workflowhub/workflow-ro-crate/1.0": "Workflow RO-Crate",
}
LICENCE = "https://www.apache.org/licenses/LICENSE-2.0"
LANGUAGE = "https://w3id.org/workflowhub/workflow-ro-crate#snakemake"
# Files of the checkout that say what ran, beside those that jobs read.
SOURCES = ("README.md", "LICENSE", "NOTICE", "CITATION.cff", "config.yaml", "requirements.lock", "rules/*.smk")
# Types that Python does not know, of files by their ends.
TYPES = {".npz": "application/zip", ".yaml": "application/yaml", ".safetensors": "application/octet-stream"}
TYPES |= {".html": "text/html", ".md": "text/markdown"}
# What the workflow as a whole takes and gives, one file each.
PARAMETERS = {"config.yaml": "configuration", "results/report.html": "report"}


def write(folder, output):
    """Write the crate of `folder`, a checkout in which the workflow ran, to `output`. Raises `ArtifactError`."""
    if not (folder / "Snakefile").is_file():
        raise ArtifactError(f"{folder}: expected a checkout in which its workflow ran, found no Snakefile")
    jobs = _jobs(folder)
    if not jobs:
        raise ArtifactError(f"{folder / RECORDS}: expected records of the jobs that ran, found none")
    made = {path for job in jobs for path in job["result"]}
    read = {path for job in jobs for path in job["object"]}
    own = [path.relative_to(folder).as_posix() for pattern in SOURCES for path in sorted(folder.glob(pattern))]
    scripts = {job["script"] for job in jobs}
    files = {path: _file(folder, path) for path in sorted({*made, *read, *own, *scripts})}
    for path, name in PARAMETERS.items():
        if path in files:
            files[path]["exampleOfWork"] = _to(f"#{name}")
    for path in scripts:
        files[path] |= {"@type": ["File", "SoftwareSourceCode", "SoftwareApplication"]}
    whole = {
        **_action("#run", "Snakefile", sorted((read | {"config.yaml"}) - made - scripts), sorted(made - read), jobs),
        "name": "the workflow",
        "agent": _to("#authors"),
    }
    entities = [*_about(folder, files, jobs, scripts, whole), *files.values(), whole, *_steps(jobs)]
    text = json.dumps({"@context": CONTEXT, "@graph": entities}, indent=1, ensure_ascii=False)
    artifacts.write_text(output, text + "\n")


def _jobs(folder):
    """The jobs that Snakemake recorded, in the order in which they began: rule, script, command, object and result."""
    found = {}
    for path in sorted((folder / RECORDS).rglob("*")):
        if not path.is_file():
            continue
        name = "".join(part.removeprefix("@") for part in path.relative_to(folder / RECORDS).parts)
        said, output = json.loads(path.read_bytes()), base64.b64decode(name).decode()
        if said["incomplete"] or not said["shellcmd"] or not (folder / output).is_file():
            continue
        job = found.setdefault((said["rule"], said["shellcmd"]), said | {"result": []})
        job["result"].append(output)
    for job in found.values():
        job["result"].sort()
        # Files of the checkout are named in the command alone.
        words = dict.fromkeys(word for word in shlex.split(job["shellcmd"]) if (folder / word).is_file())
        job["script"] = next(word for word in words if word.endswith(".py"))
        job["object"] = sorted({*job["input"], *words} - {*job["result"], *job["log"], job["script"]})
        job["object"] = [path for path in job["object"] if (folder / path).is_file()]
    return sorted(found.values(), key=lambda job: (job["starttime"], job["rule"], job["result"]))


def _file(folder, path):
    size = (folder / path).stat().st_size
    digest, suffix = provenance.sha256_file(folder / path), (folder / path).suffix
    kind = TYPES.get(suffix) or mimetypes.guess_type(path)[0] or "text/plain"
    said = {"contentSize": str(size), "encodingFormat": kind, "sha256": digest}
    return {"@id": path, "@type": "File", "name": path, **said}


def _about(folder, files, jobs, scripts, whole):
    """The crate itself, the workflow, its language, parameters, authors and licence."""
    citation = yaml.safe_load((folder / "CITATION.cff").read_text())
    commit, snakemake = provenance.commit(), metadata.version("snakemake")
    workflow = files.pop("Snakefile", None) or _file(folder, "Snakefile")
    rules = dict.fromkeys(job["rule"] for job in jobs)
    parameters = {path: name for path, name in PARAMETERS.items() if path in files}
    taken = [_to(f"#{name}") for path, name in parameters.items() if path in {each["@id"] for each in whole["object"]}]
    given = [_to(f"#{name}") for path, name in parameters.items() if _to(f"#{name}") not in taken]
    yield {
        "@id": NAME,
        "@type": "CreativeWork",
        "about": _to("./"),
        "conformsTo": [_to("https://w3id.org/ro/crate/1.1"), _to(list(PROFILES)[-1])],
    }
    yield {
        "@id": "./",
        "@type": "Dataset",
        "name": citation["title"],
        "description": f"{citation['abstract']} A run of the workflow at commit {commit or 'unknown'}.",
        "version": citation["version"],
        "datePublished": whole["endTime"][:10],
        "license": _to(LICENCE),
        "author": _to("#authors"),
        "publisher": _to("#authors"),
        "conformsTo": [_to(profile) for profile in PROFILES],
        "hasPart": [_to("Snakefile"), *map(_to, files)],
        "mainEntity": _to("Snakefile"),
        "mentions": [_to("#run"), *(_to(f"#job-{n}") for n in range(len(jobs)))],
    }
    yield workflow | {
        "@type": ["File", "SoftwareSourceCode", "ComputationalWorkflow", "HowTo"],
        "name": "Tilewright's study",
        "version": commit or citation["version"],
        "programmingLanguage": _to(LANGUAGE),
        "softwareRequirements": _to("requirements.lock"),
        "hasPart": [_to(path) for path in sorted(scripts)],
        "step": [_to(f"#rule-{name}") for name in rules],
        "input": taken,
        "output": given,
        "author": _to("#authors"),
        "license": _to(LICENCE),
    }
    for path, name in parameters.items():
        yield {
            "@id": f"#{name}",
            "@type": "FormalParameter",
            "additionalType": "File",
            "name": name,
            "description": path,
        }
    yield {
        "@id": LANGUAGE,
        "@type": "ComputerLanguage",
        "name": "Snakemake",
        "identifier": _to("https://doi.org/10.1093/bioinformatics/bts480"),
        "url": _to("https://snakemake.readthedocs.io"),
        "version": snakemake,
    }
    for profile, name in PROFILES.items():
        yield {"@id": profile, "@type": "CreativeWork", "name": name, "version": profile.rpartition("/")[2]}
    yield {"@id": "#authors", "@type": "Organization", "name": citation["authors"][0]["name"]}
    yield {"@id": LICENCE, "@type": "CreativeWork", "name": "Apache License 2.0", "identifier": citation["license"]}
    yield {"@id": "#snakemake", "@type": "SoftwareApplication", "name": "Snakemake", "version": snakemake}


def _steps(jobs):
    """Each rule as a step of the workflow, each job as the action of one, and Snakemake's own."""
    rules = {}
    for job in jobs:
        rules.setdefault(job["rule"], job["script"])
    for place, (rule, script) in enumerate(rules.items()):
        step = {"@id": f"#rule-{rule}", "@type": "HowToStep", "name": rule, "position": str(place)}
        yield step | {"workExample": _to(script)}
    for n, job in enumerate(jobs):
        told = {"name": f"rule {job['rule']}", "description": job["shellcmd"]}
        yield _action(f"#job-{n}", job["script"], job["object"], job["result"], [job]) | told
        control = {"@type": "ControlAction", "name": f"starts rule {job['rule']}"}
        yield {"@id": f"#start-{n}", **control, "instrument": _to(f"#rule-{job['rule']}"), "object": _to(f"#job-{n}")}
    starts = [_to(f"#start-{n}") for n in range(len(jobs))]
    engine = {"@id": "#snakemake-run", "@type": "OrganizeAction", "name": "Snakemake", "instrument": _to("#snakemake")}
    yield engine | {"object": starts, "result": _to("#run")}


def _action(name, instrument, objects, results, jobs):
    begin, end = min(job["starttime"] for job in jobs), max(job["endtime"] for job in jobs)
    return {
        "@id": name,
        "@type": "CreateAction",
        "instrument": _to(instrument),
        "object": list(map(_to, objects)),
        "result": list(map(_to, results)),
        "startTime": _when(begin),
        "endTime": _when(end),
        "actionStatus": "http://schema.org/CompletedActionStatus",
    }


def _to(name):
    return {"@id": name}


def _when(seconds):
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")
