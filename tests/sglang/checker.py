"""SGLang's own checker of weights: a proof of a sync that shares no code with millrace's.

millrace adds up the bits of a tensor, in any order. SGLang hashes a tensor, on a CPU by SHA-256.
"""

from __future__ import annotations

import hashlib

import torch
from sglang.srt.managers.io_struct import CheckWeightsReqInput
from torch import Tensor

from tests.serving.replica import Replica

FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
EXPERTS = {
    ".experts.gate_up_proj": ".experts.w13_weight",
    ".experts.down_proj": ".experts.w2_weight",
}
ROWS = 64
"""SGLang pads the embedding to a multiple of these rows."""


async def wrong(replica: Replica, seed: int) -> set[str]:
    """Return the names of SGLang's tensors that are not those of the trainer's model."""
    call = CheckWeightsReqInput(action="checksum")
    success, message, ranks, _ = await replica.engine._manager.check_weights(call)
    assert success and ranks, message
    found = dict(ranks[0]["checksums"])
    want = {name: _sum(tensor) for name, tensor in _fused(replica, seed).items()}
    assert found.keys() == want.keys()
    return {name for name in want if found[name] != want[name]}


def _sum(tensor: Tensor) -> str:
    data = tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(data).hexdigest()[:16]


def _fused(replica: Replica, seed: int) -> dict[str, Tensor]:
    """Return the trainer's tensors in SGLang's form."""
    tensors: dict[str, Tensor] = dict(replica.models[seed].named_parameters())
    for name in list(tensors):
        for whole, (first, *more) in FUSED.items():
            if f".{first}." in name and ".experts." not in name:
                names = [name, *(name.replace(first, part) for part in more)]
                tensors[name.replace(first, whole)] = torch.cat([tensors.pop(n) for n in names])
        for sent, live in EXPERTS.items():
            if name.endswith(sent):
                tensors[name.replace(sent, live)] = tensors.pop(name)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        if name in tensors:
            missing = -len(tensors[name]) % ROWS
            tensors[name] = torch.nn.functional.pad(tensors[name].detach(), (0, 0, 0, missing))
    return tensors
