"""A datasets.Dataset in memory, and a reward of the script itself, which workers import."""

import json
import os
import sys

import datasets

import millrace


def reward(data_source, solution_str, ground_truth, extra_info):
    return {"score": float(solution_str == ground_truth), "process": os.getpid()}


def main():
    sys.path.insert(0, sys.argv[1])
    from small import ROWS, SMALL

    table = datasets.Dataset.from_list(ROWS).rename_column("answer", "ground_truth")
    split = table.train_test_split(8, seed=0)
    run = millrace.train(
        "quickstart", reward=reward, train=split["train"], val=split["test"], **SMALL
    )
    processes = {row["process"] for s in run.samples() for row in [dict(s["components"])]}
    print(json.dumps({
        "complete": run.complete,
        "spec": run.config["reward"]["function"],
        "elsewhere": os.getpid() not in processes and len(processes),
        "truths": sorted({s["ground_truth"] for s in run.samples()} - {*table["ground_truth"]}),
    }))  # fmt: skip


if __name__ == "__main__":
    main()
