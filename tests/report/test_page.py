"""The report in a real browser: it filters, sorts, asks no other host, and runs no model text."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from millrace.report.page.write import LIMIT, write_report
from millrace.types import Author, Sample, Score, Segment, Stop, Trajectory, floats_of, tokens_of
from tests.report import chromium
from tests.report.run_folders import keep_samples, renamed, write_config, write_metrics, write_run
from tests.report.runs import sample
from tests.waiting import HANG_S

pytestmark = pytest.mark.xdist_group("chromium")

HOSTILE = "<script>window.hacked = 1</script><img src=x onerror='window.hacked = 2'>"
PHONE, DESKTOP = {"width": 390, "height": 844}, {"width": 1440, "height": 900}


@dataclass
class Opened:
    """A page in the browser, with what it asked for and what it logged."""

    page: Page
    requests: list[str] = field(default_factory=list)
    logged: list[str] = field(default_factory=list)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A run that was killed and resumed, and one on shared devices."""
    folder = tmp_path_factory.mktemp("runs")
    return {
        "killed": write_run(folder / "killed", samples=120, killed_at=30.0),
        "shared": write_run(folder / "shared", mode="colocate_sync", samples=32),
    }


@pytest.fixture(scope="module")
def browser(runs: dict[str, Path]) -> Iterator[Browser]:
    """A browser. Its event loop runs in this thread, so simulated runs come first."""
    path = chromium.find()
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield started
        started.close()


def opened(browser: Browser, path: Path, size: dict[str, int] = DESKTOP, **options: str) -> Opened:
    """Open a report and wait until it has drawn itself. Requests to a host are refused."""
    context = browser.new_context(viewport=size, **options)  # type: ignore[arg-type]
    context.set_default_timeout(1000 * HANG_S)
    page = Opened(context.new_page())
    page.page.on("console", lambda message: page.logged.append(message.text))
    page.page.on("pageerror", lambda error: page.logged.append(str(error)))
    context.route(re.compile(r"^(?!file:|data:|blob:)"), lambda route: route.abort())
    page.page.on("request", lambda request: page.requests.append(request.url))
    page.page.goto(path.as_uri())
    page.page.wait_for_selector("body[data-ready]")
    return page


def outside(page: Opened, path: Path) -> list[str]:
    """Return the requests for anything but the report itself."""
    own = path.as_uri()
    return [url for url in page.requests if url != own and not url.startswith(("data:", "blob:"))]


def texts(page: Opened, selector: str) -> list[str]:
    return page.page.locator(selector).all_inner_texts()


def wide(page: Opened) -> int:
    """Return the pixels by which the page is wider than the screen."""
    return int(page.page.evaluate("document.documentElement.scrollWidth - innerWidth"))


@pytest.mark.parametrize(("size", "scheme"), [(DESKTOP, "light"), (PHONE, "dark")])
def test_a_report_draws_itself_alone_at_every_width(
    browser: Browser, runs: dict[str, Path], size: dict[str, int], scheme: str
) -> None:
    path = write_report([runs["killed"]])
    assert path.stat().st_size < LIMIT < 3_000_000
    page = opened(browser, path, size, color_scheme=scheme)
    assert not outside(page, path)
    assert not page.logged
    assert wide(page) <= 0
    titles = texts(page, "h2")
    assert titles[:3] == ["The run", "Alarms", "Advice"] and titles[-1] == "Samples"
    charts = page.page.locator(".js-plotly-plot").all()
    assert len(charts) >= 8
    assert all(chart.locator(".trace path").count() for chart in charts)
    assert "Attempt 1 killed at version" in texts(page, "#run")[0]
    assert "which agrees" in texts(page, "#tokens")[0]
    assert "attempt 2" in texts(page, "#timeline")[0]


def test_no_button_of_a_chart_sends_it_or_covers_it_on_a_phone(
    browser: Browser, runs: dict[str, Path]
) -> None:
    path = write_report([runs["killed"]])
    titles = "all => all.map(button => button.dataset.title)"
    desktop = opened(browser, path).page
    assert not any("Share" in t for t in desktop.eval_on_selector_all(".modebar-btn", titles))
    context = browser.new_context(viewport=PHONE, has_touch=True, is_mobile=True)  # type: ignore[arg-type]
    phone = context.new_page()
    phone.goto(path.as_uri())
    phone.wait_for_selector("body[data-ready]")
    assert set(phone.eval_on_selector_all(".modebar-btn", titles)) == {"Zoom in", "Zoom out", "Reset axes"}  # fmt: skip
    for chart in phone.locator(".js-plotly-plot").all():
        bar, area = chart.locator(".modebar").bounding_box(), chart.bounding_box()
        assert bar and area and bar["y"] > area["y"] + area["height"] - 40


def test_the_browser_of_samples_filters_sorts_and_turns_pages(
    browser: Browser, runs: dict[str, Path]
) -> None:
    page = opened(browser, write_report([runs["killed"]]))
    p = page.page

    def facts(pattern: str) -> list[float]:
        return [float(found[1]) for text in texts(page, ".sample > .meta:first-child") if (found := re.search(pattern, text))]  # fmt: skip

    whole = int(p.locator(".shown").inner_text().rpartition(" ")[2])
    assert whole > 100
    p.select_option("select[name=order]", "version, last")
    last = facts(r"· version (\d+)")
    assert last == sorted(last, reverse=True) and last[0] > 5
    p.select_option("select[name=order]", "reward, low")
    rewards = facts(r"mean reward ([\d.]+)")
    assert rewards == sorted(rewards) and rewards[0] == 0
    p.select_option("select[name=order]", "spread of rewards")
    spreads = facts(r"± ([\d.]+)")
    assert spreads == sorted(spreads, reverse=True) and spreads[0] > 0.4
    p.select_option("select[name=order]", "length, long")
    lengths = facts(r"· ([\d.]+) tokens")
    assert lengths == sorted(lengths, reverse=True)

    p.select_option("select[name=outcome]", "dropped/equal_outcomes")
    dropped = int(p.locator(".shown").inner_text().rpartition(" ")[2])
    assert 0 < dropped < whole
    assert all("dropped/equal_outcomes" in text for text in texts(page, ".sample > .meta:first-child"))  # fmt: skip
    p.select_option("select[name=outcome]", "all")
    p.fill("input[name='from version']", "2")
    p.fill("input[name='to version']", "3")
    assert set(facts(r"· version (\d+)")) <= {2.0, 3.0}
    p.fill("input[name='from version']", "")
    p.fill("input[name='to version']", "")
    p.fill("input[name='least reward']", "0.5")
    assert all(any(float(r) >= 0.5 for r in card.locator(".reward b").all_inner_texts()) for card in p.locator(".sample").all())  # fmt: skip
    p.fill("input[name='least reward']", "")
    p.fill("input[name=text]", "no such words")
    assert p.locator(".shown").inner_text() == "no sample fits" and not p.locator(".sample").count()
    p.fill("input[name=text]", "")
    first = texts(page, ".sample")[0]
    p.get_by_text("next", exact=True).click()
    assert p.locator(".shown").inner_text().startswith("11 to 20 of")
    assert texts(page, ".sample")[0] != first


def hostile_sample(index: int) -> Sample:
    """A sample whose every text is hostile. Two versions drew its second response."""

    def segment(text: str, version: int, stop: Stop | None) -> Segment:
        tokens = tokens_of(map(ord, text))
        return Segment(tokens, Author.POLICY, version, floats_of([-1.0] * len(text)), stop)

    score = Score(1.0, {HOSTILE: 0.5}, None, HOSTILE)
    cut = (segment(HOSTILE, 0, Stop.INTERRUPTED), segment("</script>", 1, Stop.EOS))
    made = sample(index)
    trajectories = (
        Trajectory.of((segment(HOSTILE, 0, Stop.EOS),), score),
        Trajectory.of(cut, Score(0.0)),
    )
    made = Sample(made.prompt, trajectories, 0)
    return renamed(made, text=HOSTILE, data_source=HOSTILE, ground_truth=HOSTILE)


def test_text_of_a_model_is_shown_and_does_nothing(browser: Browser, tmp_path: Path) -> None:
    folder = tmp_path / "<img src=x onerror=alert(1)>"
    write_config(folder, f"data.train_files=['{HOSTILE.replace(chr(39), '')}']")
    row = {"reward/mean": 0.5, "reward/std": 0.1, f"reward/{HOSTILE}/mean": 0.5}
    write_metrics(folder, {v: row | {"timing_s/step": 1.0} for v in (1, 2, 3)})
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"version": 3, "val/<img src=x onerror=hacked=1>/mean@1": 0.5}\n')
    keep_samples(folder, {1: [hostile_sample(0)], 2: [hostile_sample(1)]})
    path = write_report([folder], tmp_path / "report.html")
    assert "window.hacked" not in path.read_text()
    page = opened(browser, path)
    before = len(page.logged)
    assert not before and not outside(page, path)
    assert texts(page, ".segment")[:3] == [HOSTILE, HOSTILE, "</script>"]
    assert texts(page, ".chip")[:3] == ["v0", "v0", "v1"]
    assert texts(page, ".prompt")[0] == HOSTILE
    assert "<img src=x" in page.page.locator("h1").inner_text()
    # Even a script that somehow got into the page would not run, and would reach no host.
    page.page.evaluate("""() => {
        const script = document.createElement("script");
        script.textContent = "window.hacked = 3";
        document.body.append(script);
    }""")
    blocked = "fetch('http://127.0.0.1:9/').then(() => 'reached', (e) => String(e))"
    assert "Failed to fetch" in page.page.evaluate(blocked)
    assert all("Content Security Policy" in line for line in page.logged[before:])
    assert page.page.evaluate("window.hacked") is None
    assert not page.page.locator("img").count() and not page.page.locator("main script").count()


def test_an_old_folder_and_one_without_a_version_have_reports(
    browser: Browser, tmp_path: Path
) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    write_config(old)
    row = {"reward/mean": 0.1, "timing_s/step": 2.0, "timing_share/wait_samples": 0.5, "trainer/idle_ratio": 0.5}  # fmt: skip
    write_metrics(old, {1: row, 2: row})
    write_config(new, "report.trace=false")
    (new / "metrics.jsonl").write_text("")
    for folder, words in ((old, "waits for responses"), (new, "No timeline: report.trace=false")):
        page = opened(browser, write_report([folder]))
        assert words in page.page.locator("#timeline").inner_text()
        assert "No samples" in page.page.locator("#samples").inner_text()
        assert not page.logged and wide(page) <= 0


def test_a_comparison_shows_what_differs(
    browser: Browser, runs: dict[str, Path], tmp_path: Path
) -> None:
    path = write_report(list(runs.values()), tmp_path / "comparison.html")
    page = opened(browser, path)
    differences = texts(page, "#runs table")[1]
    assert "async_training.placement" in differences and "rollout.n" not in differences
    assert page.page.locator(".js-plotly-plot").count() >= 4
    assert {"trainer waits for responses", "shared changes hands"} <= set(texts(page, "#devices td"))  # fmt: skip
    assert not page.logged and not outside(page, path)
