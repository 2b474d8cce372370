"""Keys that only some choices read. With another choice, a value other than the default is an error.

Clips have no such fact: most loss modes read them, and recipes inherit them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from millrace.config.explain import default_of, example, facts, shown
from millrace.config.plugins import OWN
from millrace.config.section import Choice, ReadWith, Switch
from millrace.errors import ConfigError, bad_value

ENGINES = {"rollout.engine": "rollout_engines", "trainer.engine": "train_engines"}
"""The group of the names in each key."""


def check_unread(value_of: Callable[[str], Any]) -> None:
    """Raise ConfigError for keys that the run would ignore. `value_of` is that of a Config.

    The error names all such keys. Recipes and overrides are checked. Checkpoints are not, because
    those of earlier versions may have such a key.
    """
    errors = []
    for key, rule, (other, values) in unread(value_of):
        fix = f"{other}={' or '.join(map(shown, values))}, or {example(key)}"
        errors.append(str(bad_value(key, value_of(key), rule, fix)))
    agents = value_of("agents")
    for name, players in agents.unread().items():
        reads = " or ".join(f"agents.{player}" for player in players)
        who = f"agents.{agents.agent_kind}" if agents.agent_kind else "an episode without an agent"
        key = f"agents.{name}"
        fix = f"{reads}, or {example(key)}"
        errors.append(str(bad_value(key, value_of(key), f"{who} does not read it", fix)))
    if errors:
        raise ConfigError("\n".join(errors))


def unread(
    value_of: Callable[[str], Any],
) -> Iterator[tuple[str, str, tuple[str, tuple[Any, ...]]]]:
    """Yield each key that the run would ignore, the reason, and a choice that reads it."""

    def unmet_of(choice: Choice) -> list[tuple[str, tuple[Any, ...]]]:
        unmet = [(key, values) for key, values in choice.items() if value_of(key) not in values]
        # An engine of another package may read each key.
        return [u for u in unmet if u[0] not in ENGINES or value_of(u[0]) in OWN[ENGINES[u[0]]]]

    switches = {key for key, _ in facts(Switch)}
    for key, fact in facts(ReadWith):
        choices = fact.choices_in(key.rpartition(".")[0])
        unmet = min(map(unmet_of, choices), key=len)  # the choice that needs the fewest changes
        if value_of(key) == default_of(key) or not unmet:
            continue
        other, _ = unmet[0]
        place, _, name = other.rpartition(".")
        if other in switches and name in value_of(place).model_fields_set:
            continue  # a layer sets the switch to false, or chooses the torch engine
        yield key, f"{other}={shown(value_of(other))} does not read it", unmet[0]
