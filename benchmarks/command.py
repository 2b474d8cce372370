"""The `millrace` command line of the checkout, for the benchmarks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent


def millrace(
    *arguments: str, env: Mapping[str, str] | None = None, timeout_s: float | None = None
) -> dict[str, Any]:
    """Return the last line of `millrace ... --json`. `env` is added to this process's environment.

    Raises SystemExit if the command fails. Raises subprocess.TimeoutExpired and kills the command
    if it runs longer than `timeout_s`.
    """
    command = [sys.executable, "-m", "millrace", *arguments, "--json"]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | dict(env or {}),
        timeout=timeout_s,
    )
    if done.returncode:
        raise SystemExit(
            f"millrace {' '.join(arguments)} ended with {done.returncode}:\n{done.stderr[-3000:]}"
        )
    return dict(json.loads(done.stdout.strip().splitlines()[-1]))
