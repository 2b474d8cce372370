"""The repository's Markdown as data: pages, links, headings, code blocks and tables."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
_SKIPPED = {"build", "runs", "node_modules"}


def _markdown() -> Iterator[Path]:
    for folder, folders, files in os.walk(ROOT):
        folders[:] = [f for f in sorted(folders) if not f.startswith(".") and f not in _SKIPPED]
        yield from (Path(folder, file) for file in sorted(files) if file.endswith(".md"))


ALL = tuple(_markdown())
"""Every page of the repository."""
GUIDES = tuple(p for p in ALL if p == ROOT / "README.md" or (ROOT / "docs") in p.parents)
"""The README and the pages under docs/."""

_FENCE = re.compile(r"(?P<indent> *)(?P<ticks>```+)(?P<language>\w*) *(?P<options>.*)")
_RUNS_ON = re.compile(r"<!-- (?:runs on|not run): (.+) -->")
_SHELLS = {"bash", "shell", "console", "sh"}


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@dataclass(frozen=True, slots=True)
class Block:
    """A code block. An indented block has no language."""

    page: Path
    line: int
    language: str
    text: str
    title: str = ""
    """The file that has this content."""
    runs_on: str = ""
    """The requirements that a comment above the block states: GPUs, a cluster."""

    def __str__(self) -> str:
        return f"{name(self.page)}:{self.line}"


def blocks(page: Path) -> list[Block]:
    found: list[Block] = []
    lines = page.read_text().splitlines()
    at = 0
    while at < len(lines):
        start = at
        if match := _FENCE.fullmatch(lines[at]):
            at += 1
            while lines[at].strip() != match["ticks"]:
                at += 1
            text = "\n".join(lines[start + 1 : at])
            language = "sh" if match["language"] in _SHELLS else match["language"]
            title = re.search(r'title="(.+?)"', match["options"])
            above = _RUNS_ON.search(lines[start - 1]) if start else None
            found.append(
                Block(
                    page,
                    start + 1,
                    language,
                    text,
                    title[1] if title else "",
                    above[1] if above else "",
                )
            )
        elif lines[at].startswith("    ") and (at == 0 or not lines[at - 1].strip()):
            while at < len(lines) and (lines[at].startswith("    ") or not lines[at].strip()):
                at += 1
            text = "\n".join(line[4:] for line in lines[start:at]).rstrip()
            found.append(Block(page, start + 1, "", text))
        at += 1
    return found


def prose(page: Path) -> str:
    """Return the page without its code blocks."""
    return re.sub(r"^ *```.*?^ *```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def links(page: Path) -> list[str]:
    text = re.sub(r"`[^`\n]*`", "", prose(page))
    return re.findall(r"\]\(([^)\s]+)(?: \"[^\"]*\")?\)", text)


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, in the form that a code host gives them."""
    found: set[str] = set()
    for heading in re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").strip().lower()
        slug = re.sub(r"[^\w\- ]", "", text).replace(" ", "-")
        same = sum(1 for other in found if re.fullmatch(rf"{re.escape(slug)}(-\d+)?", other))
        found.add(f"{slug}-{same}" if same else slug)
    return found


def rows(page: Path, first: str) -> list[list[str]]:
    """Return the rows of all tables of a page whose first column has this heading."""
    found: list[list[str]] = []
    inside = False
    for line in page.read_text().splitlines():
        if not line.startswith("|"):
            inside = False
            continue
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if cells[0] == first:
            inside = True
        elif inside and not set(line) <= set("|-: "):
            found.append(cells)
    return found


def codes(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)
