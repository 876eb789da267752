import hashlib
import shutil
import subprocess
from pathlib import Path

import pytest

import tilewright
from tilewright import masks
from tilewright.core.errors import UnknownNameError
from tilewright_study import provenance

# A package of the same name with every way to import a module.
SOURCES = {
    "__init__.py": "",
    "leaf.py": "VALUE = 1\n",
    "alone.py": "import os\n",
    "absolute.py": "import tilewright.leaf\n",
    "named.py": "from tilewright import leaf as other\n",
    "attribute.py": "from tilewright.leaf import VALUE\n",
    "relative.py": "from .leaf import VALUE\n",
    "relative_package.py": "from . import leaf\n",
    "lazy.py": "def f():\n    if True:\n        from tilewright.leaf import VALUE\n",
    "chain.py": "from tilewright import lazy\n",
    "cycle_a.py": "import tilewright.cycle_b\n",
    "cycle_b.py": "import tilewright.cycle_a, tilewright.leaf\n",
    "family/__init__.py": "NAMES = ('one',)\n",
    "family/one.py": "from ..leaf import VALUE\nfrom .two import g\n",
    "family/two.py": "g = 1\n",
    "family/user.py": "from tilewright.family import NAMES\n",
}
REACH_LEAF = [
    "absolute",
    "named",
    "attribute",
    "relative",
    "relative_package",
    "lazy",
    "chain",
    "cycle_a",
    "family.one",
]


@pytest.fixture
def package(tmp_path, monkeypatch):
    """The folder of a small package that `provenance` reads in place of its own."""
    root = tmp_path / "src" / "tilewright"
    for name, text in SOURCES.items():
        (root / name).parent.mkdir(exist_ok=True, parents=True)
        (root / name).write_text(text)
    monkeypatch.setattr(provenance, "_ROOT", root.parent)
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path / "cache"))
    forget()
    yield root
    forget()


def copied(tmp_path, monkeypatch):
    """The folder of a copy of the package, which `provenance` reads in its place."""
    root = tmp_path / "tilewright"
    shutil.copytree(Path(tilewright.__file__).parent, root, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(provenance, "_ROOT", tmp_path)
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path / "cache"))
    return root


def forget():
    for function in (
        provenance._path_of,
        provenance._source,
        provenance._imports,
        provenance.closure,
        provenance.code_digest,
        provenance.text_digest,
    ):
        function.cache_clear()


def digest(*modules):
    forget()
    return provenance.code_digest(*(f"tilewright.{module}" for module in modules))


@pytest.mark.parametrize("module", REACH_LEAF)
def test_closure_sees_every_form_of_import(package, module):
    assert "tilewright.leaf" in provenance.closure(f"tilewright.{module}")


def test_closure_holds_nothing_else(package):
    assert provenance.closure("tilewright.alone") == ("tilewright.alone",)
    assert provenance.closure("tilewright.family.one") == (
        "tilewright.family.one",
        "tilewright.family.two",
        "tilewright.leaf",
    )


@pytest.mark.parametrize("module", REACH_LEAF)
def test_digest_changes_with_an_imported_module(package, module):
    before, alone = digest(module), digest("alone")
    (package / "leaf.py").write_text("VALUE = 2\n")
    assert digest(module) != before and digest("alone") == alone


@pytest.mark.parametrize(
    "text", ["# Why.\nVALUE = 1\n", '"""What it is."""\n\nVALUE = 1\n'], ids=["comment", "docstring"]
)
def test_digest_does_not_change_with_an_explanation(package, text):
    before = digest("leaf")
    (package / "leaf.py").write_text(text)
    assert digest("leaf") == before


def test_digest_does_not_change_with_a_new_member_of_a_family(package):
    before = digest("family.user")
    assert "tilewright.family" in provenance.closure("tilewright.family.user")
    (package / "family/__init__.py").write_text("NAMES = ('one', 'two')\n")
    assert digest("family.user") == before
    (package / "family/__init__.py").write_text("NAMES = ('one',)\nOTHER = 3\n")
    assert digest("family.user") != before


def test_digest_reads_sources_of_any_characters(package):
    (package / "leaf.py").write_bytes("VALUE = 'é≤'\n".encode())
    assert len(digest("leaf")) == 16


def test_an_unknown_module_is_refused(package):
    with pytest.raises(UnknownNameError, match=r"unknown module 'tilewright\.absent'; known: .*tilewright\.alone"):
        provenance.code_digest("tilewright.absent")
    with pytest.raises(UnknownNameError, match="unknown module 'os'"):
        provenance.closure("os")


def test_a_changed_copy_of_the_package_has_another_digest(tmp_path, monkeypatch):
    root = copied(tmp_path, monkeypatch)
    before = [digest(module) for module in ("attention.blocks", "graph")]
    # The cover is imported where it is used only, inside a function.
    (root / "attention/blocks/cover.py").write_text((root / "attention/blocks/cover.py").read_text() + "\nADDED = 1\n")
    after = [digest(module) for module in ("attention.blocks", "graph")]
    assert [one == other for one, other in zip(before, after, strict=True)] == [False, True]
    forget()


def test_digest_follows_what_a_module_declares_to_enter(package):
    (package / "alone.py").write_text("ENTERED = ('tilewright.leaf',)\n")
    before = digest("alone")
    assert provenance.closure("tilewright.alone") == ("tilewright.alone", "tilewright.leaf")
    (package / "leaf.py").write_text("VALUE = 2\n")
    assert digest("alone") != before


def test_digest_leaves_out_what_a_module_imports_for_its_callers(package):
    (package / "alone.py").write_text("APART = ('tilewright.leaf',)\nfrom tilewright import leaf\n")
    before = digest("alone")
    (package / "leaf.py").write_text("VALUE = 2\n")
    assert digest("alone") == before


@pytest.mark.parametrize("name", ["ENTERED", "APART"])
def test_a_declared_module_that_is_not_there_is_refused(package, name):
    (package / "alone.py").write_text(f"{name} = ('tilewright.gone',)\n")
    with pytest.raises(UnknownNameError, match=r"unknown module 'tilewright\.gone'"):
        digest("alone")


@pytest.mark.parametrize(
    "workload, overrides, changes",
    [
        pytest.param("dynamicvit-s-224", {"gate": "predictor", "weights": "net.pth"}, True, id="predictor"),
        pytest.param("dynamicvit-s-224", {}, False, id="threshold"),
        pytest.param("vil-tiny-224-s1", {}, False, id="vil"),
        pytest.param("regionvit-tiny-224-s1", {}, False, id="regionvit"),
    ],
)
@pytest.mark.parametrize("edited", ["networks/dynamicvit.py", "networks/_gate.py"])
def test_graphs_change_with_the_network_whose_gate_makes_them(
    tmp_path, monkeypatch, edited, workload, overrides, changes
):
    root = copied(tmp_path, monkeypatch)
    modules = [name.removeprefix("tilewright.") for name in masks.modules(workload, overrides)]
    before = digest(*modules)
    (root / edited).write_text((root / edited).read_text() + "\nADDED = 1\n")
    assert (digest(*modules) != before) == changes
    forget()


def test_a_source_that_was_read_before_is_not_parsed(package, monkeypatch):
    first = digest("leaf", "alone")
    monkeypatch.setattr(provenance.ast, "parse", lambda text: pytest.fail("parsed again"))
    assert digest("leaf", "alone") == first


def test_what_was_kept_of_an_older_text_does_not_count(package):
    first = digest("leaf")
    (package / "leaf.py").write_text("VALUE = 1234\n")
    assert digest("leaf") != first


def test_a_module_that_became_a_package_is_read_again(package):
    text = "from . import leaf\n"
    (package / "moved.py").write_text(text)
    digest("moved")
    assert "tilewright.leaf" in provenance.closure("tilewright.moved")
    (package / "moved.py").unlink()
    (package / "moved").mkdir()
    (package / "moved/__init__.py").write_text(text)
    (package / "moved/leaf.py").write_text("")
    digest("moved")
    assert "tilewright.moved.leaf" in provenance.closure("tilewright.moved")


@pytest.mark.parametrize("damage", [b"", b"{", b"\xff", b'{"digest": 1}'])
def test_what_was_kept_and_is_damaged_is_made_again(package, tmp_path, damage):
    first, kept = digest("leaf"), tmp_path / "cache" / "code" / "tilewright.leaf.json"
    whole = kept.read_bytes()
    kept.write_bytes(damage)
    assert digest("leaf") == first and kept.read_bytes() == whole


def test_where_nothing_can_be_kept_digests_are_the_same(package, tmp_path, monkeypatch):
    first = digest("leaf")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path / "file" / "cache"))
    assert digest("leaf") == first


def test_modules_that_are_entered_by_a_string_are_declared():
    """An import by a literal name is one that the digest does not see."""
    root = Path(tilewright.__file__).parent
    hidden = [str(path.relative_to(root)) for path in root.rglob("*.py") if 'import_module("' in path.read_text()]
    assert hidden == []


def test_few_imports_do_not_count():
    root = Path(tilewright.__file__).parent
    apart = {str(path.relative_to(root)) for path in root.rglob("*.py") if "\nAPART = " in path.read_text()}
    assert apart == {"__init__.py", "masks/__init__.py", "networks/plans.py"}


# What releases of Python read differently: parameters of types, empty fields, the pieces of a text with fields in it.
SOURCE = b'''
"""Docstring."""
from os import path as p

@decorated(1, key=None)
class Thing(Base, metaclass=Meta):
    """Docstring."""
    size: int = 3

    async def get(self, a, /, b=2, *rest, c, d=-1.5, **more) -> "x":
        async with self.lock as (u, v):
            return [*rest, {**more, 1: b}, (yield), f"{a!r:>{b}}:{c=} {{}}" "tail" f"{d}" f"{a:}"]

    def empty(self): pass

def given(x, y=(), *, z=None):
    match x:
        case {"k": [1, *_], **rest} if y: return lambda q=0: q[1:, ::2, ...]
        case Thing(size=3) | None: return b"\\xff", 1j, "\xc3\xa9", True
    try: del x.y, z[0]
    except* (A, B) as e: raise e from None
    else: x = y if (n := 3) else not z
    finally: x @= 2; assert x, "no"
'''


def test_code_reads_the_same_under_every_release_of_python():
    text = provenance.canonical(SOURCE)
    assert "Docstring" not in text
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == "dcd68c6ac0250f5a"


@pytest.mark.parametrize(
    "one, other",
    [
        ("x = None", "x = 0"),
        ("x = ''", "x = None"),
        ("x = f'{a}b'", "x = f'b{a}'"),
        ("f(a, b)", "f(b, a)"),
        ("def f(a=None): ...", "def f(a): ..."),
        ("def f(*, a=None): ...", "def f(*, a): ..."),
        ("x = {**a, 1: 2}", "x = {1: 2, **a}"),
        ("return_ = []", "return_ = ()"),
    ],
)
def test_code_tells_apart(one, other):
    assert provenance.canonical(one) != provenance.canonical(other)


def test_the_commit_is_that_of_the_checkout(package, monkeypatch):
    def git(*arguments):
        subprocess.run(["git", "-C", package.parent, "-c", "user.name=n", "-c", "user.email=e", *arguments], check=True)

    def found():
        provenance.commit.cache_clear()
        return provenance.commit()

    monkeypatch.setenv("TILEWRIGHT_COMMIT", "abc1234")
    assert found() == "abc1234"
    git("init", "-q", ".")
    # A checkout that the package is no part of does not count.
    (package.parent / "README").write_text("other")
    git("add", "README"), git("commit", "-qm", "other")
    assert found() == "abc1234"
    git("add", "."), git("commit", "-qm", "package")
    head = subprocess.run(["git", "-C", package.parent, "rev-parse", "HEAD"], capture_output=True, text=True).stdout
    assert found() == head[:10]
    (package / "leaf.py").write_text("VALUE = 2\n")
    assert found() == f"{head[:10]}+"
    monkeypatch.setenv("PATH", "")
    assert found() == "abc1234"
    monkeypatch.delenv("TILEWRIGHT_COMMIT")
    assert found() == ""
    provenance.commit.cache_clear()
