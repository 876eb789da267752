"""Errors, warnings and help texts: a short sentence in plain words, with what was expected and what was found."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = sorted([*(ROOT / "src").rglob("*.py"), *(ROOT / "workflow/scripts").glob("*.py")])
MOST_WORDS = 35
# History, words that mean nothing outside of this project, and what is easier to say.
BANNED = (
    r"(?<!-)anew|no longer|used to|until now|today's|formerly|as before|was there before|earlier runs?|nobody|told|"
    r"tells?|odds|turns? out|beside|side by side|in one piece|so many|of (its|their|one's) own|stands? twice|"
    r"two dimensions|what is"
)
# Names of exceptions that carry a message, and calls that warn.
RAISED = re.compile(r"\w*(Error|Unavailable|ArgumentTypeError)$")
WARNS = ("warn", "warning")


def text_of(node):
    """A string with ``{}`` for what is put in, None for what is no string."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(part.value if isinstance(part, ast.Constant) else "{}" for part in node.values)
    return None


@cache
def calls():
    """``{path: calls}`` of all modules."""
    return {
        path: [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)] for path in SOURCES
    }


def name_of(call):
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def messages(path):
    """``(place, text)`` of the errors and warnings of a module, and of help texts."""
    for call in calls()[path]:
        given = [*call.args, *(each.value for each in call.keywords if each.arg in ("help", "description", "epilog"))]
        adds = name_of(call) in ("add", "add_argument", "add_parser")
        if RAISED.match(name_of(call)) or name_of(call) in WARNS or adds:
            for text in filter(None, map(text_of, given)):
                if " " in text:
                    yield f"{path.relative_to(ROOT)}:{call.lineno}", text


@cache
def texts():
    """``(place, text)`` of all modules."""
    return [found for path in SOURCES for found in messages(path)]


def test_messages_are_found():
    assert len(texts()) > 1000


def test_a_message_is_short():
    assert [(place, text) for place, text in texts() if len(text.split()) > MOST_WORDS] == []


def test_a_message_has_no_history_and_no_private_words():
    assert [(place, text) for place, text in texts() if re.search(rf"\b({BANNED})\b", text)] == []


def test_a_message_says_what_was_found():
    # What was found stands in front of what was expected, or behind it.
    found = re.compile(r"\{\}.*expected|expected.*\b(found|missing)\b|no such file")
    assert [(place, text) for place, text in texts() if "expected" in text and not found.search(text)] == []


def test_a_shape_is_expected_by_the_names_of_its_dimensions():
    assert [(place, text) for place, text in texts() if re.search(r"expected shape [^(\[{]", text)] == []


def test_an_option_has_a_help_text():
    bare = [
        (str(path), ast.unparse(call))
        for path, called in calls().items()
        for call in called
        if name_of(call) in ("add", "add_argument")
        and call.args
        and (text_of(call.args[0]) or "").startswith("-")
        and not {"help", "version"} & {each.arg for each in call.keywords}
    ]
    assert bare == []


@pytest.mark.parametrize("path", sorted((ROOT / "workflow/scripts").glob("*.py")), ids=lambda path: path.stem)
def test_a_script_shows_an_example_of_itself(path):
    *said, example = ast.get_docstring(ast.parse(path.read_text())).split("\n\n")
    if path.stem == "solve_ilp_gurobi":
        pytest.skip("it has the example of solve_ilp")
    assert said
    assert example.startswith(f"python workflow/scripts/{path.name} ")
    # Three scripts are an order of `reorder.py`.
    declared = path.read_text() + (path.parent / "reorder.py").read_text()
    assert [flag for flag in re.findall(r"--[\w-]+", example) if f'"{flag}"' not in declared] == []
    assert not re.match(r"T\d", said[0])
