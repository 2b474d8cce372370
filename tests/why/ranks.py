"""Two processes of this file are trainer ranks. One comes to an all-reduce, and one sleeps.

`python -m tests.why.ranks RANK PORT`; the environment names the folder and the process.
"""

from __future__ import annotations

import sys
import time

import torch
import torch.distributed as dist

from millrace.waits.registry import acting, count, doing
from millrace.waits.wait_server import start_in_worker


def main(rank: int, port: int) -> None:
    side = start_in_worker()
    assert side is not None
    store = dist.TCPStore("127.0.0.1", port, 2, rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    with acting("engine.step"):
        for k in range(1, 8):
            with doing(f"forward of micro-batch {k}"):
                pass
            with doing(f"backward of micro-batch {k}"):
                if k == 7 and rank == 1:
                    time.sleep(1e6)
                dist.all_reduce(torch.zeros(1))
            count("passes")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
