"""The keys of one reward: a function, a reward model or a judge."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from millrace.config.endpoint_keys import EndpointConfig, PlaceConfig
from millrace.config.section import Home, Section
from millrace.data.user_code import is_in_driver
from millrace.errors import bad_value

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

    def check_at(self, key: str) -> None:
        """Raise ConfigError for a value that cannot work. `key` is this section's name."""
        self.check_endpoint(key)
        if "{response}" not in self.template:
            fix = "a text with {prompt} and {response}"
            raise bad_value(f"{key}.template", self.template, "has no {response}", fix)
        try:
            groups = re.compile(self.pattern).groups
        except re.error as error:
            rule = f"is not a regular expression: {error}"
            raise bad_value(f"{key}.pattern", self.pattern, rule, r"SCORE:\s*(\d+)") from None
        if not groups:
            rule = "has no group for the score"
            raise bad_value(f"{key}.pattern", self.pattern, rule, r"SCORE:\s*(\d+)")
        if self.min >= self.max:
            rule = f"must be less than {key}.max = {self.max:g}"
            raise bad_value(f"{key}.min", self.min, rule, f"{key}.min={self.max - 1:g}")


class FormatConfig(Section):
    pattern: str = r"<think>(?:(?!</?think>).)*</think>\s*<answer>(?:(?!</?answer>).)*</answer>\s*"
    """Regular expression of a well-formed response, for reward.function=format.

    The whole response must match. A dot matches every character, also the end of a line.
    """

    def check_at(self, key: str) -> None:
        """Raise ConfigError if the pattern is no regular expression. `key` is this section's name."""
        try:
            re.compile(self.pattern, re.DOTALL)
        except re.error as error:
            raise bad_value(
                f"{key}.pattern",
                self.pattern,
                f"is not a regular expression of Python: {error}",
                "correct it; try it with re.compile(pattern, re.DOTALL)",
            ) from None


class RepetitionPenaltyConfig(Section):
    """The options of reward.function=repetition_penalty."""

    ngram_size: int = Field(3, ge=1)
    """Words in a row that count as one n-gram."""
    max_penalty: float = Field(-1.0, le=0)
    """Score of a response of which all n-grams are repeated. Without a repetition it is 0."""


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

    def check_at(self, key: str) -> None:
        """Raise ConfigError if keys of this reward contradict each other."""
        named = {
            "function": self.function,
            "model.path": self.model.path,
            "judge.model": self.judge.model,
        }
        chosen = [name for name, value in named.items() if value]
        if len(chosen) > 1:
            raise bad_value(
                f"{key}.{chosen[1]}",
                named[chosen[1]],
                f"{key}.{chosen[0]} = {named[chosen[0]]!r} already names the reward",
                "one of them, or both as parts of reward.mix",
            )
        for name in SET_FOR_FUNCTIONS:
            if (value := getattr(self, name)) and self.kind != "function":
                rule = f"is for functions, and {key}.{self.kind} is none"
                raise bad_value(f"{key}.{name}", value, rule, f"leave out {key}.{name}")
        for name in SET_FOR_FUNCTIONS if is_in_driver(self.function) else ():
            if value := getattr(self, name):
                rule = f"limits a process, and {self.function} exists only in the driver"
                fix = f"{key}.function=path.py:name, a function at the outermost level of a file"
                raise bad_value(f"{key}.{name}", value, rule, fix)
        self.format.check_at(f"{key}.format")
        self.model.check_place(f"{key}.model")
        self.judge.check_at(f"{key}.judge")


class MixedReward(OneReward):
    """One part of reward.mix: the keys of a reward, and its weight."""

    weight: float = 1.0
    """Factor of this part's score in the sum."""


_RESERVED = ("score", "greedy", "overlong_reward")
"""Names that metrics of the reward already have."""


def check_mix(mix: Mapping[str, MixedReward], plain: OneReward) -> None:
    """Raise ConfigError if a part of reward.mix is wrong, or if a plain reward is set too."""
    for name, part in mix.items():
        if not re.fullmatch(r"[A-Za-z]\w*", name) or name in _RESERVED:
            rule = f"a part's name has letters, digits and _, and is none of {', '.join(_RESERVED)}"
            raise bad_value("reward.mix", name, rule, "another name for this part")
        part.check_at(f"reward.mix.{name}")
    named: dict[str, object] = {
        "function": plain.function,
        "model.path": plain.model.path,
        "judge.model": plain.judge.model,
        **{name: getattr(plain, name) for name in SET_FOR_FUNCTIONS},
    }
    for key, value in named.items():
        if mix and value:
            rule = "reward.mix already names the rewards"
            raise bad_value(f"reward.{key}", value, rule, f"a part of reward.mix with {key}")
