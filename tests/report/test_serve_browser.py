"""The frame of `millrace serve` in a real browser: it follows the run, until its reader acts."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from millrace.report.live import serve as server
from tests.report import chromium
from tests.report.folders import Run
from tests.report.test_serve import TOKEN, Server
from tests.waiting import HANG_S

api = pytest.importorskip("playwright.sync_api")
pytestmark = pytest.mark.xdist_group("chromium")

REPORT = """<!doctype html><title>report {number}</title><h1>report {number}</h1>
<script>
  setTimeout(() => {{ document.body.style.height = "5000px"; }}, 300);
  fetch("/{token}/state").then(() => {{ document.title = "it sent something"; }}, () => {{}});
</script>"""


class Site(Server):
    def render(self, folder: Path) -> str:
        rows = (folder / "metrics.jsonl").read_text().count("\n")
        return REPORT.format(number=rows, token=TOKEN)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    made = Run(tmp_path / "run")
    made.version(1)
    yield made
    made.close()


@pytest.fixture
def site(run: Run, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    monkeypatch.setattr(server, "REST", 0.0)
    made = Site(run.path)
    yield made
    made.close()


@pytest.fixture
def page() -> Iterator[Any]:
    path = chromium.find()
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        api.expect.set_options(timeout=1000 * HANG_S)
        page = browser.new_page()
        page.set_default_timeout(1000 * HANG_S)
        yield page
        browser.close()


def until(frame: Any, holds: str) -> None:
    """Wait until an expression holds. Playwright's own wait needs eval, which the page forbids."""
    end = time.monotonic() + HANG_S
    while not frame.evaluate(holds):
        assert time.monotonic() < end, holds
        frame.wait_for_timeout(100)


def test_the_report_follows_the_run_and_keeps_its_place_until_the_reader_acts(
    run: Run, site: Site, page: Any
) -> None:
    hosts = set()
    page.on("request", lambda request: hosts.add(request.url.split("/")[2]))
    page.goto(f"http://127.0.0.1:{site.port}/{TOKEN}")
    report, line = page.frame_locator("#report"), page.locator("#line")
    api.expect(report.locator("h1")).to_have_text("report 1")
    api.expect(line).to_contain_text("version 1 of 80")
    inner = page.frames[1]
    until(inner, "document.body.offsetHeight >= 5000")
    inner.evaluate("scrollTo(0, 700)")

    run.version(2)
    api.expect(report.locator("h1")).to_have_text("report 2")
    until(page.frames[1], "scrollY === 700")
    api.expect(line).to_contain_text("version 2 of 80")

    report.locator("body").click(position={"x": 5, "y": 900})
    api.expect(page.locator("#follow")).not_to_be_checked()
    run.version(3)
    api.expect(line).to_contain_text("a newer report is there")
    api.expect(report.locator("h1")).to_have_text("report 2")
    page.locator("#follow").check()
    api.expect(report.locator("h1")).to_have_text("report 3")
    assert hosts == {f"127.0.0.1:{site.port}"}


def test_a_report_can_send_nothing(site: Site, page: Any) -> None:
    address = f"http://127.0.0.1:{site.port}/{TOKEN}"
    said: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.goto(f"{address}/report")
    until(page.main_frame, "document.body.offsetHeight >= 5000")
    assert page.title() == "report 1" and any("Content Security Policy" in text for text in said)
