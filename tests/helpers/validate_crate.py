"""Validate the RO-Crate in a folder by the public validator, which runs this: prints what is wrong, a line each.

The two contexts that crates name are on the web: these are their terms, as far as crates of this project have them.
"""

import json
import sys
from types import SimpleNamespace

from rocrate_validator import models, services
from rocrate_validator.utils.http import HttpRequester

SCHEMA = """\
actionStatus about additionalType agent author contentSize datePublished description encodingFormat endTime
exampleOfWork hasPart identifier instrument license mainEntity mentions name object position programmingLanguage
publisher result softwareRequirements startTime step url version workExample ComputerLanguage ControlAction CreateAction
CreativeWork Dataset HowTo HowToStep OrganizeAction Organization SoftwareApplication SoftwareSourceCode
"""
TERMS = {name: f"http://schema.org/{name}" for name in SCHEMA.split()}
TERMS |= {"File": "http://schema.org/MediaObject", "conformsTo": "http://purl.org/dc/terms/conformsTo"}
TERMS |= {name: f"https://bioschemas.org/{name}" for name in ("ComputationalWorkflow", "FormalParameter")}
TERMS |= {name: f"https://bioschemas.org/ComputationalWorkflow#{name}" for name in ("input", "output")}
TERMS |= {"sha256": "https://w3id.org/ro/terms/workflow-run#sha256"}
TEXT = json.dumps({"@context": TERMS})


def answer(*_, **__):
    return SimpleNamespace(
        status_code=200,
        text=TEXT,
        content=TEXT.encode(),
        headers={"Content-Type": "application/ld+json"},
        json=lambda: json.loads(TEXT),
        raise_for_status=lambda: None,
    )


HttpRequester().get = answer
settings = services.ValidationSettings(
    rocrate_uri=sys.argv[1],
    profile_identifier="provenance-run-crate-0.5",
    requirement_severity=models.Severity.REQUIRED,
)
found = services.validate(settings)
for issue in found.get_issues():
    print(issue.check.identifier, issue.message)
sys.exit(not found.passed())
