"""Losses and estimators of users: their conformance checks, by the command and before a run."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from millrace.algorithms.advantage import Estimator
from millrace.algorithms.estimators import ESTIMATORS
from millrace.algorithms.losses import POLICY_LOSSES
from millrace.algorithms.policy_loss import PolicyLoss
from millrace.config import ActorConfig, AlgorithmConfig, Config, DistillationConfig
from millrace.config.algorithm_keys import load_algorithm
from millrace.data.curriculum import KEY as SAMPLER
from millrace.data.spec import nearest
from millrace.data.user_code import load
from millrace.errors import bad_value
from millrace.observe.user_metrics import KEY as METRICS
from millrace.sync.background import abandonable

if TYPE_CHECKING:
    from millrace.algorithms.conformance import Finding

CHECK_S = 300.0
"""The deadline of the checks before a run. They take two seconds on an idle core."""
LOSS, ESTIMATOR = "actor.policy_loss.loss_mode", "algorithm.adv_estimator"
SIGNAL = "distillation.loss_mode"
WEIGHTS = "algorithm.token_weights"


def check(spec: str, options: Mapping[str, Any]) -> tuple[str, list[Finding]]:
    """Check what `path.py:name` names, or a name of the package. Return the key that takes it, and its broken properties.

    A plain function is an estimator if its first parameter is `batch`, and a loss otherwise.
    Raises ConfigError if it cannot be imported, or for an option that it has not.
    """
    if spec in ESTIMATORS or spec in POLICY_LOSSES:
        is_loss = spec in POLICY_LOSSES
    else:
        if ":" not in spec and not spec.endswith(".py"):
            rule = "no such name of the package, and not path.py:name"
            known = [*POLICY_LOSSES, *ESTIMATORS]
            raise bad_value("check-algorithm", spec, rule, nearest(spec, known, "{}"))
        found = load_algorithm("check-algorithm", spec)
        is_loss = isinstance(found, PolicyLoss) or (
            not isinstance(found, Estimator)
            and next(iter(inspect.signature(found).parameters), "-") != "batch"
        )
    from millrace.algorithms.conformance import findings  # torch

    if is_loss:
        actor = ActorConfig.model_validate(
            {"policy_loss": {"loss_mode": spec} | _options(spec, options)}
        )
        return LOSS, findings(actor.policy_loss.loss, actor.loss_options())
    if options:
        name, value = next(iter(options.items()))
        raise bad_value(name, value, "an estimator has no options of its own", "remove it")
    algorithm = AlgorithmConfig(adv_estimator=spec)
    return ESTIMATOR, findings(algorithm.estimator, algorithm.advantage_options())


def _options(spec: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options of a loss as keys: those of the package's losses stand beside loss_mode."""
    own = POLICY_LOSSES[spec].own_options if spec in POLICY_LOSSES else options
    for name, value in options.items():
        if name not in own:
            raise bad_value(
                name, value, f"{spec} has no such option", ", ".join(own) or "remove it"
            )
    return dict(options) if spec in POLICY_LOSSES else {"options": dict(options)}


def try_algorithms(config: Config, note: Callable[[str], None]) -> None:
    """Check the user's functions before models load.

    Raises ConfigError if one fails on made-up batches. Other broken properties are notes.
    """
    sections = config.actor, config.algorithm, config.distillation
    for key, spec in _own(config.value_of).items():
        for broken in _broken(*sections, key, spec):
            from millrace.algorithms.conformance import FAILS

            if broken.name == FAILS:
                fix = f"{broken.fix}: millrace check-algorithm {spec}"
                raise bad_value(key, spec, broken.seen, fix)
            note(f"warning: {key}={spec}: {broken}")


def _own(value_of: Callable[[str], str]) -> dict[str, str]:
    """Return the names of the user's functions by their keys."""
    keys = (LOSS, ESTIMATOR, SIGNAL, WEIGHTS, SAMPLER, METRICS)
    return {key: spec for key in keys if ":" in (spec := value_of(key))}


def _broken(
    actor: ActorConfig,
    algorithm: AlgorithmConfig,
    distillation: DistillationConfig,
    key: str,
    spec: str,
) -> list[Finding]:
    """Return the properties that the function of a key has not."""
    if key in (SAMPLER, METRICS):
        load(key, spec)
        return []
    from millrace.algorithms.conformance import check_signal, check_weights, findings  # torch

    if key == LOSS:
        return findings(actor.policy_loss.loss, actor.loss_options())
    if key == ESTIMATOR:
        return findings(algorithm.estimator, algorithm.advantage_options())
    signal, weights = distillation.own_signal, algorithm.weigh_tokens
    found = check_signal(spec, signal) if signal and key == SIGNAL else None
    if weights and key == WEIGHTS:
        found = check_weights(spec, weights)
    return [found] if found else []


async def tried(config: Config, note: Callable[[str], None]) -> None:
    """Check the user's algorithm in a thread, within CHECK_S. Raises ConfigError, also after it."""
    try:
        async with asyncio.timeout(CHECK_S):
            await abandonable(try_algorithms, config, note)
    except TimeoutError:
        key, spec = next(iter(_own(config.value_of).items()))
        rule = f"its checks on small batches took over {CHECK_S:g} s, where seconds are usual"
        fix = "a function that returns; millrace check-algorithm"
        raise bad_value(key, spec, rule, fix) from None
