"""The process that renders chat templates: a template of a model folder is a stranger's program.

Jinja's sandbox keeps it from the objects of Python. This process bounds its time and its memory, and
it has no variable of the user. It runs as a script, so that it loads nothing but Jinja.
"""

from __future__ import annotations

import contextlib
import json
import resource
import signal
import socket
import struct
import sys
from datetime import datetime
from typing import Any

SIZE = struct.Struct("!Q")
SECONDS, MEMORY = 2.0, 2**30
"""Seconds of a processor for one text, and bytes of memory for all."""
_SPARE = 2**20
_GROWTH = 16
_REFUSALS = (
    ArithmeticError,
    AttributeError,
    LookupError,
    SyntaxError,
    TypeError,
    ValueError,
)


def most_text(request: int) -> int:
    """Return how many characters a template may make of a request of as many bytes."""
    return _SPARE + _GROWTH * request


def receive(connection: socket.socket) -> bytes:
    """Return the next frame. Raise EOFError if the other end has closed."""
    (size,) = SIZE.unpack(_exactly(connection, SIZE.size))
    return _exactly(connection, size)


def send(connection: socket.socket, frame: bytes) -> None:
    connection.sendall(SIZE.pack(len(frame)) + frame)


def _exactly(connection: socket.socket, size: int) -> bytes:
    got = bytearray()
    while len(got) < size:
        piece = connection.recv(min(size - len(got), 2**20))
        if not piece:
            raise EOFError
        got += piece
    return bytes(got)


def environment() -> Any:
    """Return Jinja's sandbox with what transformers gives to chat templates."""
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """A block that marks an answer. Its text stays as it is."""

        tags = {"generation"}  # noqa: RUF012 - Jinja reads it

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    def refuse(message: Any) -> None:
        raise TemplateError(str(message))

    def to_json(
        value: Any,
        ensure_ascii: bool = False,
        indent: Any = None,
        separators: Any = None,
        sort_keys: bool = False,
    ) -> str:
        options = {"indent": indent, "separators": separators, "sort_keys": sort_keys}
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    made.filters["tojson"] = to_json
    made.globals["raise_exception"] = refuse
    made.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return made


def answer(jinja: Any, templates: dict[int, Any], frame: bytes) -> dict[str, str]:
    """Return the text of one request, or why there is none: `refused` or `unsafe`."""
    from jinja2 import TemplateError

    request = json.loads(frame)
    number, source = request["number"], request["source"]
    try:
        if source is not None:
            templates[number] = jinja.from_string(source)
        text = templates[number].render(**request["variables"])
    except MemoryError:
        return {"unsafe": f"it needs more than {MEMORY >> 20} MiB of memory"}
    except RecursionError:
        return {"unsafe": "it calls itself without an end, or is nested too deeply"}
    except (*_REFUSALS, TemplateError) as error:
        return {"refused": f"{error}" or type(error).__name__}
    if len(text) > (most := most_text(len(frame))):
        return {"unsafe": f"it writes {len(text)} characters, and {most} are enough"}
    return {"text": text}


def main() -> None:
    """Serve the driver's socket until it closes."""
    fd, path, seconds = sys.argv[1:]
    sys.path[:] = json.loads(path)
    connection = socket.socket(fileno=int(fd))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(ValueError, OSError):  # macOS has no such limit
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    jinja, templates = environment(), dict[int, Any]()
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            frame = receive(connection)
            # The signal ends the process also inside of one long call of C.
            signal.setitimer(signal.ITIMER_PROF, float(seconds))
            found = answer(jinja, templates, frame)
            signal.setitimer(signal.ITIMER_PROF, 0)
            send(connection, json.dumps(found).encode())


if __name__ == "__main__":
    main()
