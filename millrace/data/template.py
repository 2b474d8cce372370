"""Chat templates, rendered where a hostile one does no harm: see template_host.py."""

from __future__ import annotations

import atexit
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from millrace.data import template_host
from millrace.data.template_host import SECONDS, receive, send
from millrace.data.tokenizer import TEMPLATES
from millrace.errors import bad_value

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_LONGEST_S = 120.0
"""Seconds of the clock for one text. A busy machine needs more of them than of a processor."""
_PASSED = ("LD_LIBRARY_PATH", "TZ")


class Refused(Exception):
    """A template raised: it does not support these messages."""


def source(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Return the chat template's text. It is None if there is none, and "" if it is code."""
    if _is_code(tokenizer):
        return ""
    try:
        return str(tokenizer.get_chat_template(None, None))
    except ValueError:
        return None


def _is_code(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the tokenizer's class renders messages itself."""
    from transformers import PreTrainedTokenizerBase

    return type(tokenizer).apply_chat_template is not PreTrainedTokenizerBase.apply_chat_template


def render(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] = (),
    *,
    head: bool,
    options: Mapping[str, Any] | None = None,
) -> str:
    """Return the chat template's text. With `head`, it ends with the head of the next answer.

    Raise Refused if the template raises, and ConfigError if it goes beyond a limit.
    """
    try:
        source = tokenizer.get_chat_template(None, [dict(t) for t in tools] or None)
    except ValueError as error:
        raise Refused(f"{error}") from error
    settings = dict(options or {})
    if _is_code(tokenizer) or source in TEMPLATES:  # code of a library, or a template of millrace
        return _here(tokenizer, messages, tools, settings | {"add_generation_prompt": head})
    variables = {
        **tokenizer.special_tokens_map,
        "messages": messages,
        "tools": list(tools) or None,
        "documents": None,
        "add_generation_prompt": head,
        **settings,
    }
    try:
        found = _host(source, variables)
    except (TypeError, ValueError, RecursionError) as error:
        raise Refused(f"a message is no JSON: {error}") from error
    if "refused" in found:
        raise Refused(found["refused"])
    if "unsafe" in found:
        fix = "a chat template that you trust, in the model folder"
        raise bad_value("chat_template", tokenizer.name_or_path, f"stopped: {found['unsafe']}", fix)
    return found["text"]


def _here(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]],
    options: dict[str, Any],
) -> str:
    from jinja2 import TemplateError

    try:
        text: Any = tokenizer.apply_chat_template(
            list(messages),  # type: ignore[arg-type]  # a mapping is what it reads
            tools=list(tools) or None,  # type: ignore[arg-type]
            tokenize=False,
            **options,
        )
    except (TemplateError, TypeError, LookupError, AttributeError, ValueError) as error:
        raise Refused(f"{error}") from error
    return str(text)


class _Host:
    """The process that renders, started when it is needed. All threads share it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self._code = 0
        self._numbers: dict[str, int] = {}
        """The templates that the process has."""

    def __call__(self, source: str, variables: Mapping[str, Any]) -> dict[str, str]:
        with self._lock:
            found = self._ask(source, variables)
            if found is None and self._code != -signal.SIGPROF:
                found = self._ask(source, variables)  # perhaps a signal to all processes ended it
            return found or {"unsafe": self._how_it_ended(self._code)}

    def _ask(self, source: str, variables: Mapping[str, Any]) -> dict[str, str] | None:
        """Return the answer of the process. None if it gave none. Then it has ended."""
        if self._connection is None:
            self._start()
        assert self._connection is not None
        new = source not in self._numbers
        number = self._numbers.get(source, len(self._numbers))
        request = {"number": number, "source": source if new else None, "variables": variables}
        frame = json.dumps(request).encode()
        found: dict[str, str] | None = None
        try:
            with suppress(EOFError, OSError):
                send(self._connection, frame)
                found = json.loads(receive(self._connection))
        finally:  # After an interruption, the next request would read this answer.
            if found is None or "unsafe" in found:
                self._end()  # in the second case its memory may be full
        if new and found and "text" in found:
            self._numbers[source] = number
        return found

    def _start(self) -> None:
        self._connection, its = socket.socketpair()
        self._connection.settimeout(_LONGEST_S)
        with its:
            file, fd = template_host.__file__, its.fileno()
            paths = [str(path) for path in sys.path]
            self._process = subprocess.Popen(
                [sys.executable, "-I", file, str(fd), json.dumps(paths), str(SECONDS)],
                pass_fds=[fd],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={name: os.environ[name] for name in _PASSED if name in os.environ},
                start_new_session=True,
            )

    @staticmethod
    def _how_it_ended(code: int) -> str:
        if code == -signal.SIGPROF:
            return f"it needs more than {SECONDS:g} s of a processor for one text"
        if code == -signal.SIGKILL:
            return f"it needs more than {_LONGEST_S:g} s for one text, or too much memory"
        return f"its process ended with exit code {code}"

    def _end(self) -> None:
        """End the process, and note its exit code."""
        process, connection = self._process, self._connection
        self._process = self._connection = None
        self._numbers.clear()
        if connection is not None:
            connection.close()
        if process is not None:
            try:
                self._code = process.wait(timeout=1)
            except subprocess.TimeoutExpired:
                process.kill()
                self._code = process.wait()

    def forget(self) -> None:
        """Leave the process to the parent. A fork would read the parent's answers."""
        connection = self._connection
        self.__init__()  # type: ignore[misc]  # another thread of the parent may hold the lock
        if connection is not None:
            connection.close()

    def close(self) -> None:
        with self._lock:
            self._end()


_host = _Host()
atexit.register(_host.close)
os.register_at_fork(after_in_child=_host.forget)
