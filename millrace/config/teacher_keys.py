"""The keys of teachers, and of what the policy learns from them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from millrace.config.endpoint_keys import EndpointConfig, PlaceConfig
from millrace.config.section import Choices, Folder, ReadWith, Rule, Section, Sources
from millrace.data.user_code import load

_TOP_K: tuple[str, ...] = ("forward_kl_topk", "reverse_kl_topk")


class TeacherConfig(EndpointConfig, PlaceConfig):
    """One frozen model that the policy learns from."""

    path: Annotated[str, Folder] = ""
    """Folder or hub id of a causal language model with the policy's tokenizer.

    With base_url, only its tokenizer is compared.
    """
    base_url: str = ""
    """Address of an OpenAI-compatible endpoint that gives log-probs of a prompt's tokens.

    With vLLM, such as http://host:8000/v1. Empty keeps the teacher in this run.
    """
    place: Literal["trainer", "own"] = "trainer"
    """Who computes its log-probs without base_url: the trainer, or processes of its own."""
    batch_size: int = Field(8, ge=1)
    """place=own: most threads of trajectories in one forward pass."""
    on_failure: Literal["wait", "drop"] = "wait"
    """What happens if base_url fails after all retries, or a process of place=own.

    wait tries again until wait_deadline_s. drop counts the sample as teacher_NAME and replaces it.
    """
    wait_deadline_s: float = Field(900.0, gt=0)
    """Seconds of failures after which the run ends, with on_failure=wait."""
    weight: float = Field(1.0, gt=0)
    """Factor of its divergence."""
    data_sources: Sources = ()
    """The data sources whose samples it teaches. Empty means all.

    A row can name its teachers itself, in place of this: extra_info.teachers is a name, a list of
    names, or a mapping of names to weights.
    """
    trust_remote_code: bool = False
    """Whether code in the model's folder may run."""

    @property
    def outside(self) -> bool:
        """Whether its log-probs come with the samples, from outside of the trainer."""
        return bool(self.base_url) or self.place == "own"

    @property
    def identity(self) -> str:
        """The name of the model, whatever its address is."""
        return self.model if self.base_url else self.path

    def rules(self, here: str) -> Iterator[Rule]:
        served, own = bool(self.base_url), self.place == "own"
        fix = f"{here}path=FOLDER, or {here}base_url=ADDRESS"
        yield not self.path and not served, "path", "a teacher needs a model", fix
        yield from super().rules(here)
        rule = "the endpoint needs the name of the model that it serves"
        yield served and not self.model, "model", rule, f"{here}model=NAME"
        rule = f"{here}base_url already computes its log-probs"
        yield served and own, "place", rule, f"one of {here}place and base_url"
        used = _OF_PLACE if own else _OF_CLIENT if served else ()
        rule = "this teacher does not read it"
        fix = f"{here}base_url=ADDRESS or {here}place=own, or leave it out"
        for name in sorted({*_OF_PLACE, *_OF_CLIENT}.difference(used)):
            given = getattr(self, name) != type(self).model_fields[name].default
            yield given, name, rule, fix


_PATIENCE = ("on_failure", "timeout_s", "wait_deadline_s")
_OF_CLIENT = (*EndpointConfig.model_fields, *_PATIENCE)
_OF_PLACE = (*PlaceConfig.model_fields, "batch_size", *_PATIENCE)
CLIENT_KEYS = tuple(sorted({*_OF_CLIENT, *_OF_PLACE} - {"model"}))
"""The keys of a teacher outside of the trainer that decide no log-prob."""


class DistillationConfig(Section):
    """The part of teachers in the training. Some names are verl's."""

    loss_mode: Annotated[str, Choices(("k1", *_TOP_K))] = "k1"
    """k1: log p_teacher - log p of each drawn token is a part of its advantage.

    Its expectation is minus the reverse KL, and the policy loss corrects it for stale tokens.
    path.py:name is a function of your own in its place. The other two add the KL between next-token
    distributions to the loss. They keep the teacher's topk tokens, and one class for all others.
    """
    topk: Annotated[int, ReadWith({".loss_mode": _TOP_K})] = Field(32, ge=1)
    """Tokens of each distribution. The size of the vocabulary takes whole distributions."""
    use_task_rewards: bool = True
    """Train on the rewards too. false trains on the teachers alone."""
    distillation_loss_coef: float = Field(1.0, gt=0)
    """Factor of the teachers' part."""
    task_loss_coef: Annotated[float, ReadWith({".use_task_rewards": (True,)})] = Field(1.0, gt=0)
    """Factor of the advantages that come from rewards."""
    max_log_ratio: Annotated[float, ReadWith({".loss_mode": ("k1",)})] = Field(10.0, gt=0)
    """k1: the largest size of a token's part. A teacher may give a token almost no probability."""

    @property
    def own_signal(self) -> Callable[..., Any] | None:
        """The function that loss_mode names. Raises ConfigError if it cannot be imported."""
        key = "distillation.loss_mode"
        return load(key, self.loss_mode) if ":" in self.loss_mode else None

    @property
    def candidates(self) -> int:
        """The number of tokens whose probabilities a teacher gives beside the drawn one."""
        return self.topk if self.loss_mode in _TOP_K else 0


def weights_of(
    teachers: Mapping[str, TeacherConfig], data_source: str, extra_info: Mapping[str, Any]
) -> dict[str, float]:
    """Return the weight of each teacher of a row. Raises ValueError if the row names a wrong one."""
    named = extra_info.get("teachers")
    if named is None:
        sources = {name: teacher.data_sources for name, teacher in teachers.items()}
        named = [name for name, own in sources.items() if not own or data_source in own]
    if isinstance(named, str):
        named = [named]
    if isinstance(named, Sequence) and all(isinstance(name, str) for name in named):
        named = {name: teachers[name].weight if name in teachers else 1.0 for name in named}
    if not isinstance(named, Mapping):
        raise ValueError("must be a name, a list of names, or a mapping of names to weights")
    # A column of structs in a parquet file has the keys of all rows.
    named = {name: weight for name, weight in named.items() if weight is not None}
    if unknown := sorted(map(str, named.keys() - teachers.keys())):
        raise ValueError(f"no teacher {unknown[0]!r}: there are {', '.join(teachers)}")
    for name, weight in named.items():
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not weight > 0:
            raise ValueError(
                f"the weight of the teacher {name} must be a number over 0: {weight!r}"
            )
    return {name: float(weight) for name, weight in named.items()}
