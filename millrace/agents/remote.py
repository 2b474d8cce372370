"""Agent programs elsewhere: workers claim episodes at the endpoint, and send their rewards.

| route | body | answer |
|---|---|---|
| POST /episodes/claim | {"wait_s": 20} | {"episode", "task", "base_url", "api_key", "lease_s"}; "episode" is null if there is none |
| POST /episodes/heartbeat | {"api_key"} | {"ok": true} |
| POST /episodes/finish | {"api_key", "reward"} or {"api_key", "error"} | {"ok": true} |

Each request has the run's token as its bearer. A worker that is silent for `lease_s` loses its
episode: later calls are refused, and the episode begins again elsewhere. Requests to the policy are
signs of life too, so a worker without slow tools needs no heartbeat.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import os
import secrets
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from millrace.agents.programs import Program, Task, reward_in
from millrace.agents.request import RequestError, wrong
from millrace.agents.wire import Body, bearer_of
from millrace.errors import EpisodeError
from millrace.process.files import replace_file

TOKEN_VARIABLE = "MILLRACE_AGENT_TOKEN"
FILE = "agents.json"
"""RUN/agents.json has the address and the token. Only the user may read it."""
_MOST_WAIT_S = 30.0


@dataclass(slots=True, eq=False)
class _Episode:
    task: Task
    result: asyncio.Future[Body]
    signed_at: float | None = None
    """The time of the last sign of life at the routes of claims. None while it waits."""

    @property
    def quiet_s(self) -> float:
        """Return the seconds since the last sign of life, here or by a request to the policy."""
        if self.signed_at is None:
            return 0.0
        return min(self.task.quiet_s(), asyncio.get_running_loop().time() - self.signed_at)


class RemoteProgram(Program):
    """The episodes that wait for workers, and those that are leased."""

    def __init__(self, lease_s: float) -> None:
        self.token = os.environ.get(TOKEN_VARIABLE) or secrets.token_hex(16)
        self._lease_s = lease_s
        self._waiting: deque[_Episode] = deque()
        self._leased: dict[str, _Episode] = {}
        self._more = asyncio.Event()
        self._file: Path | None = None

    def publish(self, folder: Path, url: str) -> Path:
        """Write the address and the token for workers, and return the file."""
        self._file = folder / FILE
        address = json.dumps({"url": url, "token": self.token})
        replace_file(self._file, f"{address}\n", private=True)
        return self._file

    async def run(self, task: Task) -> Any:
        episode = _Episode(task, asyncio.get_running_loop().create_future())
        self._waiting.append(episode)
        self._more.set()
        try:
            while not episode.result.done():
                left_s = self._lease_s - episode.quiet_s
                if left_s <= 0:
                    text = f"{task.name}: its worker was silent for {self._lease_s:g} s"
                    raise EpisodeError("agent_lost", text)
                await asyncio.wait({episode.result}, timeout=left_s)
            return reward_in(episode.result.result(), task.name)
        finally:
            self._leased.pop(task.key, None)
            with suppress(ValueError):
                self._waiting.remove(episode)

    async def close(self) -> None:
        """End what still waits, and remove the file: its token is of no use any more."""
        if self._file is not None:
            self._file.unlink(missing_ok=True)
        for episode in (*self._waiting, *self._leased.values()):
            if not episode.result.done():
                episode.result.set_exception(EpisodeError("agent_lost", "the run ends"))

    def authorise(self, headers: Mapping[str, str]) -> None:
        given = bearer_of(headers).encode("utf-8", "replace")
        if not hmac.compare_digest(given, self.token.encode()):
            raise RequestError("the token is not valid", status=401, code="invalid_token")

    async def answer(self, route: str, body: Body, headers: Mapping[str, str]) -> Body:
        if route == "/episodes/claim":
            return await self._claim(body, headers)
        if route not in ("/episodes/heartbeat", "/episodes/finish"):
            raise RequestError("no such route", status=404, code="not_found")
        episode = self._of(body.get("api_key"))
        episode.signed_at = asyncio.get_running_loop().time()
        if route == "/episodes/finish":
            del body["api_key"]
            self._leased.pop(episode.task.key)
            if not episode.result.done():
                episode.result.set_result(body)
        return {"ok": True}

    async def _claim(self, body: Body, headers: Mapping[str, str]) -> Body:
        wait_s = body.get("wait_s", 20.0)
        if not isinstance(wait_s, int | float) or isinstance(wait_s, bool) or wait_s < 0:
            raise wrong("wait_s", wait_s, "must be seconds")
        with suppress(TimeoutError):
            async with asyncio.timeout(min(wait_s, _MOST_WAIT_S)):
                while not self._waiting:
                    self._more.clear()
                    await self._more.wait()
        if not self._waiting:
            return {"episode": None}
        episode = self._waiting.popleft()
        self._leased[episode.task.key] = episode
        episode.task.begin()
        episode.signed_at = asyncio.get_running_loop().time()
        return {
            "episode": episode.task.name,
            "task": episode.task.data,
            "base_url": f"http://{headers.get('host', '')}/v1",
            "api_key": episode.task.key,
            "lease_s": self._lease_s,
        }

    def settle(self, answer: Body, delivered: bool) -> None:
        """Take back an episode whose claim no worker received."""
        episode = None if delivered else self._leased.pop(answer.get("api_key", ""), None)
        if episode is not None:
            episode.signed_at = None
            self._waiting.appendleft(episode)
            self._more.set()

    def _of(self, key: Any) -> _Episode:
        if not isinstance(key, str):
            raise wrong("api_key", key, "must be the key that the claim gave")
        if (episode := self._leased.get(key)) is None:
            raise RequestError(
                "the lease is over: another worker has the episode", code="lease_over"
            )
        return episode
