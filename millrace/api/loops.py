"""The event loop of a run: that of the main thread, or one in a thread if another loop runs here."""

from __future__ import annotations

import asyncio
import contextvars
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, TypeVar

from millrace.data.user_code import being_imported
from millrace.errors import ConfigError, DataError, MillraceError, first_cause
from millrace.observe.progress import Progress
from millrace.run.signals import Interrupts, signal_exit_code, with_signals

T = TypeVar("T")

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_NO_HANDLERS: Mapping[int, Any] = {}
_LOOK_S = 0.2
"""Seconds between two looks of the main thread. A signal ends a look at once."""
_run = threading.Lock()
"""Held by the run of this process."""


@contextmanager
def only_run() -> Iterator[None]:
    """Be the only run of this process. Raises MillraceError for a second one."""
    if (file := being_imported()) is not None:
        raise MillraceError(
            f"{file}: importing it begins a run, and a worker imports it for a function. "
            'Fix: put the call of millrace under `if __name__ == "__main__":`'
        )
    if not _run.acquire(blocking=False):
        raise MillraceError(
            "another run of this process is under way. Fix: wait for its end, or another process"
        )
    try:
        yield
    finally:
        _run.release()


def run_to_end(
    work: Callable[[], Coroutine[Any, Any, T]],
    progress: Progress,
    request_stop: Callable[[], bool],
) -> T:
    """Run `work` to its end. A first Ctrl-C asks it to save and end.

    In the main thread, a signal does what it does to a command. If an event loop runs here, as in a
    notebook, `work` gets a thread, and this one waits.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        if threading.current_thread() is threading.main_thread():
            with _own_handlers():
                return unwrapped(lambda: asyncio.run(with_signals(work(), progress, request_stop)))
        lonely = Interrupts()
        return unwrapped(lambda: asyncio.run(with_signals(work(), progress, request_stop, lonely)))
    interrupts = Interrupts()
    ended = in_thread(
        lambda: asyncio.run(with_signals(work(), progress, request_stop, interrupts)), "run"
    )
    return unwrapped(lambda: wait_for(ended, interrupts.interrupt))


def in_thread(work: Callable[[], T], name: str) -> Future[T]:
    """Run `work` in a thread, with the context of this one. Return its result to come."""
    ended: Future[T] = Future()
    context = contextvars.copy_context()

    def body() -> None:
        try:
            ended.set_result(context.run(work))
        except BaseException as error:  # noqa: BLE001 - it is raised where the result is awaited
            ended.set_exception(error)

    threading.Thread(target=body, name=f"millrace {name}", daemon=True).start()
    return ended


def wait_for(ended: Future[T], interrupt: Callable[[], object]) -> T:
    """Wait for a result. Each Ctrl-C calls `interrupt`, and the wait goes on."""
    # A loop that runs in the main thread would keep Ctrl-C until this wait is over.
    with _own_handlers({signal.SIGINT: signal.default_int_handler}):
        while True:
            try:
                return ended.result(_LOOK_S)
            except TimeoutError:
                if ended.done():
                    raise
            except KeyboardInterrupt:
                if ended.done():
                    raise
                interrupt()


def end_if_stopped(complete: bool, text: str) -> None:
    """Raise what the signal would have raised that stopped a run, now that it has saved."""
    code = signal_exit_code()
    if not complete and code is not None:
        raise KeyboardInterrupt(text) if code == 128 + signal.SIGINT else SystemExit(code)


def unwrapped(run: Callable[[], T]) -> T:
    """Return what `run` returns, and raise the first cause of an error. A signal's is its own."""
    try:
        return run()
    except BaseException as error:
        cause = first_cause(error)
        if isinstance(cause, asyncio.CancelledError):
            end_if_stopped(False, "stopped before a checkpoint was written")
        if isinstance(cause, ConfigError | DataError):  # the text says all that the user needs
            raise cause.with_traceback(None) from None
        if cause is error:
            raise
        raise cause from cause.__cause__


@contextmanager
def _own_handlers(handlers: Mapping[int, Any] = _NO_HANDLERS) -> Iterator[None]:
    """Set signal handlers, and restore the program's own ones. Only the main thread has any."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    try:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        yield
    finally:
        for number, handler in before.items():
            if handler is not None:
                signal.signal(number, handler)
