"""Teachers outside of the trainer: their log-probs, their checks, their failures and their pace."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace import codec
from millrace.config import ModelShape, TeacherConfig, recipe
from millrace.data.tokenizer import make_tokenizer
from millrace.errors import ConfigError, DeadlineError, TeacherError
from millrace.models.model import load_model
from millrace.rewards.teacher import OwnTeacher, ServedTeacher
from millrace.rollout.episode import SingleTurn
from millrace.rollout.retry import RetryingTeacher
from millrace.rollout.sample import SampleRoller
from millrace.simulate import clock
from millrace.simulate.cost import CostModel
from millrace.types import (
    Author,
    Floats,
    Prompt,
    SamplingParams,
    Score,
    Segment,
    Stop,
    Thread,
    Tokens,
    Trajectory,
    floats_of,
    tokens_of,
)
from millrace.waits.registry import current
from tests.pipeline.simulated import RUNS, schedule_of
from tests.random_models import write_random
from tests.report.accounts_cases import Accounts, run
from tests.rollout.helpers import said
from tests.rollout.teacher_server import ModelServer, model_server
from tests.waiting import until_async

SHAPE = ModelShape(
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    intermediate_size=32,
)
PROMPT = Prompt(0, tokens_of([3, 5, 4]), "132", "d")
ids = st.lists(st.integers(2, 11), min_size=1, max_size=5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a small random model with its tokenizer."""
    path = tmp_path_factory.mktemp("teacher")
    tokenizer = make_tokenizer("chars", ["0123456789"], vocab_size=0)
    tokenizer.save_pretrained(str(path))
    write_random(path, SHAPE, vocab_size=len(tokenizer))
    load_model(str(path), seed=0, dtype="float32").save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def shared(folder: Path) -> Iterator[ModelServer]:
    with model_server(folder) as state:
        yield state


@pytest.fixture
def server(folder: Path) -> Iterator[ModelServer]:
    with model_server(folder) as state:
        yield state


def teacher_of(server: ModelServer, **keys: Any) -> ServedTeacher:
    quick = {"max_retries": 0, "retry_wait_s": 0.01, "model": "served", "base_url": server.url}
    return ServedTeacher.load("teachers.a", TeacherConfig(**quick | keys))


def asked(teacher: ServedTeacher, trajectory: Trajectory) -> list[float]:
    """Ask once. The client's connections belong to one event loop."""

    async def ask() -> Floats:
        async with teacher.client:
            return await teacher.log_probs(PROMPT, trajectory)

    return asyncio.run(ask()).tolist()


def checked(teacher: ServedTeacher, longest: int = 40, shift: int = 0) -> bool:
    async def check() -> bool:
        async with teacher.client:
            return await teacher.check(PROMPT, longest, lambda text: [int(c) + 2 for c in text])

    return asyncio.run(check())


# -- log-probs


@st.composite
def threads(draw: st.DrawFn) -> Thread:
    """Draw a thread with parts of the policy and of others, in any order."""
    parts = draw(st.lists(st.tuples(st.booleans(), ids), min_size=0, max_size=4))
    segments = [
        said(tokens) if own else Segment(tokens_of(tokens), Author.ENVIRONMENT)
        for own, tokens in parts
    ]
    opening = draw(st.none() | ids.map(tokens_of))
    return Thread(tuple(segments), opening)


def expected(model: Any, trajectory: Trajectory) -> list[float]:
    """Return log p of each policy token, from a pass of its own over its context."""
    values = []
    for thread in trajectory.threads:
        context = [*(PROMPT.tokens if thread.opening is None else thread.opening)]
        for segment in thread.segments:
            for token in segment.tokens:
                if segment.author is Author.POLICY:
                    with torch.no_grad():
                        logits = model(torch.tensor([context])).logits[0, -1]
                    values.append(logits.log_softmax(-1)[token].item())
                context.append(token)
    return values


@settings(max_examples=25)
@given(st.lists(threads(), max_size=3), st.sampled_from(["prompt_logprobs", "echo"]))
def test_each_token_of_the_policy_gets_the_log_prob_in_its_own_context(
    shared: ModelServer, drawn: list[Thread], form: Any
) -> None:
    shared.form = "vllm" if form == "prompt_logprobs" else "echo"
    teacher, trajectory = teacher_of(shared), Trajectory(tuple(drawn), ended="turns")
    teacher.form = form
    found = asked(teacher, trajectory)
    assert len(found) == trajectory.num_policy_tokens
    assert found == pytest.approx(expected(shared.model, trajectory), abs=1e-5)


def test_a_token_without_any_probability_has_minus_infinity(
    server: ModelServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "log_probs", lambda ids: [-9999.0] * (len(ids) - 1))
    assert asked(teacher_of(server), Trajectory.of((said([4]),))) == [-float("inf")]


def test_an_answer_without_a_tokens_log_prob_is_a_failure(
    server: ModelServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    teacher = teacher_of(server)
    monkeypatch.setattr(server, "log_probs", lambda ids: [-1.0] * (len(ids) - 1))
    answer = server.answer

    def shorter(path: str, body: dict[str, Any]) -> tuple[int, Any]:
        status, whole = answer(path, body)
        whole["choices"][0]["prompt_logprobs"].pop()
        return status, whole

    monkeypatch.setattr(server, "answer", shorter)
    with pytest.raises(TeacherError, match=r"no_log_probs: .*lacks the log-prob"):
        asked(teacher, Trajectory.of((said([4, 5]),)))
    figures = teacher.take_figures()
    assert (figures["failures"], figures["failures/no_log_probs"], figures["requests"]) == (1, 1, 1)
    assert figures["seconds"] > 0 and teacher.take_figures()["seconds"] == 0


def test_at_most_max_concurrency_requests_run_at_a_time(server: ModelServer) -> None:
    teacher = teacher_of(server, max_concurrency=2)
    server.wait_s = 0.02
    asked(teacher, Trajectory(tuple(Thread((said([4]),)) for _ in range(8))))
    assert server.most == 2 and server.requests == 8


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


def own(folder: Path, **keys: Any) -> OwnTeacher:
    config = TeacherConfig(path=str(folder), place="own", device="cpu", **keys)
    return OwnTeacher("teachers.a", config, 1.0)


@pytest.fixture(scope="module")
def processes(folder: Path, loop: asyncio.Runner) -> Iterator[OwnTeacher]:
    teacher = own(folder, batch_size=3)
    loop.run(teacher.start())
    yield teacher
    loop.run(teacher.close())


@settings(max_examples=25)
@given(st.lists(threads(), max_size=5))
def test_processes_of_its_own_read_the_same_in_batches(
    shared: ModelServer, processes: OwnTeacher, loop: asyncio.Runner, drawn: list[Thread]
) -> None:
    trajectory = Trajectory(tuple(drawn), ended="turns")
    found = loop.run(processes.log_probs(PROMPT, trajectory)).tolist()
    assert found == pytest.approx(expected(shared.model, trajectory), abs=1e-5)


def test_a_process_that_dies_is_named_and_replaced(folder: Path) -> None:
    async def ask() -> Floats:
        teacher, one = own(folder), Trajectory.of((said([4, 5]),))
        await teacher.start()
        try:
            (worker,) = teacher.pool.workers
            os.kill(worker.pid, signal.SIGSTOP)
            asking = asyncio.ensure_future(teacher.log_probs(PROMPT, one))
            await until_async(lambda: worker.running)
            os.kill(worker.pid, signal.SIGKILL)
            with pytest.raises(TeacherError, match="worker_died"):
                await asking
            assert teacher.take_figures()["failures/worker_died"] == 1
            return await teacher.log_probs(PROMPT, one)
        finally:
            await teacher.close()

    assert len(asyncio.run(ask())) == 2


def test_a_folder_without_a_causal_model_is_refused(tmp_path: Path) -> None:
    teacher = own(tmp_path)
    with pytest.raises(ConfigError, match=r"^teachers\.a\.path = .*no causal language model"):
        asyncio.run(teacher.start())


# -- checks


def test_a_check_compares_tokenizers_and_says_whether_it_could(server: ModelServer) -> None:
    own = server.tokenizer.encode("132", add_special_tokens=False)
    teacher = teacher_of(server)

    async def check(ids: list[int]) -> bool:
        teacher_ = teacher_of(server)
        async with teacher_.client:
            return await teacher_.check(PROMPT, 40, lambda text: ids)

    assert asyncio.run(check(own)) is True
    assert [len(one) for one in server.asked] == [3, 40] and teacher.form == "prompt_logprobs"
    with pytest.raises(ConfigError, match=r"teachers\.a\.model = 'served': its tokenizer reads"):
        asyncio.run(check([own[0], own[1] + 1, own[2]]))
    server.tokenizes = False
    assert asyncio.run(check([1])) is False


def test_a_check_finds_the_form_that_the_server_knows(server: ModelServer) -> None:
    server.form, server.tokenizes = "echo", False
    teacher = teacher_of(server)
    assert not checked(teacher) and teacher.form == "echo"


@pytest.mark.parametrize(
    ("state", "keys", "match"),
    [
        ({}, {"model": "other"}, r"\.model = 'other': .*serves no such.*Fix: .*\.model=served\."),
        ({"form": "none"}, {}, r"\.base_url = 'http.*gives no log-probs of a prompt's tokens"),
        ({"max_model_len": 40}, {}, r"\.model = 'served': .*no log-probs of 40 tokens.*is 40"),
        ({"refused": range(9)}, {}, r"\.base_url = .*unreachable: .*Fix: start the server"),
        ({"url": "/no"}, {}, r"\.base_url = .*http_404.*Fix: teachers\.a\.base_url=http://HOST"),
    ],
)
def test_a_teacher_that_cannot_teach_is_refused_by_name(
    server: ModelServer, state: dict[str, Any], keys: dict[str, Any], match: str
) -> None:
    for name, value in state.items():
        setattr(server, name, server.url + value if name == "url" else value)
    with pytest.raises(ConfigError, match=rf"^teachers\.a{match}"):
        checked(teacher_of(server, **keys))


OWN = ("teachers.a.path=x", "teachers.a.place=own")
SERVED = ("teachers.a.base_url=http://h/v1", "teachers.a.model=m")


@pytest.mark.parametrize(
    ("overrides", "match"),
    [
        (SERVED[:1], r"^teachers\.a\.model = '': the endpoint needs the name"),
        (SERVED[1:], r"^teachers\.a\.path = '': a teacher needs a model"),
        (
            ("teachers.a.path=x", *SERVED[1:]),
            r"^teachers\.a\.model = 'm': this teacher does not read it",
        ),
        (("teachers.a.path=x", "teachers.a.num_workers=2"), r"^teachers\.a\.num_workers = 2: this"),
        ((*SERVED, "teachers.a.num_workers=2"), r"^teachers\.a\.num_workers = 2: this teacher"),
        ((*SERVED, "teachers.a.place=own"), r"^teachers\.a\.place = 'own': teachers\.a\.base_url"),
        ((*OWN, "teachers.a.max_retries=2"), r"^teachers\.a\.max_retries = 2: this teacher"),
        ((*OWN, "distillation.loss_mode=forward_kl_topk"), r"^distillation\.loss_mode = "),
        ((*OWN, "teachers.a.share=trainer", "teachers.a.device=cpu"), r"^teachers\.a\.share = "),
        (("teachers.a.place=own",), r"^teachers\.a\.path = '': a teacher needs a model"),
        (("teachers.a.path=x", "teachers.a.on_failure=drop"), r"^teachers\.a\.on_failure = 'drop'"),
        ((*SERVED, "distillation.loss_mode=forward_kl_topk"), r"^distillation\.loss_mode = "),
        ((*SERVED, "rollout.temperature=0.7"), r"^rollout\.temperature = 0\.7: teachers\.a"),
        ((*SERVED, "teachers.a.wait_deadline_s=1700"), r"^teachers\.a\.wait_deadline_s = 1700"),
        ((SERVED[1], "teachers.a.base_url=h:80"), r"^teachers\.a\.base_url = 'h:80': is not an"),
        ((SERVED[1], "teachers.a.base_url=http://u:secret@h/v1"), r"^teachers\.a\.base_url = '\*"),
        (
            (SERVED[1], "teachers.a.base_url=http://h/v1?key=secret@"),
            r"base_url = 'h': may contain",
        ),
        ((*SERVED, "teachers.a.api_key_env=sk-1"), r"^teachers\.a\.api_key_env = '\.\.\.': must"),
    ],
)
def test_keys_that_contradict_each_other_are_refused(
    overrides: tuple[str, ...], match: str
) -> None:
    with pytest.raises(ConfigError, match=match) as caught:
        recipe.load("quickstart", list(overrides))
    assert "secret@" not in str(caught.value)


# -- pace


class Slow:
    """A teacher, or a reward, that takes the seconds of its list, one for each call."""

    def __init__(self, seconds: list[float]) -> None:
        self.seconds = [*seconds]

    async def log_probs(self, prompt: Prompt, trajectory: Trajectory) -> Floats:
        await asyncio.sleep(self.seconds[trajectory.segments[0].tokens[0]])
        return floats_of([-0.5] * trajectory.num_policy_tokens)

    async def score(self, prompt: Prompt, completions: Any) -> list[Score]:
        await asyncio.sleep(self.seconds[completions[0].tokens[0]])
        return [Score(1.0)]

    async def close(self) -> None: ...


times = st.lists(st.integers(0, 50).map(float), min_size=4, max_size=4)


@given(times, times, times)
def test_a_slow_teacher_stops_no_rollout_and_reads_while_the_reward_scores(
    draws: list[float], scores: list[float], reads: list[float]
) -> None:
    drawn: list[float] = []

    async def draw(tokens: Tokens, params: SamplingParams, name: str) -> tuple[Segment, ...]:
        i = int(name.rpartition("/")[2])
        await asyncio.sleep(draws[i])
        return (said([i, 7]),)

    async def roll() -> float:
        by = SampleRoller(
            SingleTurn(),
            Slow(scores),
            lambda tokens: "",
            SamplingParams(9),
            4,
            seed=0,
            teachers_of=lambda prompt: {"a": Slow(reads)},
        )
        now = asyncio.get_running_loop().time
        begin = now()
        done = lambda: drawn.append(now() - begin)  # noqa: E731
        sample = await by.roll(draw, PROMPT, 0, on_drawn=done)
        assert all(t.teachers["a"].tolist() == [-0.5, -0.5] for t in sample.trajectories)
        assert all(t.score == Score(1.0) for t in sample.trajectories)
        return now() - begin

    seconds = clock.run(roll())
    assert drawn == pytest.approx(sorted(draws))
    longest = max(d + max(s, r) for d, s, r in zip(draws, scores, reads, strict=True))
    assert seconds == pytest.approx(longest)


class Patchy:
    """A teacher that reads every third prompt slowly, and fails on every eighth."""

    def __init__(self, fails: bool) -> None:
        self.fails = fails

    async def log_probs(self, prompt: Prompt, trajectory: Trajectory) -> Floats:
        await asyncio.sleep(3.0 * (prompt.index % 3 == 0))
        if self.fails and prompt.index % 8 == 0:
            raise TeacherError("teacher_a", "died")
        return floats_of(-v for s in trajectory.segments for v in s.tokens)


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("mode", RUNS)
def test_every_trained_token_has_its_log_prob_in_every_mode(mode: str, fails: bool) -> None:
    accounts, teachers = Accounts(replicas=2), {"a": Patchy(fails)}
    teachers_of = lambda prompt: teachers if prompt.index % 2 == 0 else {}  # noqa: E731
    outcome = run(schedule_of(mode), 24, accounts, cost=CostModel(), teachers_of=teachers_of)
    taught = Counter[bool]()
    for _, sample in outcome.trained:
        for one in sample.trajectories:
            drawn = [-v for s in one.segments for v in s.tokens]
            read = sample.prompt.index % 2 == 0
            assert [v.tolist() for v in one.teachers.values()] == [drawn] * read
            taught[read] += 1
        assert not (fails and sample.prompt.index % 8 == 0)
    assert len(taught) == 2
    failed = [i for i in range(outcome.ledger.admitted) if i % 8 == 0] if fails else []
    assert outcome.ledger.dropped.get("teacher_a", 0) == len(failed)
    totals = accounts.tokens.totals()
    assert sum(totals.values()) == accounts.tokens.generated
    outcome.ledger.check()


# -- failures


class Dying:
    """A teacher that fails at first, or forever."""

    def __init__(self, failures: float, hang_s: float = 0.0) -> None:
        self.left, self.hang_s = failures, hang_s

    async def log_probs(self, prompt: Prompt, trajectory: Trajectory) -> Floats:
        await asyncio.sleep(self.hang_s)
        self.left -= 1
        if self.left >= 0:
            raise TeacherError("unreachable", "no connection")
        return floats_of([-1.0])


def patient(teacher: Dying, **keys: Any) -> RetryingTeacher:
    named: dict[str, Any] = {"address": "http://h/v1", "fix": "start it"}
    named |= {"deadline_s": 100.0, "drops": False}
    return RetryingTeacher("a", teacher, **named | keys)


def test_a_teacher_that_comes_back_loses_no_sample() -> None:
    said = list[str]()
    found = clock.run(patient(Dying(5), note=said.append).log_probs(PROMPT, Trajectory()))
    assert found.tolist() == [-1.0]
    (once,) = said
    assert once.startswith("teacher a at http://h/v1 failed, as counted in teacher/a/failures: ")


@pytest.mark.virtual_clock
async def test_a_dead_teacher_ends_the_run_and_is_named() -> None:
    now = asyncio.get_running_loop().time
    begin = now()
    match = (
        r"teacher a at http://h/v1 gave no .*wait_deadline_s = 100\. .*unreachable.*Fix: start it"
    )
    with pytest.raises(DeadlineError, match=match):
        await patient(Dying(float("inf"))).log_probs(PROMPT, Trajectory())
    assert 50 < now() - begin <= 100


def test_a_dead_teacher_drops_samples_if_it_may() -> None:
    with pytest.raises(TeacherError, match="http://h/v1: unreachable") as caught:
        clock.run(patient(Dying(1), drops=True).log_probs(PROMPT, Trajectory()))
    assert caught.value.reason == "teacher_a"


@pytest.mark.virtual_clock
async def test_a_wait_for_a_teacher_names_it() -> None:
    work = asyncio.ensure_future(patient(Dying(0, 9.0)).log_probs(PROMPT, Trajectory()))
    await asyncio.sleep(1.0)
    found = {f"{wait.whom}: {wait.what}" for wait in current().registry.open}
    await work
    assert "teacher a: log-probs of prompt 0" in found


# -- files


def test_trajectories_of_older_files_have_no_teachers() -> None:
    one = Trajectory.of((said([1], Stop.EOS),), Score(1.0))
    taught = Trajectory(one.threads, one.score, one.ended, teachers={"a": floats_of([-1.5])})
    assert codec.from_json(codec.to_json(taught), Trajectory) == taught
    assert codec.decoder(Trajectory).decode(codec.pack(taught)) == taught
    old = codec.to_json(one).replace(b',"teachers":{}', b"")
    assert b"teachers" not in old and codec.from_json(old, Trajectory) == one
