"""The doctor requires the packages and versions of pyproject.toml."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

import pytest

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


def test_the_doctor_names_a_ray_token_that_others_read_and_a_cluster_without_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    path = tmp_path / "auth_token"
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(path))
    assert checkup._ray_token().state == "absent"
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    bare = checkup._ray_token()
    assert bare.state == "warning" and "RAY_AUTH_MODE=token" in bare.fix
    path.write_text("a" * 64)
    path.chmod(0o644)
    shared = checkup._ray_token()
    assert (shared.state, shared.fix) == ("warning", f"chmod 600 {path}")
    path.chmod(0o600)
    assert checkup._ray_token().state == "good"
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    assert checkup._ray_token().state == "warning"


def test_the_doctor_warns_where_every_process_compiles_its_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setattr(sys, "pycache_prefix", str(tmp_path))  # nothing is compiled there
    found = checkup._bytecode()
    assert (found.state, found.fix) == ("warning", "unset PYTHONDONTWRITEBYTECODE")
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    assert checkup._bytecode().state == "good"
