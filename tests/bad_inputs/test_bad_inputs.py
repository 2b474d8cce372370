"""Bad configurations and bad data, one in each folder, and the error of `millrace train`.

`expect.yaml` has the expected error and three options:

| key | meaning |
|---|---|
| key, value, rule, fix | four fragments of the message; the first may name a row of data |
| args | the arguments of `millrace train`; the default is recipe.yaml |
| process | true: the command runs in a new process; the other cases run here, ten times as fast |
| unless | a path: the case is skipped where this path exists |

`python -m tests.bad_inputs.test_bad_inputs` runs every case in a new process and prints the time of
each.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from millrace.cli import console

from tests.waiting import HANG_S

HERE = Path(__file__).parent
CASES = sorted(p.parent for p in HERE.glob("*/expect.yaml"))
FORM = re.compile(r".+( = |: ).+: .+\. Fix: .+\.")
"""key = value: rule. Fix: what to do.   or   file row 3: value: rule. Fix: what to do."""


def prepare(case: Path, into: Path) -> tuple[Path, dict, list[str]]:
    """Copy the case, and return the folder to run in, the expectation and the arguments."""
    shutil.copy(HERE / "base.yaml", into / "base.yaml")
    folder = shutil.copytree(case, into / case.name)
    expected = yaml.safe_load((case / "expect.yaml").read_text())
    return folder, expected, ["train", *expected.get("args", ["recipe.yaml"])]


def contents(folder: Path) -> set[str]:
    return {
        str(p.relative_to(folder))
        for p in folder.rglob("*")
        if p.suffix != ".pyc" and p.name != "__pycache__"
    }


def run_process(folder: Path, arguments: list[str]) -> tuple[int, str, str]:
    command = [sys.executable, "-m", "millrace", *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=HANG_S)
    return done.returncode, done.stdout, done.stderr


def check(expected: dict, code: int, out: str, err: str) -> None:
    assert code == 2, err
    assert out == ""
    assert "Traceback" not in err
    _, found, message = err.rpartition("error: ")
    assert found, err
    lines = message.strip().splitlines()
    assert all(FORM.fullmatch(line) for line in lines), message
    for part in ("key", "value", "rule", "fix"):
        assert expected[part] in message, (
            f"the message does not say the {part} {expected[part]!r}:\n{message}"
        )
    assert message.startswith(expected["key"])


@pytest.mark.parametrize("case", CASES, ids=lambda p: p.name)
def test_it_is_refused_with_key_value_rule_and_fix(
    case: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    folder, expected, arguments = prepare(case, tmp_path)
    if Path(expected.get("unless", "/nowhere")).exists():
        pytest.skip(f"this machine has {expected['unless']}")
    before = contents(tmp_path)
    if expected.get("process"):
        code, out, err = run_process(folder, arguments)
    else:
        from millrace.cli.main import main

        monkeypatch.chdir(folder)
        monkeypatch.setattr(sys, "argv", ["millrace", *arguments])
        monkeypatch.setattr(console, "_printed", False)
        with pytest.raises(SystemExit) as exit_:
            main()
        code, (out, err) = exit_.value.code, capfd.readouterr()  # type: ignore[assignment]
    if "--json" in arguments:
        told = json.loads(out)
        assert told == {
            "complete": False,
            "exit_code": 2,
            "error": err.rstrip("\n").rpartition("error: ")[2],
        }
        out = ""
    check(expected, code, out, err)
    assert contents(tmp_path) == before, "something was left behind"


def measure(into: Path) -> None:
    """Run every case in a new process, one after the other."""
    times = []
    for case in CASES:
        folder, expected, arguments = prepare(case, into)
        if Path(expected.get("unless", "/nowhere")).exists():
            continue
        start = time.perf_counter()
        code, out, err = run_process(folder, arguments)
        times.append((time.perf_counter() - start, case.name))
        try:
            check(expected, code, out, err)
        except AssertionError as error:
            sys.stdout.write(f"NOT REFUSED AS EXPECTED: {case.name}: {error}\n")
        sys.stdout.write(
            f"{times[-1][0]:6.2f} s  exit {code}  {case.name}: {err.rpartition('error: ')[2].strip()[:200]}\n"
        )
    slowest = max(times)
    sys.stdout.write(f"{len(times)} cases, the slowest {slowest[0]:.2f} s ({slowest[1]})\n")


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as scratch:
        measure(Path(scratch))
