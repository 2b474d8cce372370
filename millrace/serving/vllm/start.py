"""The start and the stop of vLLM, with the reason if a start fails.

vLLM's core writes the reason only to the log, and a failed core may hang. The end of its
interpreter waits without a time limit for sockets that have unsent messages.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from pathlib import Path
from typing import Any

import psutil
import vllm.v1.engine.utils
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.model_executor.models import registry
from vllm.v1.engine.async_llm import AsyncLLM

from millrace.config.serving_checks import HOST_PID
from millrace.errors import WorkerError
from millrace.process.trees import children_of, is_tracker, kill_all
from millrace.serving.live_weights import keep_nccl_settings
from millrace.serving.log import WorkerLog
from millrace.serving.vllm.fork import context

_SHARED = "/dev/shm/psm_"
_FAILED = "EngineCore failed to start."
_POLL_S = 1.0
_GRACE_S = 5.0
"""Time limit for a failed core to end by itself, in seconds."""
_HANDLERS_S = 2.0
"""Time limit for the core to restore its signal handlers, in seconds."""
_END_S = 15.0
"""Time limit for the core to end, in seconds. It gives its own workers 9 s."""


def start(arguments: dict[str, Any]) -> AsyncLLM:
    """Start vLLM. Raise WorkerError with the last error in the log of vLLM's processes."""
    os.environ[HOST_PID] = str(os.getpid())
    keep_nccl_settings()
    os.umask(0o077)  # vLLM's sockets in /tmp carry pickles, so they are the user's alone
    # vLLM looks at the model's class in a further process, so that this one can fork.
    registry._run_in_subprocess = lambda look: look()
    if forked := context():
        vllm.v1.engine.utils.get_mp_context = lambda: forked
    log, over = WorkerLog(), threading.Event()
    threading.Thread(target=_end_failed_core, args=(log, over), name="start", daemon=True).start()
    try:
        return AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
    except RuntimeError as error:  # it says that the core ended, but not why
        raise WorkerError(f"vLLM did not start: {log.last_error() or error}") from error
    finally:
        over.set()


async def stop(llm: AsyncLLM) -> None:
    """End vLLM's processes. The core ignores SIGTERM until it restores its own handlers.

    A process that had to be killed leaves shared memory. Ray also kills the process that Python has
    for removing it.
    """
    shared = _shared_memory()
    with contextlib.suppress(Exception):  # a dead or hanging core is killed below
        async with asyncio.timeout(_HANDLERS_S):
            await llm.engine_core.call_utility_async("restore_signal_handlers")
    llm.shutdown(timeout=_END_S)
    for path in shared:
        path.unlink(missing_ok=True)


def _shared_memory() -> set[Path]:
    """Return the files of shared memory that vLLM's processes have mapped."""
    files = set()
    for process in children_of(os.getpid()):
        with contextlib.suppress(psutil.Error):  # it has ended
            files |= {Path(m.path) for m in process.memory_maps() if m.path.startswith(_SHARED)}
    return files


def _end_failed_core(log: WorkerLog, over: threading.Event) -> None:
    """Kill vLLM's processes when the log says that a core failed. vLLM then sees the core's end."""
    before = children_of(os.getpid())
    while not over.wait(_POLL_S):
        if _FAILED in log.text() and not over.wait(_GRACE_S):
            failed = [child for child in children_of(os.getpid()) if child not in before]
            kill_all(child for child in failed if not is_tracker(child))
            return
