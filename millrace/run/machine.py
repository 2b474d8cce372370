"""Whether this machine, and the sizes of the run's model, allow the run. Nothing is started."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from millrace import __version__
from millrace.config import (
    ActorConfig,
    Config,
    ModelConfig,
    RolloutConfig,
    TrainerConfig,
    plugins,
)
from millrace.config.explain import ENGINES
from millrace.config.serving_checks import ARGUMENTS, check_known, check_program, check_sglang
from millrace.errors import INSTALL, MissingDependency, bad_value

_PYTHON_S = 60.0
"""Time limit for a question to another Python interpreter, in seconds."""
_VERSIONS = """
import sys
if sys.version_info < (3, 11):
    sys.exit("it is Python " + sys.version.split()[0] + ", and millrace needs 3.11")
import json, importlib.util as u, importlib.metadata as m
there = [n for n in sys.argv[1:] if getattr(u.find_spec(n), 'origin', None)]
given = m.packages_distributions()
found = {n: m.version(given[n][0]) for n in there if n in given}
if "millrace" in there:
    import millrace
    found["millrace"] = millrace.__version__
print()
print(json.dumps(found))
"""
"""A program that prints the versions of packages. A folder of a package's name is none.

millrace may be there without an installation, by PYTHONPATH. So its source has its version.
"""
_ARGUMENTS = """
import ast, importlib.util, json, pathlib, sys
file = pathlib.Path(importlib.util.find_spec(sys.argv[1]).origin).parent / sys.argv[2]
tree = ast.parse(file.read_text() if file.exists() else "")
classes = [c for c in tree.body if getattr(c, "name", "") in sys.argv[3:]]
fields = [f for c in classes for f in c.body if isinstance(f, ast.AnnAssign)]
print(json.dumps([f.target.id for f in fields]))
"""
"""A program that prints the arguments of an engine. It imports nothing, which takes 25 s.

It finds none in SGLang 0.5.23, which makes the class as it runs. The worker then checks them.
"""
NVIDIA = Path("/dev/nvidiactl")
"""A file of every machine with an NVIDIA GPU."""


def check_machine(config: Config) -> None:
    """Raise ConfigError or MissingDependency if this machine lacks what the run needs."""
    trainer, has = config.trainer, importlib.util.find_spec
    # Other nodes of a Ray cluster may have GPUs.
    if trainer.device == "cuda" and trainer.runtime == "local" and not NVIDIA.exists():
        fix = "trainer.device=auto or trainer.device=cpu"
        raise bad_value("trainer.device", "cuda", "this machine has no NVIDIA GPU", fix)
    judges = [key for key, part in config.reward.parts.items() if part.kind == "judge"]
    if judges and has("openai") is None:
        needs = f"{judges[0]}.judge needs openai, which is not installed here"
        raise MissingDependency(f"{needs}. Fix: {INSTALL['openai']}.")
    if trainer.ray_address:  # other nodes of a cluster may have what this node lacks
        return
    _check_engine(config.rollout)
    for key, group in ENGINES.items():
        if (engine := config.value_of(key)) not in plugins.OWN[group]:  # of another package
            plugins.load(key, engine, group)
    if config.model.lora_rank and has("peft") is None:
        raise MissingDependency(f"model.lora_rank needs peft. Fix: {INSTALL['peft']}.")
    if checks := plugins.load_if_given("trainer.engine", trainer.engine, "train_checks"):
        checks.check_machine(trainer)


def _check_engine(rollout: RolloutConfig) -> None:
    """Raise MissingDependency or ConfigError if the replicas' Python lacks their engine."""
    engine = rollout.engine
    if not rollout.serves:
        return
    fix = f"{INSTALL[engine]}, or rollout.engine=torch"
    if rollout.python:
        found = versions_in(rollout.python, (engine, "millrace"))
        if missing := [name for name in (engine, "millrace") if name not in found]:
            rule = f"rollout.engine={engine}: this Python cannot find {' and '.join(missing)}"
            raise bad_value("rollout.python", rollout.python, rule, fix)
        check_versions(rollout.python, found)
    elif importlib.util.find_spec(engine) is None:
        needs = f"rollout.engine={engine} needs {ARGUMENTS[engine].label}"
        raise MissingDependency(f"{needs}, which is not installed here. Fix: {fix}")
    if given := rollout.engine_kwargs:
        python = rollout.python or sys.executable
        if known := _printed_by(python, _ARGUMENTS, engine, *ARGUMENTS[engine].source):
            check_known(engine, given, known)


def check_versions(python: str, found: Mapping[str, str]) -> None:
    """Raise ConfigError if another interpreter's packages do not fit this millrace."""
    if (theirs := found.get("millrace", __version__)) != __version__:
        rule = f"this Python has millrace {theirs}, and the run has {__version__}"
        fix = f"{python} -m pip install --no-deps FOLDER, with the folder of this run's millrace"
        raise bad_value("rollout.python", python, rule, fix)
    if "sglang" in found:
        check_sglang(found["sglang"])


def versions_in(python: str, packages: Sequence[str]) -> dict[str, str]:
    """Return the versions of those packages that another interpreter finds.

    Raise ConfigError if it is no Python, or too old.
    """
    check_program(python)
    found = _printed_by(python, _VERSIONS, *packages)
    return {str(name): str(version) for name, version in found.items()}


def _printed_by(python: str, program: str, *arguments: str) -> Any:
    """Return the JSON in the last line that a program prints. Raise ConfigError if there is none."""
    key, fix = "rollout.python", "the path of a Python interpreter"
    try:
        done = subprocess.run(
            [python, "-c", program, *arguments], capture_output=True, text=True, timeout=_PYTHON_S
        )
        return json.loads((done.stdout.splitlines() or [""])[-1])
    except (OSError, subprocess.TimeoutExpired) as error:
        raise bad_value(key, python, f"cannot be run: {error}", fix) from error
    except ValueError as error:
        why = " ".join(done.stderr.split())[-200:] or f"it ends with {done.returncode}"
        raise bad_value(key, python, f"is no Python that works: {why}", fix) from error


def check_shape(
    model: ModelConfig, actor: ActorConfig, trainer: TrainerConfig, folder: str = ""
) -> None:
    """Raise ConfigError if the train engine cannot divide the model, or treat its routers so.

    The model is that in `folder`. Without a folder, model.path or model.shape describes it.
    """
    checks = plugins.load_if_given("trainer.engine", trainer.engine, "train_checks")
    shared = actor.ulysses_sequence_parallel_size
    routed = model.router_replay != "disabled" or actor.router_aux_loss_coef
    if not (checks or routed or shared > 1):
        return
    from millrace.models.mixtures import check_mixture
    from millrace.models.model import shape_config

    hf = shape_config(model, folder)
    check_mixture(hf, model.router_replay, actor.router_aux_loss_coef)
    if checks:
        checks.check_model(hf, trainer)
    elif hf.num_attention_heads % shared:
        raise bad_value(
            "actor.ulysses_sequence_parallel_size",
            shared,
            f"must divide the heads of attention, {hf.num_attention_heads}",
            "a divisor of the heads",
        )
