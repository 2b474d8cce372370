"""`millrace serve`: who gets the page, and how often the report is made."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest

from millrace.errors import ConfigError
from millrace.persist.run_reader import RunReader
from millrace.report.advice import advise
from millrace.report.live import serve as server
from tests.listening import listeners, other_addresses, outside, reachable
from tests.report.folders import Run
from tests.waiting import HANG_S, until

TOKEN = "the-right-token"


class Server:
    """A server in a thread, with a renderer that counts."""

    def __init__(self, folder: Path) -> None:
        self.made: list[str] = []
        self.at_once = self.most_at_once = 0
        self.seconds = 0.05
        self.fails = False
        self.pages = server.Pages(folder, self.render)
        self._socket = server.listen(0)
        self.port = self._socket.getsockname()[1]
        self._server = server.server_of(server.make_app(self.pages, TOKEN))
        self._thread = threading.Thread(target=self._server.run, args=([self._socket],))
        self._thread.start()
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=HANG_S)

    def render(self, folder: Path) -> str:
        if self.fails:
            raise ValueError("<script>")
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        time.sleep(self.seconds)
        self.made.append((folder / "metrics.jsonl").read_text())
        self.at_once -= 1
        return f"<!doctype html><title>run</title>report {len(self.made)}"

    def close(self) -> None:
        self.client.close()
        self._server.should_exit = True
        self._thread.join()
        self._socket.close()


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    made = Run(tmp_path / "run")
    made.version(1)
    yield made
    made.close()


@pytest.fixture
def site(run: Run) -> Iterator[Server]:
    made = Server(run.path)
    yield made
    made.close()


def test_the_page_has_a_frame_the_report_and_the_live_figures(site: Server) -> None:
    frame = site.client.get(f"/{TOKEN}")
    assert frame.status_code == 200 and f'src="/{TOKEN}/report"' in frame.text
    assert "NONCE" not in frame.text
    assert site.client.get(f"/{TOKEN}/", follow_redirects=True).status_code == 200
    report = site.client.get(f"/{TOKEN}/report")
    assert report.status_code == 200 and report.text.endswith("report 1")
    state = site.client.get(f"/{TOKEN}/state").json()
    assert state["report"] == 1 and not state["ended"]
    assert "version 1 of 80" in state["line"]


@pytest.mark.parametrize(
    "path",
    [
        *(
            "/",
            "/wrong",
            "/wrong/report",
            "/wrong/state",
            "//report",
            f"/{TOKEN}x",
            f"/{TOKEN[:-1]}",
        ),
        *(f"/?token={TOKEN}", f"/x/{TOKEN}", "/docs", "/openapi.json", "/t\u00f6ken", "/%00"),
    ],
)
def test_without_the_token_there_is_nothing(site: Server, path: str) -> None:
    for method in ("GET", "HEAD", "POST", "DELETE", "OPTIONS"):
        answer = site.client.request(method, path)
        assert (answer.status_code, answer.text) == (403, "")
    assert not site.made


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "", "10.0.0.1", "[::2]:1"]
)
def test_a_page_of_another_name_is_refused(site: Server, host: str) -> None:
    for path in ("", "/report", "/state"):
        answer = site.client.get(f"/{TOKEN}{path}", headers={"Host": host})
        assert answer.status_code == 403 or (not host and answer.status_code == 400)
        assert "report" not in answer.text


@pytest.mark.parametrize(
    "host", ["localhost:9000", "127.0.0.1", "LOCALHOST", "[::1]:8000", "[::1]"]
)
def test_the_other_end_of_a_tunnel_is_let_in(site: Server, host: str) -> None:
    assert site.client.get(f"/{TOKEN}", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE"])
def test_nothing_can_be_written(site: Server, method: str) -> None:
    assert site.client.request(method, f"/{TOKEN}/report", content="x").status_code == 405
    assert not site.made


def test_a_head_has_the_headers_alone(site: Server) -> None:
    for path in ("", "/report", "/state"):
        answer = site.client.head(f"/{TOKEN}{path}")
        assert answer.status_code == 200 and not answer.content
        assert int(answer.headers["content-length"]) > 0


@pytest.mark.parametrize(
    "path",
    [
        *(
            "/metrics.jsonl",
            "/report/../metrics.jsonl",
            "/..",
            "/../../etc/passwd",
            "/../other-run",
        ),
        *("/%2e%2e/%2e%2e/etc/passwd", "/..%2f..%2fetc%2fpasswd", "/report/", "//etc/passwd"),
        *("/report%00", "/report/metrics.jsonl", "\\..\\..\\etc\\passwd", "/config.yaml"),
    ],
)
def test_no_path_leads_to_a_file(site: Server, path: str) -> None:
    with socket.create_connection(("127.0.0.1", site.port)) as raw:
        head = f"GET /{TOKEN}{path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
        raw.sendall(head.encode())
        answer = b"".join(iter(lambda: raw.recv(65536), b"")).decode()
    status = int(answer.split()[1])
    assert status in (403, 404, 307)
    assert "root:" not in answer and "reward/mean" not in answer and "async_training" not in answer


def test_every_answer_has_the_headers_of_a_private_page(site: Server) -> None:
    for path in ("/wrong", f"/{TOKEN}", f"/{TOKEN}/report", f"/{TOKEN}/state", f"/{TOKEN}/none"):
        headers = site.client.get(path).headers
        headers.setdefault("content-type", "")
        assert headers["cache-control"] == "no-store"
        assert headers["referrer-policy"] == "no-referrer"
        assert headers["x-content-type-options"] == "nosniff"
        framed = "SAMEORIGIN" if path.endswith("report") else "DENY"
        assert headers["x-frame-options"] == framed
        policy = headers["content-security-policy"]
        assert policy.startswith("default-src 'none'")
        if headers["content-type"].startswith("text/html"):
            framed = "'self'" if path.endswith("report") else "'none'"
            assert f"frame-ancestors {framed}" in policy
        assert "server" not in headers and "access-control-allow-origin" not in headers


def test_the_frames_script_runs_by_a_nonce_that_is_never_the_same(site: Server) -> None:
    seen = set()
    for _ in range(3):
        answer = site.client.get(f"/{TOKEN}")
        (nonce,) = set(re.findall(r'nonce="(.+?)"', answer.text))
        assert f"script-src 'nonce-{nonce}'" in answer.headers["content-security-policy"]
        seen.add(nonce)
    assert len(seen) == 3


def test_many_reloads_make_one_report(site: Server) -> None:
    site.seconds = 0.5
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda _: site.client.get(f"/{TOKEN}/report"), range(64)))
    assert {a.status_code for a in answers} == {200} and len({a.text for a in answers}) == 1
    assert len(site.made) == 1 and site.most_at_once == 1


def test_new_figures_make_a_new_report_and_old_ones_none(
    run: Run, site: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "REST", 0.0)
    site.seconds = 0.0
    advise(RunReader(run.path).read())  # advice that comes later makes a new report too
    site.client.get(f"/{TOKEN}/report")
    for _ in range(20):
        site.client.get(f"/{TOKEN}/state")
    assert len(site.made) == 1
    run.version(2)

    def shown() -> bool:
        line = site.client.get(f"/{TOKEN}/state").json()["line"]
        return '"version": 2' in site.made[-1] and "version 2 of 80" in line

    until(shown)
    assert site.most_at_once == 1


def test_a_report_that_fails_says_so_and_the_page_lives(site: Server) -> None:
    site.fails = True
    answer = site.client.get(f"/{TOKEN}/report")
    assert "The report failed. ValueError: &lt;script&gt;" in answer.text
    assert site.client.get(f"/{TOKEN}/state").status_code == 200


def test_a_port_that_is_taken_is_an_error(site: Server) -> None:
    with pytest.raises(ConfigError, match=rf"--port = {site.port}: .*Fix: --port 0"):
        server.listen(site.port)


class Command:
    """`millrace serve` as a process."""

    def __init__(self, folder: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "millrace", "serve", str(folder)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().strip()


@pytest.fixture
def command(run: Run) -> Iterator[Command]:
    made = Command(run.path)
    yield made
    made.process.kill()
    made.process.communicate()


def get(url: str) -> httpx.Response:
    """Return the answer of a server that may still start."""
    return httpx.Client(transport=httpx.HTTPTransport(retries=5), timeout=HANG_S).get(url)


def test_it_listens_on_loopback_alone(command: Command) -> None:
    assert get(command.url).status_code == 200
    found = listeners([psutil.Process(command.process.pid)])
    assert [address for address, _, _ in found] == ["127.0.0.1"] and not outside(found)
    assert not [to for to in other_addresses() if reachable(to, found[0][1])]


def test_the_token_is_new_each_time_and_in_no_other_output(command: Command, run: Run) -> None:
    other = Command(run.path)
    get(command.url)
    get(f"{command.url}/report")
    for one in (command, other):
        one.process.send_signal(signal.SIGINT)
    tokens = [one.url.rpartition("/")[2] for one in (command, other)]
    outputs = ["".join(one.process.communicate(timeout=HANG_S)) for one in (command, other)]
    assert len({*tokens}) == 2 and all(len(token) >= 32 for token in tokens)
    assert not [token for token in tokens if token in "".join(outputs)]
    assert not [path for path in run.path.rglob("*") if tokens[0] in str(path)]


def test_ctrl_c_ends_it_also_while_somebody_reads(command: Command) -> None:
    get(command.url)
    _, _, port = command.url.rpartition("/")[0].rpartition(":")
    with socket.create_connection(("127.0.0.1", int(port))) as raw:
        raw.sendall(b"GET / HTTP/1.1\r\n")  # half a request
        command.process.send_signal(signal.SIGINT)
        _, err = command.process.communicate(timeout=HANG_S)
    assert command.process.returncode == 0 and not err
