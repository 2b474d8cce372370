"""The notebook of the documentation, cell by cell, inside a running event loop as in Jupyter.

IPython is not needed: the notebook has no magic.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.runs import ROOT

NOTEBOOK = ROOT / "docs" / "from_python.ipynb"
KERNEL = """
import asyncio, json, sys

async def kernel():
    scope = {"__name__": "__main__"}
    for cell in json.load(open(sys.argv[1]))["cells"]:
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), cell["id"], "exec"), scope)
    return [str(row["actor/lr"]) for row in scope["stopped"].metrics]

print(json.dumps(asyncio.run(kernel())))
"""


@pytest.mark.slow  # test_training.py has runs in an event loop
def test_the_notebook_runs_in_an_event_loop(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "MILLRACE_CACHE": str(tmp_path / "cache")}
    command = [sys.executable, "-c", KERNEL, str(NOTEBOOK)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(json.loads(done.stdout.splitlines()[-1])) == 2
    names = {path.name for path in (tmp_path / "runs").iterdir()}
    assert {"quickstart-1", "quickstart-2", "quickstart-3"} <= names


def test_the_notebook_keeps_no_output() -> None:
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in cells)
