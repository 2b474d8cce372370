"""A callback that lowers the learning rate and stops when the answers are as long as wanted."""

import json
import sys

import millrace

sys.path.insert(0, sys.argv[1])
from small import SMALL

seen = []
rates = {"lr_warmup_steps": 0, "lr_scheduler_type": "constant"}


def watch(version):
    lengths = [len(s.text) for s in version.samples]
    seen.append([version.number, version.row["actor/lr"], len(lengths), version.lr])
    if version.number == 1:
        version.set_lr(1e-4)
    if version.number == 3 and version.row["response_length/mean"] > 0:
        version.stop("long enough")


keys = SMALL | {"actor": {"ppo_mini_batch_size": 4, "optim": rates}, "mode": "on_policy_pipeline"}
run = millrace.train("quickstart", callbacks=[watch], **keys)
stopped, checkpoint = run.complete, run.checkpoint
rest = millrace.train(
    "quickstart", **keys, **{"trainer.run_dir": str(run.folder), "trainer.resume": "auto"}
)
print(json.dumps({
    "seen": seen,
    "stopped": stopped,
    "checkpoint": checkpoint.name,
    "complete": rest.complete,
    "rates": [row["actor/lr"] for row in rest.metrics],
}))  # fmt: skip
