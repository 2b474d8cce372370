"""The report as one HTML file: the sections of a run, its samples and the code that draws them.

All is compressed. The file must stay under LIMIT. Plotly takes two thirds of it. The samples get what the charts leave.
"""

from __future__ import annotations

import base64
import gc
import gzip
import html
import itertools
import secrets
from bisect import bisect_right
from collections.abc import Sequence
from functools import cache
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

import msgspec

from millrace.errors import bad_value
from millrace.persist.ownership import unwritable
from millrace.persist.run_reader import RunReader, load
from millrace.process.files import replace_file
from millrace.report.page import compare, curves, head, timeline, totals
from millrace.report.page.figures import missing, section, text
from millrace.report.page.samples import Table, choose, count, read_table, read_texts
from millrace.report.page.timeline import Spans, columns
from millrace.report.trace import spans

LIMIT = 2_950_000
"""Bytes of a report."""

_DENSEST = 10
"""Characters of text in a byte of the report, at most."""

MARK = "<!-- millrace report -->"
"""The second line of every report. Files without it are not overwritten."""

DEFAULT = "report.html"
_FIX = "a file in a folder that exists"


def write_report(run_dirs: Sequence[Path], output: Path | None = None) -> Path:
    """Write the report of a run, or the comparison of several. Return its path.

    By default one run's report is in its folder, and a comparison in the current folder. Raises
    ConfigError for a folder that is no run's, and for a file that is not a report.
    """
    if not run_dirs:
        raise bad_value("RUN", "", "names no run", "millrace report runs/quickstart-1")
    runs = [load(path) for path in run_dirs]
    path = output or (runs[0].path / DEFAULT if len(runs) == 1 else Path(DEFAULT))
    check_output(path)
    try:
        replace_file(path, page_of(runs))
    except OSError as error:
        raise unwritable(path, error, "--output", _FIX) from None
    return path


def check_output(path: Path) -> None:
    """Raise ConfigError if `path` is a folder, or a file that is not a report."""
    rule = ""
    try:
        if path.is_dir() and not path.is_symlink():
            rule = "is a folder"
        elif path.is_file() and not path.is_symlink():
            with path.open("rb") as file:
                if MARK.encode() not in file.read(200):
                    rule = "exists, and is not a report of millrace's"
    except OSError as error:
        raise unwritable(path, error, "--output", _FIX) from None
    if rule:
        raise bad_value("--output", str(path), rule, "a new file, such as report.html")


def of_run(run: RunReader, live: bool = False) -> tuple[dict[str, Any], Table]:
    """Return the page of a run, and its samples without their texts.

    A `live` page does not wait for its advice.
    """
    table, found = read_table(run.path), _spans(run)
    run.notes += table.notes
    played = curves.agents(run)
    without = "No samples: the folder has no samples/. Runs of older versions have none."
    if run.key("report.samples") == 0:
        without = "No samples: `report.samples=0`."
    return {
        "title": f"{run.key('name', run.name)}: report of {run.name}",
        "keys": run.keys(),
        "sections": [
            section("run", "The run", [head.facts(run)]),
            section("alarms", "Alarms", head.alarms(run)),
            section("advice", "Advice", head.advice(run, live)),
            section("learning", "Learning", [curves.rewards(run), curves.validation(run)]),
            *([section("agents", "Agents", played)] if played else []),
            section("timeline", "Timeline", timeline.timeline(run, found)),
            section("devices", "Where the time went", totals.devices(run)),
            section("staleness", "Staleness", [curves.staleness(run)]),
            section("lengths", "Lengths", _lengths(run, found, table)),
            section("tokens", "Where the tokens went", [*totals.tokens(run), *head.errors(run)]),
            section("sync", "Weight syncs", [curves.syncs(run)]),
            section("samples", "Samples", [{"type": "browser"} if len(table) else text(without)]),
        ],
    }, table


def _spans(run: RunReader) -> Spans:
    # A trace has millions of small objects. The collector would look at them again and again.
    on, n = gc.isenabled(), run.key("rollout.n")
    gc.disable()
    try:
        return columns(spans.read(run.path), n if isinstance(n, int) else 0)
    finally:
        if on:
            gc.enable()


def _lengths(run: RunReader, found: Spans, table: Table) -> list[dict[str, Any]]:
    """The samples lack those that an error dropped. The trace of a fast run has some samples only."""
    whole = found.every() == 1
    if len(found.lengths) and (whole or not len(table)):
        tokens, trained = found.lengths.T
        source = "all that ended, also dropped ones and those in flight" if whole else ""
        chart = curves.lengths(tokens, tokens[trained == 1], source)
    elif len(table):
        source = "all that RUN/samples/ has, also those that dynamic sampling dropped"
        chart = curves.lengths(table.tokens, table.tokens[table.trained], source)
    else:
        why = "the folder has no trace/ and no samples/."
        chart = missing("lengths of all finished responses", why)
    return [chart, curves.length_curves(run)]


def page_of(runs: list[RunReader], live: bool = False) -> str:
    """Return the page of a run, with as many samples as fit, or of the comparison of several."""
    page, table = of_run(runs[0], live) if len(runs) == 1 else (compare.of_runs(runs), None)
    parts = {"plotly": _plotly(), "page": _packed(msgspec.json.encode(page))}
    shell = _shell(page["title"], parts | {"samples": ""})
    if table is None:
        return shell
    room = LIMIT - len(shell.encode()) - 1000
    return _shell(page["title"], parts | {"samples": _packed_samples(table, room)})


def _packed_samples(table: Table, room: int) -> str:
    """Return the chosen samples, packed, as many as fit into `room` bytes."""
    found = list(read_texts(table, choose(table)).values())
    texts = [msgspec.json.encode(sample) for sample in found]
    total = count(table)
    # Text becomes at most this much smaller. So more than this cannot fit.
    kept = bisect_right(list(itertools.accumulate(map(len, texts))), _DENSEST * room)
    while True:
        order = sorted(range(kept), key=lambda i: (found[i]["version"], found[i]["id"]))
        shown = b",".join(texts[i] for i in order)
        packed = _packed(b'{"total":%d,"samples":[%b]}' % (total, shown), 6)
        if len(packed) <= room or not kept:
            return packed
        kept = min(kept - 1, int(kept * room / len(packed) * 0.97))


def _packed(data: bytes, level: int = 9) -> str:
    return base64.b64encode(gzip.compress(data, level, mtime=0)).decode()


@cache  # a live report is written again and again
def _plotly() -> str:
    from plotly.offline import get_plotlyjs

    return _packed(get_plotlyjs().encode())


def _shell(title: str, parts: dict[str, str]) -> str:
    """Return the HTML around the parts. Nothing but the title comes from a run."""
    web = resources.files("millrace.report.page") / "web"
    data = "".join(
        f'<script type="application/octet-stream" id="data-{name}">{packed}</script>\n'
        for name, packed in parts.items()
    )
    scripts = [(web / name).read_text() for name in ("page.js", "charts.js", "browser.js")]
    return Template((web / "page.html").read_text()).substitute(
        mark=MARK,
        title=html.escape(title),
        nonce=secrets.token_urlsafe(16),
        style=(web / "page.css").read_text(),
        data=data,
        script="\n".join(scripts),
    )
