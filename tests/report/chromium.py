"""A headless Chromium for the tests of pages. It is installed where it is missing."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import tempfile
import warnings
from pathlib import Path

import pytest

SKIP = "MILLRACE_NO_BROWSER"
"""With this variable, the tests of pages are skipped."""

NEED = "MILLRACE_NEED_BROWSER"
"""With this variable, a browser that cannot be installed fails them. Else a warning says it."""

_NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
_INSTALL = (
    "apt-get install -y -qq --no-install-recommends chromium-headless-shell fonts-dejavu-core"
)


def find() -> str:
    """Return the path of a Chromium. Install Debian's package if there is none."""
    if os.environ.get(SKIP):
        pytest.skip(f"{SKIP} is set")
    if given := os.environ.get("MILLRACE_CHROMIUM"):
        return given
    with (Path(tempfile.gettempdir()) / "millrace-chromium.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # other workers of pytest-xdist install it too
        found = _installed()
        if found is None:
            output = _install()
            found = _installed()
    if found is None:
        why = (
            f"no Chromium, and it cannot be installed: {output[-300:]}. Fix: install Chromium, or "
            f"set MILLRACE_CHROMIUM to its path, or {SKIP}=1 to skip the tests of pages."
        )
        if os.environ.get(NEED):
            pytest.fail(why)
        warnings.warn(why, stacklevel=1)
        pytest.skip(why)
    return found


def _installed() -> str | None:
    return next((path for name in _NAMES if (path := shutil.which(name))), None)


def _install() -> str:
    """Install the package, and return the output if that failed."""
    if shutil.which("apt-get") is None or os.geteuid() != 0:
        return "not root, or not Debian"
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    output = ""
    for command in (_INSTALL, "apt-get update -qq", _INSTALL):
        done = subprocess.run(
            command.split(), env=environment, capture_output=True, text=True, check=False
        )
        output = done.stderr
        if command == _INSTALL and done.returncode == 0:
            return ""
    return output
