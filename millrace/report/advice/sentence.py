"""One sentence of advice, and the words that several of them use."""

from __future__ import annotations

from dataclasses import dataclass

STALENESS = "async_training.staleness_threshold"


@dataclass(frozen=True, slots=True)
class Advice:
    """One sentence of advice."""

    text: str
    overrides: tuple[str, ...] = ()
    """The `key=value` that it names, in order. Empty if no key helps."""
    gain: float | None = None
    """The predicted change of the trained samples per second, as a share."""
    at_most: bool = False
    """Whether the gain is only a bound."""

    @property
    def key(self) -> str:
        return self.overrides[0].partition("=")[0] if self.overrides else ""

    @property
    def value(self) -> str:
        return self.overrides[0].partition("=")[2] if self.overrides else ""

    def __str__(self) -> str:
        if self.gain is None:
            return self.text
        return f"{self.text} ({'at most ' if self.at_most else ''}{self.gain:+.0%})"


def number(value: float) -> str:
    """Return a number as a configuration has it."""
    return f"{value:g}"


def devices(count: int) -> str:
    return "a device" if count == 1 else f"{count} devices"
