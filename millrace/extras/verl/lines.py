"""The commands and words of a launch script, split where bash splits them."""

from __future__ import annotations

import re
from collections.abc import Iterator

from millrace.errors import bad_value

Command = tuple[str, str]
"""A command, and the sign before it: `&&`, `||`, or nothing."""


def commands(text: str) -> list[Command]:
    """Return the script's commands. `;;`, which ends a branch of `case`, is one.

    Comments and the texts of here-documents are left out. A line with a continuation, an open
    bracket or an open quote goes on in the next one.
    """
    found: list[Command] = []
    pending, ends = "", list[str]()
    for raw in text.splitlines():
        if ends:
            ends = ends[1:] if raw.strip() == ends[0] else ends
            continue
        bare = _without_comment(pending + raw)
        if continued := re.fullmatch(r"((?:.*[^\\])?(?:\\\\)*)\\[ \t]*", bare, re.S):
            pending = continued[1]
        elif _is_open(bare):
            pending = f"{bare}\n"
        else:
            ends = _here_documents(bare)
            found += _commands(bare)
            pending = ""
    if _is_open(pending):
        shown = pending.strip().splitlines()[0][:80]
        raise bad_value("SCRIPT", shown, "has an open quote or bracket", "close it")
    return [*found, *_commands(pending)]


def _here_documents(line: str) -> list[str]:
    """Return the words that end the here-documents of a line."""
    starts = [at for at, char, bare in _scan(line, _ALL) if bare and char == "<"]
    document = re.compile(r"(?<!<)<<-?\s*([\"']?)(\w+)\1")
    return [match[2] for at in starts if (match := document.match(line, at))]


def _scan(text: str, brackets: str) -> Iterator[tuple[int, str, bool]]:
    """Yield the position, the character and whether it is bare, for each character and the end.

    A bare character stands outside of quotes and brackets. A bracket itself is not bare. `brackets`
    has the kinds that count, each with its two sides.
    """
    quote, depth, escaped = "", 0, False
    for at, char in enumerate(text):
        if quote or escaped:
            quote = "" if char == quote and not escaped else quote
            escaped = char == "\\" and quote == '"' and not escaped
            yield at, char, False
            continue
        escaped = char == "\\"
        quote = char if char in "'\"`" else ""
        if char in brackets:
            # The bracket after a pattern of `case` has no opening one.
            depth = depth + 1 if brackets.index(char) % 2 == 0 else max(depth - 1, 0)
            yield at, char, False
        else:
            yield at, char, not quote and depth == 0
    yield len(text), "", not quote and depth == 0


_ALL = "()[]{}"


def _commands(text: str) -> list[Command]:
    """Split a line at `;`, `;;`, `&`, `&&` and `||` outside of quotes and brackets."""
    parts: list[Command] = []
    start, sign = 0, ""
    for at, char, bare in _scan(text, _ALL):
        double = text[at : at + 2]
        single = char == ";" or (char == "&" and text[at - 1 : at] not in (">", "<", "|"))
        single = single and double != "&>"
        if bare and at >= start and (single or double in ("&&", "||")):
            parts.append((text[start:at].strip(), sign))
            sign = double if double in ("&&", "||") else ""
            start = at + (2 if double in ("&&", "||", ";;") else 1)
            parts += [(";;", "")] if double == ";;" else []
    parts.append((text[start:].strip(), sign))
    return [(part, after) for part, after in parts if part]


def _without_comment(text: str) -> str:
    """Remove comments: `#` at the start of a word, outside of quotes."""
    out = ""
    while True:
        before, at = True, len(text)
        for i, char, bare in _scan(text, ""):
            if before and bare and char == "#":
                at = i
                break
            before = bare and char.isspace()
        end = text.find("\n", at)
        out += text[:at]
        if end < 0:
            return out
        text = text[end:]


def _is_open(text: str) -> bool:
    """Return whether a quote is open, or the brackets of an array or of arithmetic."""
    return not all(bare for at, _, bare in _scan(text, "()") if at == len(text))


def before_pipe(line: str) -> str:
    """Return a command without what its output goes through."""
    pipes = (at for at, char, bare in _scan(line, _ALL) if bare and char == "|")
    return line[: next(pipes, len(line))]


def words_of(text: str) -> list[str]:
    """Split a line at spaces outside of quotes and of `$(( ))`. Quotes stay."""
    words, start = [], 0
    for at, char, bare in _scan(text, _ALL):
        if at == len(text) or (bare and char.isspace()):
            words.append(text[start:at])
            start = at + 1
    return [word for word in words if word]
