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
    atexit.register(skip_shutdown)  # the first one runs last
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


def skip_shutdown() -> None:
    """Skip Python's shutdown if a daemon thread still works, such as one that writes the report.

    The shutdown ends such a thread by force. Inside of C++ or Rust code, such as that of pyarrow or
    pydantic, this aborts the process.
    """
    if _code is not None and any(thread.daemon for thread in threading.enumerate()):
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(_code)


if __name__ == "__main__":
    main()
