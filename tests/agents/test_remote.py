"""Workers elsewhere: claims, leases, and workers that die, come twice or have no token."""

from __future__ import annotations

import asyncio
import json
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import aiohttp
import pytest

from millrace.agents.endpoint import Endpoint
from millrace.agents.remote import FILE, TOKEN_VARIABLE, RemoteProgram
from millrace.agents.service import Service
from millrace.errors import EpisodeError
from millrace.rollout.session import Limits
from millrace.simulate import clock
from tests.agents.programs_at_work import Table, plays, table
from tests.agents.talks import options
from tests.waiting import HANG_S

WORKER = (Path(__file__).parents[2] / "examples" / "agents" / "worker.py").read_text()
for line, instead in (
    ("wait_s=20", "wait_s=1"),
    ('float(said == task["ground_truth"])', 'task["extra"]'),
    ("    task, key", "    if sys.argv[2:]:\n        signal.raise_signal(9)\n    task, key"),
    ("import json\n", "import json\nimport signal\n"),
):
    assert line in WORKER
    WORKER = WORKER.replace(line, instead)


class Remote:
    """A table with a remote program, and requests to its claims."""

    def __init__(self, at: Table, program: RemoteProgram, session: aiohttp.ClientSession) -> None:
        self.at, self.program, self.session = at, program, session

    async def post(self, route: str, token: str = "", **body: Any) -> tuple[int, Any]:
        head = {"authorization": f"Bearer {token or self.program.token}"}
        url = f"{self.at.endpoint.url}{route}"
        async with self.session.post(url, json=body, headers=head) as answer:
            return answer.status, await answer.json()

    async def claim(self) -> dict[str, Any]:
        status, claim = await self.post("/episodes/claim", wait_s=30)
        assert status == 200 and claim["episode"]
        return dict(claim)

    async def ask(self, claim: dict[str, Any]) -> int:
        said = [{"role": "user", "content": "hello"}]
        status, _ = await self.post("/v1/chat/completions", claim["api_key"], messages=said)
        return status


class Called(Remote):
    """The same without a socket."""

    def __init__(self, at: Table, program: RemoteProgram) -> None:
        super().__init__(at, program, cast(aiohttp.ClientSession, None))

    async def post(self, route: str, token: str = "", **body: Any) -> tuple[int, Any]:
        head = {"authorization": f"Bearer {token or self.program.token}"}
        sent = json.dumps(body).encode()
        answer = await self.at.service.handle("POST", route, head, sent)
        answer.settle(True)
        return answer.status, json.loads(answer.body)


def remote(folder: Path, check: Callable[[Remote], Any]) -> None:
    """Play with a remote program whose leases do not end."""

    async def work() -> None:
        made = RemoteProgram(HANG_S)

        def make(service: Service, endpoint: Endpoint) -> RemoteProgram:
            service.claims = made
            made.publish(folder, endpoint.url)
            return made

        async with table(make) as at, aiohttp.ClientSession() as session:
            await check(Remote(at, made, session))
        assert not (folder / FILE).exists()

    plays(work, folder)


def leased(check: Callable[[Remote], Any], lease_s: float) -> None:
    """Play with a remote program on the virtual clock, without sockets."""
    service, program = Service(options()), RemoteProgram(lease_s)
    service.claims = program
    at = Table(program, service, Endpoint(service, "127.0.0.1", 0), Limits(max_len=4000))
    clock.run(check(Called(at, program)))


def worker(folder: Path, *more: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-S", "-c", WORKER, str(folder / FILE), *more]
    return subprocess.Popen(command)


def test_a_worker_of_twenty_lines_plays_the_episodes(tmp_path: Path) -> None:
    async def check(at: Remote) -> None:
        assert stat.S_IMODE((tmp_path / FILE).stat().st_mode) == 0o600
        workers = [worker(tmp_path) for _ in range(2)]
        many = await asyncio.gather(*(at.at.play(k) for k in range(6)))
        assert [done.score and done.score.value for done in many] == [0, 1, 2, 3, 4, 5]
        assert [await asyncio.to_thread(one.wait) for one in workers] == [0, 0]

    remote(tmp_path, check)


def test_a_worker_may_die_with_an_episode(tmp_path: Path) -> None:
    async def check(at: Remote) -> None:
        playing = asyncio.create_task(at.at.play(3, retries=1))
        dead = worker(tmp_path, "dies")
        assert await asyncio.to_thread(dead.wait) == -9
        (lost,) = at.program._leased.values()
        lost.result.set_exception(EpisodeError("agent_lost", "as after the lease"))
        living = worker(tmp_path)
        done = await playing
        assert done.score is not None and done.score.value == 3 and done.counts["retries"] == 1
        assert await asyncio.to_thread(living.wait) == 0

    remote(tmp_path, check)


def test_a_silent_worker_loses_its_episode_to_another() -> None:
    async def check(at: Remote) -> None:
        playing = asyncio.create_task(at.at.play(3, retries=1))
        first = await at.claim()
        second = await at.claim()
        assert first["episode"] == second["episode"] and first["api_key"] != second["api_key"]
        await at.ask(second)
        await at.post("/episodes/finish", api_key=second["api_key"], reward=3)
        done = await playing
        assert done.score is not None and done.score.value == 3 and done.counts["retries"] == 1

    leased(check, 4.0)


def test_a_lost_lease_is_an_error_and_its_key_is_dead() -> None:
    async def check(at: Remote) -> None:
        failing = asyncio.create_task(at.at.fails())
        claim = await at.claim()
        assert await at.ask(claim) == 200
        assert (await failing).startswith("agent_lost: 0/0")
        assert await at.ask(claim) == 400
        status, body = await at.post("/episodes/finish", api_key=claim["api_key"], reward=1)
        assert status == 400 and body["error"]["code"] == "lease_over"

    leased(check, 4.0)


def test_requests_and_heartbeats_keep_a_lease() -> None:
    async def check(at: Remote) -> None:
        playing = asyncio.create_task(at.at.play())
        claim = await at.claim()
        for _ in range(3):  # 24 s in all, and the lease is 5 s
            await asyncio.sleep(4.0)
            assert await at.ask(claim) == 200
            await asyncio.sleep(4.0)
            status, _ = await at.post("/episodes/heartbeat", api_key=claim["api_key"])
            assert status == 200
        await at.post("/episodes/finish", api_key=claim["api_key"], reward=1)
        assert (await playing).ended == "done"

    leased(check, 5.0)


def test_a_slow_turn_does_not_end_the_lease() -> None:
    async def check(at: Remote) -> None:
        async def slow(*given: Any) -> Any:
            await asyncio.sleep(10.0)
            return await at.at.engine.draw(*given)

        at.at.draw = slow
        playing = asyncio.create_task(at.at.play())
        claim = await at.claim()
        assert await at.ask(claim) == 200
        await at.post("/episodes/finish", api_key=claim["api_key"], reward=1)
        assert (await playing).ended == "done"

    leased(check, 4.0)


def test_the_second_end_of_an_episode_is_refused(tmp_path: Path) -> None:
    async def check(at: Remote) -> None:
        playing = asyncio.create_task(at.at.play())
        claim = await at.claim()
        await at.ask(claim)
        answers = await asyncio.gather(
            *(at.post("/episodes/finish", api_key=claim["api_key"], reward=k) for k in (1, 2))
        )
        assert sorted(status for status, _ in answers) == [200, 400]
        done = await playing
        assert done.score is not None and done.score.value in (1, 2)

    remote(tmp_path, check)


ENDS = {
    "error": ({"error": "it broke"}, "agent_raised: 0/0: it broke"),
    "nan": ({"reward": "NaN"}, "bad_reward"),
    "no reward": ({}, "no_reward"),
}


@pytest.mark.parametrize("kind", ENDS)
def test_each_failure_has_a_reason(tmp_path: Path, kind: str) -> None:
    body, wanted = ENDS[kind]

    async def check(at: Remote) -> None:
        failing = asyncio.create_task(at.at.fails())
        claim = await at.claim()
        await at.ask(claim)
        status, _ = await at.post("/episodes/finish", api_key=claim["api_key"], **body)
        assert status == 200 and wanted in await failing

    remote(tmp_path, check)


def test_no_token_opens_anything_but_its_own(tmp_path: Path) -> None:
    async def check(at: Remote) -> None:
        playing = asyncio.create_task(at.at.play())
        claim = await at.claim()
        for route in ("claim", "heartbeat", "finish", "other"):
            for token in ("x", claim["api_key"], at.program.token[:-1]):
                status, body = await at.post(f"/episodes/{route}", token, api_key=claim["api_key"])
                assert status == 401 and body["error"]["code"] == "invalid_token"
        # The run's token is no key of an episode.
        assert await at.ask({"api_key": at.program.token}) == 401
        assert (await at.post("/episodes/other"))[0] == 404
        assert (await at.post("/episodes/finish", api_key=5))[0] == 400
        assert (await at.post("/episodes/claim", wait_s="long"))[0] == 400
        await at.ask(claim)
        await at.post("/episodes/finish", api_key=claim["api_key"], reward=1)
        assert (await playing).ended == "done"

    remote(tmp_path, check)


def test_a_claim_without_work_ends_and_a_closed_claim_takes_nothing(tmp_path: Path) -> None:
    async def check(at: Remote) -> None:
        assert await at.post("/episodes/claim", wait_s=0.05) == (200, {"episode": None})
        began, ended, answer = asyncio.Event(), asyncio.Event(), at.program.answer

        async def watched(*given: Any) -> Any:
            began.set()
            try:
                return await answer(*given)
            finally:
                ended.set()

        at.program.answer = watched  # type: ignore[method-assign, assignment]
        gone = asyncio.create_task(at.claim())
        await began.wait()
        gone.cancel()
        await ended.wait()
        playing = asyncio.create_task(at.at.play())
        claim = await at.claim()
        await at.ask(claim)
        await at.post("/episodes/finish", api_key=claim["api_key"], reward=1)
        assert (await playing).ended == "done"

    remote(tmp_path, check)


def test_the_end_of_a_run_ends_what_waits_and_what_is_leased(tmp_path: Path) -> None:
    async def check(at: Remote) -> None:
        failing = [asyncio.create_task(at.at.fails(k)) for k in range(2)]
        await at.claim()
        await at.program.close()
        assert all("agent_lost: the run ends" in text for text in await asyncio.gather(*failing))

    remote(tmp_path, check)


def test_the_token_can_be_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, "mine")
    assert RemoteProgram(1.0).token == "mine"
    monkeypatch.delenv(TOKEN_VARIABLE)
    assert len({RemoteProgram(1.0).token for _ in range(3)}) == 3


def test_a_claim_that_no_worker_received_is_claimed_again_at_once(tmp_path: Path) -> None:
    async def check(r: Remote) -> None:
        begun = asyncio.ensure_future(r.at.play())
        await asyncio.sleep(0)
        head = {"authorization": f"Bearer {r.program.token}"}
        lost = await r.at.endpoint.service.handle(
            "POST", "/episodes/claim", head, b'{"wait_s": 30}'
        )
        lost.settle(False)
        claim = await r.claim()
        assert await r.ask(claim) == 200
        await r.post("/episodes/finish", api_key=claim["api_key"], reward=0.5)
        done = await begun
        assert done.score is not None and done.score.value == 0.5

    remote(tmp_path, check)
