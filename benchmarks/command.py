"""`millrace` as the benchmarks run it: the command line, from the checkout."""

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
    """The last line of `millrace ... --json`. `env` comes on top of this process's own.

    Raises SystemExit if the command fails, subprocess.TimeoutExpired if it runs past `timeout_s` and is killed.
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
