"""Every sentence that SECURITY.md promises has tests, and each of them exists."""

from __future__ import annotations

import ast
import re
from functools import cache

import pytest

from tests.docs.pages import ROOT, rows
from tests.docs.security import PROMISES, ROWS

PAGE = ROOT / "SECURITY.md"


def sentences(text: str) -> list[str]:
    """Return the sentences of paragraphs and lists, without headings and line breaks."""
    found = []
    for part in re.split(r"\n\n|\n(?=- )|\n(?=#)", text):
        line = " ".join(part.removeprefix("- ").split())
        if line and not line.startswith("#"):
            found += re.split(r"(?<=[.!?])\s+(?=[A-Z`]|millrace )", line)
    return found


@cache
def names_of(file: str) -> set[str]:
    tree = ast.parse((ROOT / file).read_text())
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {n.name for n in ast.walk(tree) if isinstance(n, kinds) and n.name.startswith("test_")}


def promised() -> list[str]:
    _, _, rest = PAGE.read_text().partition("## Promises\n")
    text, limits, _ = rest.partition("\n## Limits\n")
    assert limits
    first, *said = sentences(text)
    assert first.startswith("`tests/docs/security.py` names the tests of every sentence")
    return said


def test_a_sentence_is_a_sentence() -> None:
    text = "# A\n\nOne is `x`. Two\nis 1.5 long.\n- `y` is three. millrace is\n  four.\n- Five.\n"
    assert sentences(text) == [
        *("One is `x`.", "Two is 1.5 long.", "`y` is three.", "millrace is four.", "Five.")
    ]


def test_every_promise_has_tests_and_no_test_is_of_a_promise_that_is_gone() -> None:
    said = promised()
    assert sorted(said) == sorted(PROMISES) and len(said) == len(set(said))
    assert all(PROMISES.values())


def test_every_row_of_the_table_has_tests() -> None:
    assert [cells[0] for cells in rows(PAGE, "what")] == list(ROWS)
    assert all(ROWS.values())


@pytest.mark.parametrize(
    "node", sorted({n for found in (PROMISES, ROWS) for t in found.values() for n in t})
)
def test_a_test_that_is_named_exists(node: str) -> None:
    file, _, name = node.partition("::")
    assert name in names_of(file), f"{file} has no {name}"
