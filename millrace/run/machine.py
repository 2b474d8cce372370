"""Whether this machine, and the sizes of the run's model, allow the run. Nothing is started."""

from __future__ import annotations

import importlib.util
import subprocess
from collections.abc import Sequence
from pathlib import Path

from millrace.config import (
    ActorConfig,
    Config,
    ModelConfig,
    RolloutConfig,
    TrainerConfig,
    plugins,
)
from millrace.config.serving_checks import ARGUMENTS
from millrace.config.unused_keys import ENGINES
from millrace.errors import INSTALL, MissingDependency, bad_value

_PYTHON_S = 60.0
"""Time limit for a question to another Python interpreter, in seconds."""
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
    if not rollout.serves or (not rollout.python and importlib.util.find_spec(engine)):
        return
    label, fix = ARGUMENTS[engine].label, f"{INSTALL[engine]}, or rollout.engine=torch"
    if not rollout.python:
        needs = f"rollout.engine={engine} needs {label}, which is not installed here"
        raise MissingDependency(f"{needs}. Fix: {fix}")
    if missing := missing_in(rollout.python, (engine, "millrace")):
        rule = f"rollout.engine={engine}: this Python cannot find {' and '.join(missing)}"
        raise bad_value("rollout.python", rollout.python, rule, fix)


def missing_in(python: str, modules: Sequence[str]) -> list[str]:
    """Return which modules another interpreter cannot find. Raise ConfigError if it fails."""
    code = (
        "import sys, importlib.util as u; "
        "print('\\nmissing', *(m for m in sys.argv[1:] if not u.find_spec(m)))"
    )
    try:
        found = subprocess.run(
            [python, "-c", code, *modules], capture_output=True, text=True, timeout=_PYTHON_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise bad_value("rollout.python", python, f"cannot be run: {error}", "a Python") from error
    answer, *missing = (found.stdout.splitlines() or [""])[-1].split() or [""]
    if found.returncode or answer != "missing":
        rule = f"is no Python that works: {found.stderr.strip()[-200:] or found.returncode}"
        raise bad_value("rollout.python", python, rule, "the path of a Python interpreter")
    return missing


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
