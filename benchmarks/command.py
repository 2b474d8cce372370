"""`millrace` as the benchmarks run it: the command line, from the checkout."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent


def millrace(*arguments: str) -> dict[str, Any]:
    """The last line of `millrace ... --json`."""
    done = subprocess.run([sys.executable, "-m", "millrace.cli", *arguments, "--json"], capture_output=True, text=True, cwd=ROOT)
    if done.returncode:
        raise SystemExit(f"millrace {' '.join(arguments)} ended with {done.returncode}:\n{done.stderr[-3000:]}")
    return dict(json.loads(done.stdout.strip().splitlines()[-1]))
