"""From a configuration to problems, a tokenizer and a model folder, before any engine starts.

`load` reads and checks the data fast, without a tokenizer. `prepare` makes the run's model folder
and renders the prompts.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from millrace import __version__
from millrace.config import AgentConfig, Config, ModelConfig, TeacherConfig
from millrace.config.keys import Work
from millrace.config.packaged import cache_folder
from millrace.config.reward_keys import OneReward
from millrace.data.chat import Chat, Reading
from millrace.data.curriculum import Curriculum
from millrace.data.demonstrations import Demonstrations
from millrace.data.prompts import PromptStream
from millrace.data.row_store import Progress, RowCache, quiet
from millrace.data.rows import Problem, RowCheck, check_rows, problem, texts
from millrace.data.sources import Rows, load_sources
from millrace.data.tokenizer import TEMPLATES
from millrace.data.user_code import failure
from millrace.data.user_code import load as load_code
from millrace.errors import bad_row, bad_value
from millrace.models import checks as model_checks
from millrace.models.shape import write_shape
from millrace.observe.user_metrics import KEY as METRICS
from millrace.observe.user_metrics import UserMetrics
from millrace.pipeline.checkpoint import read_manifest
from millrace.rewards.builtin import NEEDS_TRUTH, number
from millrace.rewards.functions import check_name
from millrace.rewards.sources import advice_for_chat, refusal, scorer_of
from millrace.run import rows, teachers
from millrace.run.agents import check_player, row_check
from millrace.run.model_folders import check_model, load_tokenizer
from millrace.run.rewards import check_functions
from millrace.schedule.schedule import Schedule
from millrace.types import (
    Prompt,
    Sample,
    Score,
    Segment,
    Stop,
    Tokens,
    Trajectory,
    floats_of,
    tokens_of,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CheckRow = Callable[[Problem, str], None]
Inspect = Callable[["PreTrainedTokenizerBase"], None] | None


@dataclass(frozen=True, slots=True)
class Sources:
    """The rows of all sources, read and checked."""

    train: Rows
    val: Rows | None
    sft: Rows
    check: RowCheck
    untaught: RowCheck
    """The check of rows that nothing trains on with RL."""

    def scored(self) -> list[tuple[Rows, str]]:
        """Return the rows whose responses are scored, with the column of their prompts."""
        return [
            (rows, self.check.prompt_key) for rows in (self.train, self.val) if rows is not None
        ]


Note = Callable[[str], None]
_EARLY = 2_000
"""Distinct rows of a source that are checked before any heavy import. `prepare` checks all."""

_ADVISED = 64
"""Prompts whose scorers are looked at."""
_FOR_AGENTS = ("tools", "agent_name", "tools_kwargs", "tool_selection", "interaction_kwargs")
"""Columns of TRL and verl that only agents read."""
_SHOWN = 1500
"""Characters of a prompt that a dry run shows."""


def silent(text: str) -> None:
    """Drop a note."""


def shown_slowly(show: Progress, after_s: float = 2.0, every_s: float = 0.0) -> Progress:
    """Return a view that shows the progress of work that takes longer than `after_s` seconds."""
    current, begun, shown = "", 0.0, 0.0

    def progress(work: str, done: int, total: int) -> None:
        nonlocal current, begun, shown
        now = time.monotonic()
        if work != current:
            current, begun, shown = work, now, 0.0
        if now - begun > after_s and now - shown > every_s:
            shown = now
            show(work, done, total)

    return progress


def load(
    config: Config, *, scored: bool = True, note: Note = silent, progress: Progress = quiet
) -> Sources:
    """Return the rows of a configuration's sources.

    `scored` says whether the run scores responses. Raises ConfigError or DataError before any heavy
    import.
    """
    check_model("model.path", config.model.path, config.rollout.engine)
    for name, teacher in config.teachers.items():
        check_model(f"teachers.{name}.path", teacher.path)
    _check_overrides(config.model)
    check_player(config.agents)
    data, seed = config.data, config.trainer.seed
    parts = config.reward.parts
    named = {key: part.function for key, part in parts.items() if part.kind == "function"}
    for section, name in named.items() if scored else ():
        check_name(name, f"{section}.function")
    functions = {key: name for key, name in named.items() if name or not config.agents.agent_kind}
    need_truth = any(name in NEEDS_TRUTH for name in functions.values())
    decide = (__version__, data.prompt_key, data.chat, need_truth, scored, functions, config.agents)

    def check_of(taught: Mapping[str, TeacherConfig], rewarded: bool) -> RowCheck:
        of_teachers = partial(teachers.check_row, taught, rewarded) if taught else None
        return RowCheck(
            data.prompt_key,
            need_truth,
            refusal if scored and "" in functions.values() else None,
            _row_check(data.chat, config.agents, functions if scored else {}, of_teachers),
            repr((*decide, taught, rewarded)),
        )

    untaught = check_of({}, True)
    check = check_of(config.teachers, config.learns_from_rewards) if scored else untaught
    cached = partial(
        load_sources, seed=seed, cache=RowCache(cache_folder() / "rows", note, progress)
    )
    train = cached(data.train_files, max_rows=data.train_max_samples)
    check_rows(train, check, _EARLY)
    val = None
    if data.val_files:
        val = cached(
            data.val_files, max_rows=data.val_max_samples, key="data.val_files", split="val"
        )
        check_rows(val, untaught)
        if len(val) > 100_000:
            raise bad_value(
                "data.val_files",
                data.val_files,
                f"has {len(val)} rows",
                "size=256 in the source, or data.val_max_samples=256",
            )
    sft = train
    if config.sft.files:
        sft = cached(config.sft.files, key="sft.files")
        check_rows(sft, replace(untaught, need_ground_truth=True, refusal=None))
    return Sources(train, val, sft, check, untaught)


def _row_check(
    chat: str, agents: AgentConfig, functions: Mapping[str, str], of_teachers: CheckRow | None
) -> CheckRow:
    """Return the check of each row's prompt, ground truth, teachers, and the columns of agents."""
    of_agents = row_check(agents)

    def check(row: Problem, where: str) -> None:
        if chat == "never" and not agents.agent_kind and not isinstance(row.prompt, str):
            rule = "data.chat=never reads strings, and these are messages for a chat template"
            raise bad_row(where, row.prompt, rule, "data.chat=auto, or a prompt that is a string")
        if of_agents is not None:
            of_agents(row, where)
        if of_teachers is not None:
            of_teachers(row, where)
        for section, function in functions.items():
            name = function or scorer_of(row.data_source, row.extra_info)
            if name == "last_number" and number(row.ground_truth) is None:
                rule = "is not a number, and the scorer last_number compares numbers"
                fix = f"a number, or {section}.function=math for formulas, or exact for texts"
                raise bad_row(f"{where}, ground truth", row.ground_truth, rule, fix)

    return check


@dataclass(frozen=True, slots=True)
class Problems:
    """Prompts in the model's tokens."""

    chat: Chat
    train: PromptStream
    val: Sequence[Prompt]
    demonstrations: Demonstrations
    notes: tuple[str, ...] = ()
    """Lines on how the prompts are read, and warnings of scorers that do not fit them."""

    def examples(self, start: int, count: int) -> list[tuple[Tokens, ...]]:
        """Return (prompt, answer with end of sequence) of demonstrations start .. start + count."""
        chosen = [self.demonstrations[i] for i in range(start, start + count)]
        eos = tokens_of(self.chat.eos_ids[:1])
        return [
            (self.chat.render(d.problem)[1], tokens_of(self.chat.encode(d.answer)) + eos)
            for d in chosen
        ]

    def scripts(self, start: int, count: int) -> list[tuple[Prompt, tuple[str, ...]]]:
        """Return demonstrations start .. start + count: a prompt, and the policy's turns."""
        found = []
        for i in range(start, start + count):
            d = self.demonstrations[i]
            p = self.chat.as_chat(d.problem)
            text, tokens = self.chat.render(p)
            prompt = Prompt(i, tokens, text, p.data_source, p.ground_truth, p.extra_info, p.columns)
            found.append((prompt, d.turns))
        return found


def prepare(
    config: Config,
    sources: Sources,
    model_folder: Path,
    *,
    checkpoint: Path | None = None,
    ahead: bool = False,
    tries: bool = False,
    note: Note = silent,
    progress: Progress = quiet,
) -> Problems:
    """Return the prompt streams, and write the model folder if it is missing.

    The model folder has the tokenizer and config.json. If a row is bad, no folder is written. The
    rows must be those of the `checkpoint`. With `ahead`, many rows are checked while a run goes on.
    With `tries`, the sampler and the metrics of the user are tried first.
    """
    growth: rows.Growth = ()
    if checkpoint is not None:
        growth, lines = rows.check(config.data, checkpoint, sources.train, sources.val)
        for line in lines:
            note(line)
    begun = 0 if checkpoint is None else read_manifest(checkpoint).begun
    made = (model_folder / "tokenizer_config.json").is_file()
    model, key, seed = config.model, config.data.prompt_key, config.trainer.seed
    tokenizer = (
        load_tokenizer("model.path", str(model_folder), trusts=model.trust_remote_code)
        if made
        else _tokenizer(model, sources, key, roles=bool(config.agents.agent_kind))
    )
    teachers.check_models(config.teachers, config.distillation, config.sft, tokenizer)
    player = config.agents.agent_kind
    chat = Chat(tokenizer, strings="never" if player else config.data.chat)
    if chat.strings == "always" and chat.template is None:
        fix = "chat_template.jinja in the folder, an instruct model, or data.chat=auto"
        rule = f"model.path = {model.path!r} has no chat template"
        raise bad_value("data.chat", "always", rule, fix)
    if config.sft.steps and not made and not chat.eos_ids:
        rule = (
            "its tokenizer has no eos_token, so no demonstration of the warm-up would have an end"
        )
        fix = "eos_token in its tokenizer_config.json, or sft.steps=0"
        raise bad_value("model.path", model.path, rule, fix)
    opened = partial(
        PromptStream.open,
        chat=chat,
        seed=seed,
        max_prompt_length=config.rollout.max_prompt_length,
        filter_overlong=config.data.filter_overlong_prompts,
        check=sources.check,
        progress=progress,
    )
    train = opened(
        sources.train,
        shuffle=config.data.shuffle,
        growth=growth,
        use_from=begun if ahead else None,
        note=note,
    )
    if checkpoint is not None:
        rows.check_kept(checkpoint, train)
    if tries and (curriculum := curriculum_of(config.data.sampler, config.schedule, train)):
        curriculum.try_out()
    if tries and (metrics := user_metrics_of(config.observe.metrics, chat, silent)):
        first = [train[i % len(train)] for i in range(2)]
        metrics.try_out(tuple(_made_up(p, config.rollout.n, plays=bool(player)) for p in first))
    val: Sequence[Prompt] = ()
    if sources.val is not None:
        stream = opened(sources.val, shuffle=False, check=sources.untaught)
        val = [stream[i] for i in range(len(stream))]
    if not made:
        _write_model(model, tokenizer, model_folder, config.rollout.max_len)
    demonstrations = Demonstrations(sources.sft, seed, config.sft.messiness, prompt_key=key)
    notes = prompt_notes(
        chat,
        train,
        chosen=config.data.chat,
        player=player,
        new_model=not model.path,
        parts=config.reward.parts,
    )
    idle = teachers.idle(config.teachers if tries else {}, train)
    lines = []
    if model.path and Path(model.path).is_dir() and not model_checks.has_weights(Path(model.path)):
        rule = "the folder has no weights, so they are random, except those of a checkpoint"
        fix = "*.safetensors in the folder; for a run's model, `millrace export RUN FOLDER`"
        lines.append(f"warning: model.path = {model.path!r}: {rule}. Fix: {fix}.")
    if repeated := sources.train.repeated:
        count = len(sources.train)
        lines.append(
            f"{repeated:,} of {count:,} training rows repeat another one, and each is trained: "
            f"{count - repeated:,} are distinct"
        )
    return Problems(chat, train, val, demonstrations, (*lines, *idle, *notes))


def curriculum_of(spec: str, schedule: Schedule, train: PromptStream) -> Curriculum | None:
    """Return the prompts in the order of data.sampler. Raise ConfigError if it names no function.

    Without drops, a prompt that the Ledger can admit never waits for the outcomes that decide it:
    at most capacity - 1 slots and lookahead - 1 prompts that were trained early follow the oldest
    unfinished one.
    """
    return Curriculum(train, spec, schedule.capacity + schedule.lookahead - 2) if spec else None


def user_metrics_of(spec: str, chat: Chat, note: Note) -> UserMetrics | None:
    """Return the metrics of observe.metrics. Raise ConfigError if it names no function."""
    return UserMetrics(spec, load_code(METRICS, spec), chat.decode, note, failure) if spec else None


def _made_up(prompt: Prompt, n: int, *, plays: bool) -> Sample:
    """Return a sample whose responses repeat the prompt. Each component of a score is 0."""
    drawn = Segment(prompt.tokens, log_probs=floats_of([-1.0] * len(prompt.tokens)), stop=Stop.EOS)
    said = ({"role": "assistant", "content": prompt.text},) if plays else ()
    one = replace(Trajectory.of((drawn,)), messages=said)
    scores = (Score(float(k % 2), extra=defaultdict(float)) for k in range(n))
    return Sample(prompt, tuple(map(one.with_score, scores)))


def first_prompts(chat: Chat, stream: PromptStream) -> Iterator[str]:
    """Yield the first row of each source as the policy reads it, with special tokens in « »."""
    rows = stream.rows
    for at in (0, *rows.ends[:-1]):
        where = rows.describe(at)
        _, tokens = chat.render(problem(rows, at, prompt_key=stream.prompt_key), where)
        text = chat.marked(tokens)
        if (left := len(text) - _SHOWN) > 0:
            half = _SHOWN // 2
            text = f"{text[:half]} ... ({left:,} characters) ... {text[-half:]}"
        yield f"{where} as the policy reads it, {len(tokens)} tokens, special ones in « »: {text}"


def prompt_notes(
    chat: Chat,
    train: PromptStream,
    *,
    chosen: str,
    player: str,
    new_model: bool,
    parts: Mapping[str, OneReward],
) -> Iterator[str]:
    """Yield how prompts are read, and a warning for each scorer that does not fit a chat model.

    The number of prompts that are left out comes first.

    `chosen` is data.chat, and `parts` are the rewards by section.
    """
    if train.filtered:
        yield f"left out {train.filtered} prompts that are longer than rollout.max_prompt_length"
    if player:
        if chosen != "auto":
            yield f"data.chat={chosen} is not read: agents make the messages"
        return
    if (not new_model or chosen != "auto") and (line := chat.described(train.readings)):
        yield line
    prompts = [train[i] for i in range(min(len(train), _ADVISED))]
    for name in _FOR_AGENTS:
        values = ((p.columns | p.extra_info).get(name) for p in prompts)
        if value := next((v for v in values if v and v != "single_turn_agent"), None):
            yield f"the column {name} = {value!r:.80} is not read: no key of agents says who plays"
    if chat.template in (None, *TEMPLATES) or not set(train.readings) - {Reading.PLAIN}:
        return
    end = chat.tokenizer.eos_token
    if end and any(prompt.text.rstrip().endswith(end) for prompt in prompts):
        rule = "prompts end with the end of a message, so the policy writes the head of its answer"
        fix = "a chat template that reads add_generation_prompt, or strings that were made with it"
        yield f"warning: data.train_files: {rule}. Fix: {fix}."
    warned: set[tuple[str, str]] = set()
    for prompt in prompts:
        row = prompt.data_source, prompt.extra_info, prompt.ground_truth
        for section, part in parts.items():
            key = section, prompt.data_source
            if part.kind != "function" or key in warned:
                continue
            if line := advice_for_chat(section, part.function, *row):
                warned.add(key)
                yield line


def prompts_of_an_epoch(
    config: Config,
    *,
    work: Work = "train",
    inspect: Inspect = None,
    note: Note = silent,
    resume_from: Path | None = None,
) -> int:
    """Check the data without a run, and return the number of its training prompts.

    Prompts that a run leaves out do not count. `inspect` gets the tokenizer, and `note` each line
    on how prompts are read. The rows must be those of the checkpoint `resume_from`.
    """

    def counted(work: str, done: int, total: int) -> None:
        note(f"{work}: {done:,}" + (f" of {total:,}" if total else ""))

    shown = shown_slowly(counted, 5.0, 5.0)
    scored, config = work != "sft", config.for_work(work)
    sources = load(config, scored=scored, note=note, progress=shown)
    if scored:
        asyncio.run(check_functions(config.reward, sources.scored(), note))
    if not (config.model.path or config.data.filter_overlong_prompts or inspect):
        check_rows(sources.train, sources.check)
    with TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        if resume_from is not None and (resume_from / "model" / "tokenizer_config.json").is_file():
            model = resume_from / "model"  # as in the run, which makes no tokenizer again
        prepared = prepare(
            config,
            sources,
            model,
            checkpoint=resume_from,
            tries=work == "train",
            note=note,
            progress=shown,
        )
    first = () if config.agents.agent_kind else first_prompts(prepared.chat, prepared.train)
    for line in (*prepared.notes, *first):
        note(line)
    if inspect:
        inspect(prepared.chat.tokenizer)
    return len(prepared.train)


def _check_overrides(model: ModelConfig) -> None:
    """Raise ConfigError if the model cannot have model.override_config."""
    if not model.override_config:
        return
    from millrace.models.overrides import refusal

    if model.path and not Path(model.path).is_dir():
        rule = f"model.path = {model.path!r} is a hub id, and its config.json cannot be changed"
        fix = f"`hf download {model.path} --local-dir FOLDER`, then model.path=FOLDER"
        raise bad_value("model.override_config", model.override_config, rule, fix)
    made = {"model_type": "qwen2", "rope_parameters": {}}
    settings = json.loads((Path(model.path) / "config.json").read_bytes()) if model.path else made
    if error := refusal(model.override_config, settings):
        raise error


def _tokenizer(
    model: ModelConfig, sources: Sources, prompt_key: str, *, roles: bool
) -> PreTrainedTokenizerBase:
    """Return the tokenizer of model.path, or a new one made of the texts, with marks of `roles`."""
    if model.path:
        return load_tokenizer("model.path", model.path, trusts=model.trust_remote_code)
    from millrace.data.tokenizer import make_tokenizer

    rows = [sources.train, sources.sft, *([sources.val] if sources.val is not None else [])]
    corpus = (t for part in rows for t in texts(part, prompt_key=prompt_key))
    tokenizer = make_tokenizer(model.tokenizer, corpus, model.tokenizer_vocab_size, roles=roles)
    size = model.shape.vocab_size
    if size and size < len(tokenizer):
        rule = f"the tokenizer made of the data has {len(tokenizer)} tokens"
        raise bad_value(
            "model.shape.vocab_size",
            size,
            rule,
            f"model.shape.vocab_size={len(tokenizer)} or more, or 0",
        )
    return tokenizer


def _write_model(
    model: ModelConfig, tokenizer: PreTrainedTokenizerBase, folder: Path, max_len: int
) -> None:
    """Write the tokenizer and, for a newly built model, its shape."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(folder)
    if model.path:
        return
    write_shape(
        folder,
        model.shape,
        vocab_size=model.shape.vocab_size or len(tokenizer),
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        max_position_embeddings=max(2048, max_len),
        dtype=model.dtype,
    )


def weights_folder(model: ModelConfig, model_folder: Path) -> str:
    """Return the folder or hub id from which engines read the architecture and any weights.

    It is the user's model, or the folder of a newly built one or of one with other settings.
    """
    path = "" if model.override_config else model.path
    return path if path and not Path(path).is_dir() else str(Path(path or model_folder).resolve())


def copy_config(model: ModelConfig, model_folder: Path) -> None:
    """Copy config.json of a user's model into the run's model folder, with its overrides.

    Checkpoints are then complete.
    """
    source = Path(model.path)
    if model.path and not source.is_dir():
        from transformers import AutoConfig

        hf = AutoConfig.from_pretrained(model.path, trust_remote_code=model.trust_remote_code)
        hf.save_pretrained(model_folder)
    elif model.path:
        for name in ("config.json", "generation_config.json"):
            if (source / name).is_file() and not (model_folder / name).is_file():
                shutil.copy(source / name, model_folder / name)
    if model.override_config:
        from millrace.models.overrides import write

        write(model.override_config, model.path, model_folder)
