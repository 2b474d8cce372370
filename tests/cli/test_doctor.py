"""The doctor requires the packages and versions of pyproject.toml."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from millrace.cli import doctor as checkup

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]


def least(requirements: list[str]) -> dict[str, str]:
    """Return the name and the oldest version of each requirement."""
    found = [re.fullmatch(r"([\w-]+)[>=]=([\d.]+)(,.*)?", line) for line in requirements]
    assert all(found), requirements
    return {match[1]: match[2] for match in found if match}


def test_the_packages_that_a_run_needs_are_those_of_pyproject() -> None:
    assert least(PROJECT["dependencies"]) == checkup._NEEDED


def test_the_optional_packages_are_those_of_the_extras() -> None:
    extras = PROJECT["optional-dependencies"]
    ours = extras.keys() - {"docs", "bench", "browser", "clients", "test"}
    wanted = least([line for name in ours for line in extras[name]])
    assert wanted == {name: version for name, (version, *_) in checkup._OPTIONAL.items()}
