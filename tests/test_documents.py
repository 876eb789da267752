"""The documents: their links lead somewhere, and the files they name exist. Code runs in test_pages.py."""

import re
from pathlib import Path

import pandas as pd
import pytest

from tilewright_study import experiments, figures
from tilewright_study.experiments.attention import table_prediction
from tilewright_study.experiments.networks import table_end_to_end
from tilewright_study.experiments.slices import table_slices
from tilewright_study.tables import _quoted

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted(
    path.relative_to(ROOT)
    for pattern in ("*.md", "docs/**/*.md", "config/*.md", "expected/*/*.md")
    for path in ROOT.glob(pattern)
)
README = (ROOT / "README.md").read_text()
NOUNS = re.findall(r"^## (.+)$", (ROOT / "docs/glossary.md").read_text(), re.MULTILINE)
# Pages for users. The reference is made from docstrings, and the rows are of tables.
USERS = [
    path
    for path in DOCUMENTS
    if str(path.parent) in (".", "config", "docs", "docs/tutorials")
    and path.name
    not in ("CHANGELOG.md", "CODE_OF_CONDUCT.md", "CONTRIBUTING.md", "glossary.md", "reference.md", "rows.md")
]
# Of the checkout; others in backticks are made by a run, or stand in the published artifact.
TRACKED = ("docs", "tests", "workflow/scripts", "config", "profiles", "containers", "benchmarks", "envs", "rules")


def text(path):
    """A document without its blocks of code."""
    return re.sub(r"^```.*?^```$", "", (ROOT / path).read_text(), flags=re.MULTILINE | re.DOTALL)


def anchors(path):
    """Anchors of a document's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", text(path), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", DOCUMENTS, ids=str)
def test_every_link_leads_somewhere(path):
    for link in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`\n]+`", "", text(path))):
        if link.startswith("https://"):
            continue
        name, _, anchor = link.partition("#")
        target = (ROOT / path).parent / name if name else ROOT / path
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_decisions_are_at_most_fifteen_pages_of_a_page_each():
    pages = [path for path in DOCUMENTS if "decisions" in path.parts]
    assert 0 < len(pages) <= 15
    assert [path for path in pages if len((ROOT / path).read_text().split()) > 450] == []


@pytest.mark.parametrize("path", [path for path in DOCUMENTS if "trials" not in path.parts], ids=str)
def test_every_file_of_the_checkout_that_is_named_exists(path):
    named = re.findall(rf"`((?:{'|'.join(TRACKED)})/[\w./-]+)`", text(path))
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_every_page_that_code_names_exists():
    files = [path for folder in ("src", "workflow", "rules") for path in (ROOT / folder).rglob("*.*")]
    code = [path for path in files if path.suffix in (".py", ".smk", ".html")]
    named = {name for path in code for name in re.findall(r"docs/[\w/-]+\.md", path.read_text())}
    assert named and [name for name in sorted(named) if not (ROOT / name).exists()] == []


def test_every_noun_of_the_code_is_in_the_module_that_is_said_to_define_it():
    nouns = text("CONTRIBUTING.md").partition("## Nouns")[2].partition("## Words")[0]
    rows = re.findall(r"^\| (.+) \| `([^`]+)` \|$", nouns, re.MULTILINE)
    assert len(rows) > 15
    for named, place in rows:
        (path,) = (root / place for root in (ROOT / "src", ROOT / "src/tilewright") if (root / place).exists())
        module = path.read_text().lower()
        assert [noun for noun in named.split(", ") if noun.split(" of ")[0] not in module] == []


def test_the_glossary_has_at_most_twenty_five_nouns_in_alphabetical_order():
    assert 0 < len(NOUNS) <= 25 and sorted(NOUNS) == NOUNS


def sentences(path):
    """A page without code, tables, headings, comments and pictures."""
    whole = re.sub(r"^ *```.*?^ *```$", "", (ROOT / path).read_text(), flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"^ *[|#].*$|`[^`\n]*`|<!--.*?-->|!\[[^\]]*\]\([^)]*\)", "", whole, flags=re.MULTILINE)


def unlinked(page):
    """Nouns of the glossary whose first use in the sentences of a page is in no link."""
    links = [link.span() for link in re.finditer(r"\[[^\]]*\]\([^)]*\)", page)]
    # As long as before, so that places are the same.
    words = re.sub(r"\]\([^)]*\)", lambda target: "]" + " " * (len(target[0]) - 1), page)
    for noun in NOUNS:
        stem = noun.lower().removesuffix("s")
        first = re.search(rf"\b({stem[:-1]}ies|{stem}(s|es)?)\b", words, re.IGNORECASE)
        if first and not any(start < first.start() < end for start, end in links):
            yield noun


@pytest.mark.parametrize("path", USERS, ids=str)
def test_pages_for_users_are_short(path):
    assert len(re.findall(r"[A-Za-z][\w'-]*", re.sub(r"\]\([^)]*\)", "]", sentences(path)))) <= 900


@pytest.mark.parametrize("path", USERS, ids=str)
def test_nouns_of_the_glossary_are_linked_where_a_page_first_has_them(path):
    assert list(unlinked(sentences(path))) == []


def test_the_readme_is_one_page_and_shows_code_early():
    lines = README.splitlines()
    assert len(lines) <= 110
    assert lines.index("out = plan(q, k, v)") < 50


def test_the_readmes_counts_of_networks_are_those_of_the_recorded_rows():
    rows = _quoted._table(ROOT, "h200", "networks", table_end_to_end.table)
    ours = rows[rows["attention"] == table_end_to_end.OURS]
    called, graphs = (ours[ours[f"verdict{suffix}"] == "slower"] for suffix in table_end_to_end.WAYS)
    assert set(graphs["family"]) == {"dynamicvit"} and set(graphs["batch"]) == {1}
    for way, found, which in (
        (
            "called from Python",
            called,
            f"{(called['batch'] == 1).sum()} of the {(ours['batch'] == 1).sum()} with one image",
        ),
        ("as CUDA graphs", graphs, "DynamicViT, one image"),
    ):
        line = next(line for line in README.splitlines() if line.startswith(f"| {way}"))
        assert line.endswith(f"| {len(ours)} | {len(found)} ({which}) |")
    paper = _quoted.quoted("h200-paper", ROOT)
    assert paper.count("| not reproduced |") == 9 == len(paper.splitlines()) - 2
    assert "None of the paper's nine speed-ups is reached by [whole networks on an H200]" in README


def test_the_readmes_numbers_of_lists_are_those_of_the_recorded_rows():
    rows = _quoted._table(ROOT, "h200", "slices", table_slices.table)
    default = rows[(rows["chosen_by"] == "pooled32") & (rows["call"] == "predict_attend")]
    case = default[(default["case"] == "12x128-21x30x52") & (default["sparsity"] > 0.6)]
    assert "| {:.2f} | {:.2f} | {:.2f} |".format(*case["speedup"]) in README
    assert "| {:.0f} % | {:.0f} % | {:.0f} % |".format(*(100 * case["recall"])) in README


def test_the_speedups_of_blocks_are_those_of_the_recorded_rows():
    rows = pd.read_csv(ROOT / "expected/h200/worth.csv").query("part == 'block' and p50_us > 0")
    dense = rows[rows["density"] == 1].groupby("tokens")["p50_us"].min()
    ours = rows[rows["provider"] == "tilewright"].pivot(index="tokens", columns="asked", values="p50_us")
    for tokens, speedups in ours.rdiv(dense, axis=0).iterrows():
        assert f"| {tokens:,} | {' | '.join(f'{x:.2f}' for x in speedups)} |" in (ROOT / "docs/worth.md").read_text()


@pytest.mark.parametrize("device", ["cpu-2-cores", "h200"])
def test_the_errors_of_predicted_times_are_those_of_the_recorded_rows(device):
    errors = table_prediction.table([ROOT / f"expected/{device}/attention.csv"])["error"].abs()
    said = f"times is {errors.median():.1%}, and nine in ten are within {errors.quantile(0.9):.1%}".replace("%", " %")
    assert said in (ROOT / "docs/rows.md").read_text()


def test_the_documents_name_every_figure_and_experiment():
    outputs, configuration = (ROOT / "docs/outputs.md").read_text(), (ROOT / "config/README.md").read_text()
    assert [name for name in figures.NAMES if f"`{name}`" not in outputs] == []
    assert [name for name in experiments.NAMES if f"`{name}`" not in configuration] == []


def test_no_document_installs_what_is_on_no_index():
    assert [
        path for path in DOCUMENTS if re.search(r"pip install [^-\n]*tilewright\b", (ROOT / path).read_text())
    ] == []
