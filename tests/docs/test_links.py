"""Every link of every page leads somewhere, and the site builds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs import pages
from tests.waiting import HANG_S


@pytest.mark.parametrize("page", pages.ALL, ids=pages.name)
def test_every_link_leads_somewhere(page: Path) -> None:
    for link in pages.links(page):
        if "://" in link or link.startswith("mailto:"):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{pages.name(page)} links to {link}, which is not there"
        if anchor and target.suffix == ".md":
            assert anchor in pages.anchors(target), f"{pages.name(page)}: no heading for {link}"


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("material", reason="the extra docs is not installed")
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-d", str(tmp_path)]
    done = subprocess.run(build, cwd=pages.ROOT, capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == 0, done.stderr
    for page in (pages.ROOT / "docs").glob("*.md"):
        assert (tmp_path / f"{page.stem}.html").is_file()


def test_a_link_out_of_docs_leads_to_the_code_host(tmp_path: Path) -> None:
    """Without a code host, the page shows the path."""
    pytest.importorskip("material", reason="the extra docs is not installed")
    sys.path.insert(0, str(pages.ROOT / "docs"))
    import links  # type: ignore[import-not-found]

    class Page:
        class file:  # noqa: N801
            src_uri = "decisions/one.md"

    text = "[rpc](../../millrace/runtime/rpc.py), [modes](../modes.md)"
    host = {"repo_url": "https://host/owner/millrace/"}
    assert links.on_page_markdown(text, Page, host, None) == (
        "[rpc](https://host/owner/millrace/blob/HEAD/millrace/runtime/rpc.py), [modes](../modes.md)"
    )
    assert links.on_page_markdown(text, Page, {"repo_url": ""}, None) == (
        "rpc (`millrace/runtime/rpc.py`), [modes](../modes.md)"
    )
