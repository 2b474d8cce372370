"""Muon, compared with torch's own."""

from __future__ import annotations

import copy
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from millrace.config import OptimConfig
from millrace.train.muon import Muon, make_optimizer, orthogonal
from tests.train.forks import GROUP, start_ranks

OPTIM = OptimConfig(optimizer="muon", lr=0.02, weight_decay=0.1)


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(11, 8)
        self.inner = nn.Sequential(nn.Linear(8, 12), nn.Linear(12, 8))
        self.head = nn.Linear(8, 11, bias=False)

    def forward(self, ids: Any) -> Any:
        return self.head(self.inner(self.embed(ids)))

    def layers(self) -> list[nn.Module]:
        return [self.inner]


def trained(model: Any, optimizer: Any, steps: int = 4) -> None:
    g = torch.Generator().manual_seed(1)
    for _ in range(steps):
        ids = torch.randint(0, 11, (16,), generator=g)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(ids), (ids * 3) % 11).backward()
        optimizer.step()


def test_steps_are_torchs_muon_inside_layers_and_adamw_elsewhere() -> None:
    model = Tiny()
    other = copy.deepcopy(model)
    trained(model, make_optimizer(model.parameters(), model.layers(), OPTIM))
    inner = [p for p in other.inner.parameters() if p.ndim == 2]
    reference = torch.optim.Muon(
        inner, lr=OPTIM.lr, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw"
    )
    rest = [p for p in other.parameters() if all(p is not q for q in inner)]
    groups = [
        {"params": [p for p in rest if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in rest if p.ndim < 2], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=OPTIM.lr, betas=OPTIM.betas, eps=OPTIM.eps)

    class Both:
        def zero_grad(self) -> None:
            other.zero_grad()

        def step(self) -> None:
            reference.step()
            adamw.step()

    trained(other, Both())
    for (name, p), q in zip(model.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5, msg=name)
    moved = next(model.inner.parameters()) - next(Tiny().inner.parameters())
    assert moved.abs().max() > 0.01


@pytest.mark.parametrize("shape", [(8, 20), (20, 8), (1, 5)])
def test_a_direction_has_singular_values_near_1(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    values = torch.linalg.svdvals(orthogonal(matrix).float())
    assert values.min() > 0.6 and values.max() < 1.3
    assert not orthogonal(torch.zeros(shape)).any()


def _rank(rank: int, folder: str) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    model = Tiny()
    fully_shard(model.inner, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = make_optimizer(model.parameters(), model.layers(), OPTIM)
    trained(model, optimizer)
    whole = {name: p.full_tensor() for name, p in model.named_parameters()}  # type: ignore[attr-defined]
    if rank == 0:
        torch.save(whole, f"{folder}/weights")
    dist.destroy_process_group()


@pytest.mark.xdist_group(GROUP)
def test_sharded_matrices_step_as_whole_ones(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(dir=tmp_path) as folder:
        start_ranks(_rank, (folder,), 2)
        found = torch.load(f"{folder}/weights")
    model = Tiny()
    optimizer = make_optimizer(model.parameters(), model.layers(), OPTIM)
    assert isinstance(optimizer, Muon)
    trained(model, optimizer)
    for name, p in model.named_parameters():
        torch.testing.assert_close(found[name], p.detach(), rtol=1e-3, atol=1e-4, msg=name)
