"""The log of a worker, to which the processes of a serving engine write too."""

from __future__ import annotations

import os
import re
import stat

_STDERR = "/proc/self/fd/2"
_ERROR = re.compile(r"\b((?:[A-Za-z_]+\.)*[A-Z]\w*(?:Error|Exception): (?!Engine core init).+)")


class WorkerLog:
    """The later stderr of this process and its children. Empty if stderr is not a file."""

    def __init__(self) -> None:
        is_file = stat.S_ISREG(os.fstat(2).st_mode) and os.path.exists(_STDERR)
        self._start = os.fstat(2).st_size if is_file else None

    def text(self) -> str:
        if self._start is None:
            return ""
        with open(_STDERR, "rb") as log:
            log.seek(self._start)
            return log.read().decode(errors="replace")

    def last_error(self) -> str:
        return next(
            (
                match[1]
                for line in reversed(self.text().splitlines())
                if (match := _ERROR.search(line))
            ),
            "",
        )
