"""Starts that fail: SGLang's arguments, and its KV cache."""

from __future__ import annotations

import asyncio
import tempfile
from dataclasses import astuple
from pathlib import Path
from typing import Any

import psutil
import pytest
from sglang.srt.managers.load_snapshot import shm_path_for

from millrace.config import Config
from millrace.config.serving_checks import SCRATCH
from millrace.errors import ConfigError, MillraceError, WorkerError
from millrace.extras.sglang.engine import build
from millrace.models.model import write_shape
from millrace.runtime.worker import _VARIABLES, _set_defaults
from tests.listening import listeners, outside, unix_sockets
from tests.serving.replica import SHAPE

pytestmark = pytest.mark.xdist_group("engines")


@pytest.mark.parametrize(
    ("arguments", "kind", "text"),
    [
        ({"schedule_conservativeness": "x"}, WorkerError, "SGLang did not start: TypeError.*'x'"),
        ({"max_total_tokens": 64}, ConfigError, "max_total_tokens = 64: SGLang's KV cache has"),
    ],
)
def test_a_start_that_fails_names_the_argument(
    tmp_path: Path,
    runner: asyncio.Runner,
    arguments: dict[str, Any],
    kind: type[MillraceError],
    text: str,
) -> None:
    write_shape(tmp_path, SHAPE, vocab_size=48, eos_token_id=1, pad_token_id=0)
    _set_defaults(_VARIABLES["sglang"], str(tmp_path))
    rollout = {"engine": "sglang", "max_num_seqs": 2, "engine_kwargs": arguments}
    config = Config.model_validate({"model": {"path": str(tmp_path)}, "rollout": rollout})

    async def main() -> None:
        build(config.sides, config.model, str(tmp_path))

    with pytest.raises(kind, match=text):
        runner.run(main())


async def test_an_engine_has_its_files_in_the_folder_of_the_run_and_listens_on_loopback(
    tmp_path: Path, runner: asyncio.Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_shape(tmp_path, SHAPE, vocab_size=48, eos_token_id=1, pad_token_id=0)
    _set_defaults(_VARIABLES["sglang"], str(tmp_path))
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setenv(SCRATCH, str(scratch))
    rollout = {"engine": "sglang", "max_num_seqs": 2}
    config = Config.model_validate({"model": {"path": str(tmp_path)}, "rollout": rollout})
    engine = build(config.sides, config.model, str(tmp_path))
    ports = engine._engine.port_args
    addresses = [each for each in astuple(ports) if str(each).startswith("ipc://")]
    assert len(addresses) >= 5
    assert all(address.startswith(f"ipc://{scratch}/") for address in addresses)
    assert not Path(shm_path_for(ports.instance_id)).exists()
    me = psutil.Process()
    every = [me, *me.children(recursive=True)]
    assert listeners(every) and not outside(listeners(every))
    sockets = unix_sockets(every)
    assert sockets and not any(path.stat().st_mode & 0o077 for path in sockets)
    await engine.close()
    assert Path(tempfile.gettempdir()) != scratch
