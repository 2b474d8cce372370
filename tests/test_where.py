"""The pages name files and symbols that exist.

Every link leads to a file, and the file defines the names after the link.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "docs" / "where.md", *sorted((ROOT / "docs" / "decisions").glob("*.md"))]

_LINK = re.compile(r"\[`[^`]+`\]\(([^)#\s]+)\)")
_SYMBOL = re.compile(r"[\s,]*(?:(?:and|or)\s+)?`([A-Za-z_][\w.]*)`")


def named(text: str) -> list[tuple[str, tuple[str, ...]]]:
    """Return the links of a page to files, each with the symbols that are named right after it."""
    found = []
    for link in _LINK.finditer(text):
        symbols, at = [], link.end()
        while symbol := _SYMBOL.match(text, at):
            symbols.append(symbol[1])
            at = symbol.end()
        found.append((link[1], tuple(symbols)))
    return found


def defined(path: Path) -> set[str]:
    """Return the names that a module defines at its top level.

    Names inside a class appear as `Class.name`.
    """
    names: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        names |= _names(node)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{name}" for inner in node.body for name in _names(inner)}
    return names


def _names(node: ast.stmt) -> set[str]:
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return {node.name}
    targets = node.targets if isinstance(node, ast.Assign) else []
    if isinstance(node, ast.AnnAssign):
        targets = [node.target]
    return {target.id for target in targets if isinstance(target, ast.Name)}


LINKS = [(page, *link) for page in PAGES for link in named(page.read_text())]


@pytest.mark.parametrize(
    ("page", "target", "symbols"), LINKS, ids=lambda value: getattr(value, "name", str(value))
)
def test_a_link_leads_to_a_file_with_the_symbols(
    page: Path, target: str, symbols: tuple[str, ...]
) -> None:
    path = page.parent / target
    assert path.exists(), f"{page.name} links to {target}, which does not exist"
    if symbols:
        missing = set(symbols) - defined(path)
        assert not missing, f"{page.name}: {target} does not define {sorted(missing)}"


def test_the_page_answers_with_files_and_symbols() -> None:
    links = named(PAGES[0].read_text())
    assert len(links) > 30 and sum(bool(symbols) for _, symbols in links) > 25


def test_symbols_end_where_other_words_begin() -> None:
    text = "[`a.py`](../a.py) `B.c`, `d`\nand `e` of `f`. [`g.py`](g.py): see `h`"
    assert named(text) == [("../a.py", ("B.c", "d", "e")), ("g.py", ())]
