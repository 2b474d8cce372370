"""The root object of a worker process."""

from __future__ import annotations

import asyncio
import gc

import pytest

from millrace.config import Config
from millrace.runtime import worker


@pytest.mark.parametrize("alone", [True, False])
def test_a_workers_own_process_leaves_what_it_built_out_of_collections(
    alone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[list[object]] = []

    def build(*_: object) -> list[object]:
        built.append([[] for _ in range(10)])
        return built[-1]

    monkeypatch.setattr(worker, "_rollout_engine", build)
    before = gc.get_freeze_count()
    replica = worker.make_worker("rollout", alone=alone)
    try:
        asyncio.run(replica.build(Config().model_dump(mode="json"), ""))  # type: ignore[attr-defined]
        collected = any(one is built[0] for one in gc.get_objects())
        assert collected is not alone and (gc.get_freeze_count() > before) is alone
    finally:
        gc.unfreeze()
