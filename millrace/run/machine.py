"""Whether this machine, and the sizes of the run's model, allow the run. Nothing is started."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from millrace.config import (
    ActorConfig,
    Config,
    ModelConfig,
    TrainerConfig,
    plugins,
)
from millrace.config.unused_keys import ENGINES
from millrace.errors import INSTALL, MissingDependency, bad_value

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
    if config.rollout.engine == "vllm" and has("vllm") is None:
        needs = "rollout.engine=vllm needs vLLM, which is not installed here"
        raise MissingDependency(f"{needs}. Fix: {INSTALL['vllm']}, or rollout.engine=torch")
    for key, group in ENGINES.items():
        if (engine := config.value_of(key)) not in plugins.OWN[group]:  # of another package
            plugins.load(key, engine, group)
    if config.model.lora_rank and has("peft") is None:
        raise MissingDependency(f"model.lora_rank needs peft. Fix: {INSTALL['peft']}.")
    if checks := plugins.load_if_given("trainer.engine", trainer.engine, "train_checks"):
        checks.check_machine(trainer)


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
