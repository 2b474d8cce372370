"""Starting vLLM, and the reason where it does not start: its core tells that to the log alone, and then may not end.

What keeps a failed core is the end of its interpreter: sockets with unsent messages are closed there, without a limit of time.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import stat
import threading
from typing import Any

import psutil
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.engine.async_llm import AsyncLLM

from millrace.config.vllm_checks import HOST_PID
from millrace.errors import WorkerError

_STDERR = "/proc/self/fd/2"
_FAILED = "EngineCore failed to start."
_ERROR = re.compile(r"\b((?:[A-Za-z_]+\.)*[A-Z]\w*(?:Error|Exception): (?!Engine core init).+)")
_LOOK_S = 1.0
_GRACE_S = 5.0
"""For a failed core to end by itself."""
_HEED_S = 2.0


def start(arguments: dict[str, Any]) -> AsyncLLM:
    """Raises WorkerError with what vLLM's processes last called an error."""
    os.environ[HOST_PID] = str(os.getpid())
    log, over = _Log(), threading.Event()
    threading.Thread(target=_end_failed_core, args=(log, over), name="start", daemon=True).start()
    try:
        return AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
    except RuntimeError as error:  # a core's end, without its cause
        raise WorkerError(f"vLLM did not start: {log.last_error() or error}") from error
    finally:
        over.set()


async def stop(llm: AsyncLLM) -> None:
    """End vLLM's processes. Its core ignores SIGTERM, and heeds vLLM's own from here on."""
    with contextlib.suppress(Exception):  # a core that is dead or hangs is killed below
        async with asyncio.timeout(_HEED_S):
            await llm.engine_core.call_utility_async("heed_signals")
    llm.shutdown()


class _Log:
    """What this process and those that it starts write to stderr from now on, if that is a file; else nothing."""

    def __init__(self) -> None:
        there = stat.S_ISREG(os.fstat(2).st_mode) and os.path.exists(_STDERR)
        self._start = os.fstat(2).st_size if there else None

    def text(self) -> str:
        if self._start is None:
            return ""
        with open(_STDERR, "rb") as log:
            log.seek(self._start)
            return log.read().decode(errors="replace")

    def last_error(self) -> str:
        return next(
            (
                found[1]
                for line in reversed(self.text().splitlines())
                if (found := _ERROR.search(line))
            ),
            "",
        )


def _end_failed_core(log: _Log, over: threading.Event) -> None:
    """Kill the processes that were started here once a core says that it failed, so that vLLM sees it end."""
    me = psutil.Process()
    before = set(me.children())
    while not over.wait(_LOOK_S):
        if _FAILED in log.text() and not over.wait(_GRACE_S):
            for child in set(me.children()) - before:
                with contextlib.suppress(psutil.Error):  # it ended meanwhile
                    if "resource_tracker" not in " ".join(child.cmdline()):
                        child.kill()
            return
