"""The keys of one reward: a function, a reward model or a judge."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field

from millrace.config.endpoint_keys import EndpointConfig, PlaceConfig
from millrace.config.section import Home, Rule, Section
from millrace.data.user_code import is_in_driver

Kind = Literal["function", "model", "judge"]

_TEMPLATE = """Grade the response to the task below, from 0 (useless) to 10 (right and complete).

Task:
{prompt}

Response:
{response}

End with one line: SCORE: <number from 0 to 10>
"""


class RewardModelConfig(PlaceConfig):
    path: Annotated[str, Home] = ""
    """Folder or hub id of a Hugging Face sequence classifier with its tokenizer.

    It reads the prompt and the response through its own chat template. Empty means no reward model.
    """
    batch_size: int = Field(16, ge=1)
    """Most responses in one forward pass. Responses that wait together are scored together."""
    max_length: int = Field(0, ge=0)
    """Most tokens of prompt and response. 0 takes the limit of the model's config.json."""
    truncation: Literal["error", "left", "right"] = "error"
    """What happens to longer texts: a counted error, or tokens are cut on this side."""
    label: str = ""
    """Label whose logit is the score. Needed if the classifier has more than one label."""
    function_to_apply: Literal["none", "sigmoid", "softmax"] = "none"
    """Function on the logits, as in the pipelines of transformers. softmax needs several labels."""
    timeout_s: float = Field(120.0, gt=0)
    """Seconds that one batch may take. millrace kills and replaces a process that takes longer."""
    trust_remote_code: bool = False
    """Whether code in the model's folder may run."""


class JudgeConfig(EndpointConfig):
    model: str = ""
    """Name of the model that the endpoint serves. Empty means no judge."""
    base_url: str = ""
    """Address of an OpenAI-compatible endpoint, such as http://localhost:8000/v1.

    Empty uses OpenAI's own, or the one in OPENAI_BASE_URL.
    """
    template: str = _TEMPLATE
    """Message to the judge. {prompt}, {response}, {ground_truth} and {data_source} are filled in."""
    pattern: str = r"SCORE:\s*(-?\d+(?:\.\d+)?)"
    """Regular expression whose first group is the score. The last match in the answer counts."""
    json_field: str = ""
    """Field of a JSON object in the answer that is the score. Empty uses pattern."""
    min: float = 0.0
    """Smallest valid score."""
    max: float = 10.0
    """Largest valid score. A score outside of the bounds is a counted error."""
    temperature: float | None = Field(0.0, ge=0)
    """Temperature of the request. null leaves it to the endpoint."""
    max_tokens: int = Field(1024, ge=0)
    """Most tokens of an answer. 0 leaves it to the endpoint."""
    extra_body: dict[str, Any] = Field(default_factory=dict)
    """Further fields of each request, such as response_format."""
    cache: bool = True
    """Keep scores on disk, so that the same response is judged once."""
    cache_dir: Annotated[str, Home] = ""
    """Folder of the cache. Empty uses the run's own folder. A resumed run keeps it."""
    cache_size: int = Field(100_000, ge=1)
    """Most scores in the cache. The oldest go first."""
    price_in: float = Field(0.0, ge=0)
    """Price of a million tokens sent. With a price, the metrics have the cost."""
    price_out: float = Field(0.0, ge=0)
    """Price of a million tokens received."""

    def rules(self, here: str) -> Iterator[Rule]:
        yield from super().rules(here)
        lacks, fix = "{response}" not in self.template, "a text with {prompt} and {response}"
        yield lacks, "template", "has no {response}", fix
        fix = r"SCORE:\s*(\d+)"
        try:
            groups, wrong = re.compile(self.pattern).groups, ""
        except re.error as error:
            groups, wrong = 0, f"is not a regular expression: {error}"
        yield not groups, "pattern", wrong or "has no group for the score", fix
        rule = f"must be less than {here}max = {self.max:g}"
        yield self.min >= self.max, "min", rule, f"{here}min={self.max - 1:g}"


class FormatConfig(Section):
    pattern: str = r"<think>(?:(?!</?think>).)*</think>\s*<answer>(?:(?!</?answer>).)*</answer>\s*"
    """Regular expression of a well-formed response, for reward.function=format.

    The whole response must match. A dot matches every character, also the end of a line.
    """

    def rules(self, here: str) -> Iterator[Rule]:
        try:
            re.compile(self.pattern, re.DOTALL)
            wrong = ""
        except re.error as error:
            wrong = f"is not a regular expression of Python: {error}"
        fix = "correct it; try it with re.compile(pattern, re.DOTALL)"
        yield wrong, "pattern", wrong, fix


class RepetitionPenaltyConfig(Section):
    """The options of reward.function=repetition_penalty."""

    ngram_size: int = Field(3, ge=1)
    """Words in a row that count as one n-gram."""
    max_penalty: float = Field(-1.0, le=0)
    """Score of a response of which all n-grams are repeated. Without a repetition it is 0."""


NAMES = ("function", "model.path", "judge.model")
"""The keys that name a reward."""
SET_FOR_FUNCTIONS = ("memory_mb", "sandbox")
"""Keys that protect. They are never ignored silently."""


class OneReward(Section):
    """One reward: a function, or a model if model.path is set, or a judge if judge.model is."""

    function: str = ""
    """Reward function: path.py:name, module:name, or a built-in name such as exact or math.

    A user's function has verl's or TRL's signature. Empty uses the built-in function that belongs
    to each row's data_source. A row of an unknown data_source is then an error.
    """
    format: FormatConfig = FormatConfig()
    """Options of the built-in function format."""
    repetition_penalty: RepetitionPenaltyConfig = RepetitionPenaltyConfig()
    """Options of the built-in function repetition_penalty."""
    num_workers: int = Field(1, ge=1)
    """Processes that call reward functions."""
    max_concurrency: int = Field(1024, ge=1)
    """Coroutines that one process awaits at a time if the reward function is `async`.

    A function that scores whole groups has one coroutine for each group.
    """
    timeout_s: float = Field(30.0, gt=0)
    """Seconds that one call may take. millrace kills and replaces a process that takes longer."""
    memory_mb: int = Field(0, ge=0)
    """Megabytes of data that a process of a function may have. 0 sets no limit.

    In a sandbox, it also bounds the memory of a worker with all that it started.
    """
    trial: bool = True
    """Call a function of yours before the run, with made-up answers and with the truth.

    A run ends at once if each call fails, and warns if all scores are equal, or if some calls fail.
    """
    sandbox: bool = False
    """Run the function in a sandbox: no network, no files of yours, and a new child for each call.

    Set it if the function runs code that the policy wrote. Needs Linux with user namespaces.
    """
    model: RewardModelConfig = RewardModelConfig()
    """Reward model, instead of a function."""
    judge: JudgeConfig = JudgeConfig()
    """Judge behind an OpenAI-compatible endpoint, instead of a function."""

    @property
    def kind(self) -> Kind:
        return "model" if self.model.path else "judge" if self.judge.model else "function"

    def rules(self, here: str) -> Iterator[Rule]:
        first, *others = [name for name in NAMES if self.value_of(name)] or [""]
        for name in others:
            rule = f"{here}{first} = {self.value_of(first)!r} already names the reward"
            yield True, name, rule, "one of them, or both as parts of reward.mix"
        for name in SET_FOR_FUNCTIONS:
            value, key = getattr(self, name), f"{here}{name}"
            rule = f"is for functions, and {here}{self.kind} is none"
            yield value and self.kind != "function", name, rule, f"leave out {key}"
            rule = f"limits a process, and {self.function} exists only in the driver"
            fix = f"{here}function=path.py:name, a function at the outermost level of a file"
            yield value and is_in_driver(self.function), name, rule, fix


class MixedReward(OneReward):
    """One part of reward.mix: the keys of a reward, and its weight."""

    weight: float = 1.0
    """Factor of this part's score in the sum."""


RESERVED = ("score", "greedy", "overlong_reward")
"""Names that metrics of the reward already have."""
