"""The loop to read, and templates for clusters.

The Slurm script starts a cluster of two nodes, which are both this machine. The Kubernetes job has
the required fields.
"""

from __future__ import annotations

import os
import re
import runpy
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import yaml

from millrace.config import recipe
from millrace.runtime.placement import choose
from tests.e2e import runs
from tests.waiting import HANG_S

EXAMPLES = Path(__file__).parent.parent / "examples"
SCRIPT = EXAMPLES / "slurm" / "millrace.sbatch"

SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do shift; done
exec "$@"
"""
RAY = """#!/bin/bash
# Counts as joined from its start; ends at once where it is told to.
[[ $FAKE_RAY == broken ]] && { echo "no such interface"; exit 1; }
[[ $2 == --head ]] && for word in "$@"; do [[ $word == --port=* ]] && exec %s -m http.server --bind 127.0.0.1 "${word#*=}"; done
exec sleep 1000
"""
PYTHON = """#!/bin/bash
# The token, and whether all nodes have joined.
[[ $2 == *secrets* ]] && exec %s "$@"
exit 0
"""
COMMAND = """#!/bin/bash
echo "$@" > said
trap 'echo saving; sleep 1; exit 143' TERM
[[ $1 == wait ]] && { echo up; while :; do sleep 0.1; done; }
exit "$1"
"""


def job(
    folder: Path, *arguments: str, real: bool = False, script: Path = SCRIPT, **environment: str
) -> subprocess.Popen[str]:
    """Run the script under Slurm's variables, on two nodes.

    Small scripts replace all commands except bash. With `real`, Ray and millrace are themselves.
    """
    tools = folder / "bin"
    tools.mkdir()
    scripts = {
        "srun": SRUN,
        "scontrol": "#!/bin/bash\necho node-0; echo node-1\n",
        "hostname": "#!/bin/bash\necho 127.0.0.1\n",
    }
    if real:
        for name in ("ray", "python"):
            scripts[name] = f'#!/bin/bash\nexec {Path(sys.executable).parent / name} "$@"\n'
        scripts["millrace"] = f'#!/bin/bash\nexec {sys.executable} -m millrace "$@"\n'
    else:
        scripts |= {"ray": RAY % sys.executable, "python": PYTHON % sys.executable}
        scripts["millrace"] = COMMAND
    for name, text in scripts.items():
        (tools / name).write_text(text)
        (tools / name).chmod(stat.S_IRWXU)
    slurm = {
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_JOB_NODELIST": "node-[0-1]",
        "SLURM_CPUS_PER_TASK": "1",
    }
    path = f"{tools}{os.pathsep}{os.environ['PATH']}"
    return subprocess.Popen(
        ["bash", str(script), *arguments],
        cwd=folder,
        env=os.environ | slurm | {"PATH": path, "MILLRACE_BIN": str(tools)} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Return exit code and output, once all processes that the job started are gone."""
    started: list[psutil.Process] = []
    deadline = time.monotonic() + HANG_S
    while process.poll() is None and time.monotonic() < deadline:
        started = list({*started, *psutil.Process(process.pid).children(recursive=True)})
        time.sleep(0.1)
    output, _ = process.communicate(timeout=HANG_S)
    _, left = psutil.wait_procs(started, timeout=HANG_S)
    for one in left:
        one.kill()
    assert not left, f"still there after the job: {left}"
    return process.returncode, output


def test_the_job_has_the_exit_code_of_the_command_on_its_cluster(tmp_path: Path) -> None:
    assert ended(job(tmp_path, "7", "recipe.yaml", "rollout.n=4"))[0] == 7
    address = f"127.0.0.1:{20000 + 2 * (os.getpid() % 5000)}"
    assert (tmp_path / "said").read_text() == f"7 recipe.yaml rollout.n=4 --address {address}\n"


@pytest.mark.parametrize("pause", ["", "sleep 1\n"], ids=["at_once", "slow"])
def test_a_job_that_is_told_to_end_lets_the_run_save_first(tmp_path: Path, pause: str) -> None:
    """A busy node is slow to note the process of the run."""
    script = tmp_path / "job"
    script.write_text(SCRIPT.read_text().replace("run=$!", f"{pause}run=$!"))
    process = job(tmp_path, "wait", script=script)
    assert process.stdout is not None
    while process.stdout.readline() != "up\n":
        pass
    process.send_signal(signal.SIGTERM)
    code, output = ended(process)
    assert code == 143 and "saving" in output


def test_a_job_whose_nodes_do_not_start_fails_and_says_so(tmp_path: Path) -> None:
    code, output = ended(job(tmp_path, "0", FAKE_RAY="broken"))
    assert code == 1 and "no such interface" in output
    assert "error: a node has left the cluster" in output
    assert not (tmp_path / "said").exists()


@pytest.mark.slow
def test_a_command_runs_on_a_cluster_that_the_job_makes(tmp_path: Path) -> None:
    few = ["sft.steps=2", "sft.batch_size=8", f"trainer.run_dir={tmp_path / 'run'}"]
    code, output = ended(job(tmp_path, "sft", str(runs.RECIPE), *few, "--json", real=True))
    assert code == 0, output
    assert (tmp_path / "run" / "sft" / "model.safetensors").is_file()
    assert "runtime: ray" in (tmp_path / "run" / "config.yaml").read_text()


def test_the_kubernetes_job_asks_for_the_nodes_that_its_command_needs() -> None:
    job_ = yaml.safe_load((EXAMPLES / "kubernetes" / "rayjob.yaml").read_text())
    assert (job_["apiVersion"], job_["kind"]) == ("ray.io/v1", "RayJob")
    command, name, path, *rest = job_["spec"]["entrypoint"].split()
    assert (command, name, rest[:2]) == ("millrace", "train", ["--address", "auto"])
    config = recipe.load(runs.RECIPE, rest[2:])
    cluster = job_["spec"]["rayClusterSpec"]
    (workers,) = cluster["workerGroupSpecs"]
    sizes = {workers[name] for name in ("replicas", "minReplicas", "maxReplicas")}
    assert sizes == {config.derived().nodes_needed}
    (pod,) = workers["template"]["spec"]["containers"]
    (head,) = cluster["headGroupSpec"]["template"]["spec"]["containers"]
    gpus = int(pod["resources"]["limits"]["nvidia.com/gpu"])
    nodes = [0, *[gpus] * workers["replicas"]]
    assert sum(choose(config.sides, "GPU", nodes, nodes).shares) == sum(nodes), "no GPU is idle"
    assert config.trainer.resume == "auto" and job_["spec"]["backoffLimit"] > 0
    assert config.trainer.run_dir.startswith("/shared/") and path.startswith("/shared/")
    for spec, container in ((cluster["headGroupSpec"], head), (workers, pod)):
        of_pod = spec["template"]["spec"]
        mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        assert {*mounts.values()} <= {volume["name"] for volume in of_pod["volumes"]}
        assert "/shared" in mounts and "persistentVolumeClaim" in str(of_pod["volumes"])
        assert of_pod["restartPolicy"] == "Never" and container["image"] == head["image"]


def test_the_page_says_every_variable_of_the_slurm_script() -> None:
    page = (EXAMPLES.parent / "docs" / "clusters.md").read_text()
    read = set(re.findall(r"\$\{((?:MILLRACE|RAY)_\w+):-", SCRIPT.read_text()))
    assert read == set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE))


def test_the_loop_to_read_trains_each_sample_once_and_learns() -> None:
    keys = ["rollout.total_rollout_steps=256", "sft.steps=100"]
    command = [sys.executable, str(EXAMPLES / "loop.py"), *keys]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == 0, done.stderr
    *_, last = done.stdout.splitlines()
    assert "256 admitted, 256 retired, 0 dropped, 0 of 96 slots" in last
    rewards = [float(x) for x in re.findall(r"reward ([0-9.]+)", done.stdout)]
    assert len(rewards) == 8 and sum(rewards[4:]) > sum(rewards[:4])


def test_the_loop_to_read_is_short_and_refuses_a_mode_that_it_does_not_show(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert len((EXAMPLES / "loop.py").read_text().splitlines()) <= 250
    monkeypatch.setattr(sys, "argv", ["loop.py", "mode=one_step_off"])
    with pytest.raises(SystemExit, match="mode=async_partial"):
        runpy.run_path(str(EXAMPLES / "loop.py"), run_name="__main__")
