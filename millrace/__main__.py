"""The `millrace` command, also as `python -m millrace`."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from contextlib import suppress

_code: int | None = None
"""The exit code of the command, once it has ended."""


def main() -> None:
    """Run the command line. Ctrl-C also ends it in order while it is still imported."""
    global _code
    atexit.register(end_at_once)  # the first one runs last
    try:
        from millrace.cli.main import main as command
    except KeyboardInterrupt:
        sys.stderr.write("error: stopped by Ctrl-C\n")
        sys.exit(130)
    try:
        command()
    except SystemExit as ended:
        _code = ended.code if isinstance(ended.code, int) else int(bool(ended.code))
        raise


def end_at_once() -> None:
    """End the process without Python's end if a daemon thread works, such as one on the report.

    Python would end that thread by force. In C++ or Rust, such as pyarrow and pydantic, this aborts
    the process.
    """
    if _code is not None and any(thread.daemon for thread in threading.enumerate()):
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(_code)


if __name__ == "__main__":
    main()
