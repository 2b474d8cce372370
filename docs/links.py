"""A hook of mkdocs: links to files outside docs/, and the decisions in the navigation."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

LINK = re.compile(r"\[([^\]]*)\]\(((?:\.\./)+[^)\s]+)\)")


def on_config(config: Any) -> Any:
    """List every page of docs/decisions, so that a new page needs no line in mkdocs.yml."""
    docs = Path(config["docs_dir"])
    found = sorted(docs.glob("decisions/*.md"), key=lambda page: (page.stem != "index", page.stem))
    pages = [page.relative_to(docs).as_posix() for page in found]
    if pages:
        config["nav"].append({"Decisions": pages})
    return config


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Point links that leave docs/ at the code host. Without a code host, show the path."""
    folder = posixpath.dirname(page.file.src_uri)
    host = (config["repo_url"] or "").rstrip("/")

    def outside(link: re.Match[str]) -> str:
        text, target = link.groups()
        path = posixpath.normpath(posixpath.join("docs", folder, target))
        if path.startswith("docs/"):
            return link[0]
        if host:
            return f"[{text}]({host}/blob/HEAD/{path})"
        return text if path in text else f"{text} (`{path}`)"

    return LINK.sub(outside, markdown)
