"""Keys that a resume may change: each is applied, refused by name, or reported as past."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
import torch

from millrace.config import Config
from millrace.config.explain import all_keys, describe, facts, section_of
from millrace.config.section import Compared, Fixed, FixedRows, Past
from millrace.errors import ConfigError
from millrace.models.model import write_shape
from millrace.run.folder import open_run_dir
from millrace.run.session import digests
from millrace.schedule.ledger import Slot, State
from millrace.train.fsdp import engine as fsdp_train
from millrace.types import Prompt, Sample, Score, Trajectory, floats_of, tokens_of
from tests.run.test_folder import checkpoint_of, config_of

CHANGED = "changed since the checkpoint, and used from here on"


def test_facts_are_of_keys_and_the_help_says_them() -> None:
    help_of = {key: meaning for key, _, _, meaning in describe()}
    for kind in (FixedRows, Fixed, Past, Compared):
        found = dict(facts(kind))
        assert found and all(help_of[key].endswith(str(fact)) for key, fact in found.items())
    sections = {key for key, field in all_keys() if section_of(field.annotation)}
    assert not sections & {key for kind in (Fixed, Past) for key, _ in facts(kind)}
    assert len(dict(facts(Fixed))) == len(list(facts(Fixed)))


def test_the_journal_knows_which_settings_shape_samples_and_weights() -> None:
    def of(*overrides: str) -> tuple[str, str]:
        return digests(config_of(*overrides).model_dump(mode="json"))

    samples, training = of()
    for key in (
        *("trainer.save_freq=7", "trainer.threads=2", "guard.enable=false"),
        *("trainer.stall_s=9", "trainer.on_stall=stop", "trainer.max_restarts=9"),
        *("rollout.stall_s=9", "rollout.heartbeat_s=9", "rollout.max_restarts=9"),
    ):
        assert of(key) == (samples, training)
    assert of("actor.optim.lr=0.5")[0] == samples and of("actor.optim.lr=0.5")[1] != training
    for key in ("rollout.n=5", "trainer.seed=9", "model.shape.hidden_size=32"):
        assert of(key)[0] != samples


@pytest.mark.parametrize(
    ("before", "now"),
    [
        ([], "rollout.temperature=0.7"),
        ([], "rollout.max_response_length=4"),
        ([], "rollout.max_prompt_length=7"),
        (["data.filter_overlong_prompts=true"], "rollout.max_prompt_length=9"),
        ([], "rollout.stop=[x]"),
        ([], "rollout.ignore_eos=true"),
        (["rollout.drawn_lengths.median=4"], "rollout.drawn_lengths.enable=true"),
        (
            ["rollout.drawn_lengths.enable=true", "rollout.drawn_lengths.median=4"],
            "rollout.drawn_lengths.median=3",
        ),
        ([], "data.train_max_samples=100"),
        ([], "data.filter_overlong_prompts=true"),
        ([], "data.prompt_key=question"),
        ([], "model.shape.hidden_size=32"),
        ([], "model.tokenizer=bpe"),
        (["model.tokenizer=bpe"], "model.tokenizer_vocab_size=300"),
        (["model.lora_rank=4"], "model.lora_alpha=8"),
        (["model.lora_rank=4"], "model.dtype=bfloat16"),
        ([], "agents.command=play"),
        (["agents.environment=chase"], "agents.environment="),
        (["agents.environment=chase"], "agents.tool_format=line"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(
    tmp_path: Path, before: list[str], now: str
) -> None:
    found = checkpoint_of(tmp_path / "run", *before)
    key = now.partition("=")[0]
    with pytest.raises(ConfigError, match=rf"^{key} = .*was made with .*Fix: {key}=.*or a new run"):
        open_run_dir(config_of(f"trainer.resume={found}", *before, now))


@pytest.mark.parametrize(
    "now",
    [
        "rollout.max_response_length=16",
        "rollout.max_prompt_length=16",
        "rollout.drawn_lengths.median=3",
        "model.lora_alpha=8",
        "model.dtype=bfloat16",
        "model.tokenizer_vocab_size=300",
        "mode=colocate_sync",
        "async_training.staleness_threshold=0.25",
        "actor.optim.weight_decay=0.1",
        "actor.ppo_mini_batch_size=16",
        "reward.function=exact",
        "data.val_max_samples=4",
        "rollout.engine=vllm",
        "trainer.n_gpus_per_node=2",
        "algorithm.kl_ctrl.kl_coef=0.1",
    ],
)
def test_what_can_be_honoured_is_taken(tmp_path: Path, now: str) -> None:
    found = checkpoint_of(tmp_path / "run")
    switch = "algorithm.use_kl_in_reward=false"
    run = open_run_dir(config_of(f"trainer.resume={found}", switch, now))
    assert run.resume_from == found
    assert {note.partition(":")[0] for note in run.notes} <= {CHANGED}


def test_the_address_of_a_server_may_change_and_its_kind_may_not(tmp_path: Path) -> None:
    found = checkpoint_of(tmp_path / "run", "agents.environment=openenv:http://a:1")
    same = "agents.environment=openenv:http://b:2"
    assert open_run_dir(config_of(f"trainer.resume={found}", same)).resume_from == found
    with pytest.raises(ConfigError, match="were played with it"):
        open_run_dir(config_of(f"trainer.resume={found}", "agents.environment=mcp:http://a:1"))


def test_a_program_may_change_and_limits_of_agents_too(tmp_path: Path) -> None:
    found = checkpoint_of(tmp_path / "run", "agents.command=play")
    now = "agents.command=play --again", "agents.max_tokens_per_turn=4"
    run = open_run_dir(config_of(f"trainer.resume={found}", *now))
    assert run.resume_from == found
    assert [note.partition(":")[0] for note in run.notes] == [CHANGED]


GDPO = "algorithm.adv_estimator=gdpo"
KEYS = "algorithm.gdpo_reward_keys"
MIX = "reward.mix={a: {function: exact}, b: {function: format}}"


@pytest.mark.parametrize(
    ("before", "now", "said"),
    [
        ([MIX], [MIX, GDPO], ""),
        ([MIX], [MIX, GDPO, "reward.mix.a.weight=2"], ""),
        ([MIX], ["reward.mix={b: {}, c: {}}", GDPO, f"{KEYS}=[b]"], ""),
        ([MIX], ["reward.mix={b: {}, c: {}}"], ""),
        ([MIX], ["reward.mix={b: {}, c: {}}", GDPO], "a, b, of another reward"),
        ([MIX], [MIX, GDPO, "reward.overlong_buffer={enable: true, len: 2}"], "of another reward"),
        ([MIX], [MIX, GDPO, "reward.mix.a.function=math"], "a, b, of another reward"),
        ([MIX], ["reward.mix={b: {}, c: {}}", GDPO, f"{KEYS}=[b, c]"], "a, b, without c"),
    ],
)
def test_gdpo_trains_no_finished_sample_by_the_components_of_another_reward(
    tmp_path: Path, before: list[str], now: list[str], said: str
) -> None:
    prompt = Prompt(0, tokens_of([1]), "p", "d")
    sample = Sample(prompt, (Trajectory(score=Score(1.0, {"a": 1.0, "b": 0.0})),), 0)
    slots = [Slot(prompt, 0, State.READY, sample=sample), Slot(prompt, 0)]
    checkpoint = checkpoint_of(tmp_path / "run", *before, slots=slots)
    config = config_of(f"trainer.resume={checkpoint}", *now)
    if not said:
        assert open_run_dir(config).resume_from == checkpoint
        return
    with pytest.raises(ConfigError, match=rf"^algorithm\.gdpo_reward_keys = .*{said}\. Fix: "):
        open_run_dir(config)


SERVED = ["teachers.a.base_url=http://h/v1", "teachers.a.model=m"]
PLACE = "teachers.a.place=own"
OTHER = ["teachers.b.base_url=http://h/v1", "teachers.b.model=m"]


@pytest.mark.parametrize(
    ("before", "now", "key"),
    [
        (SERVED, [*SERVED, "teachers.a.base_url=http://elsewhere/v1"], ""),
        (SERVED, [*SERVED, "teachers.a.weight=2"], ""),
        (SERVED, [*SERVED, "teachers.b.path=b"], ""),
        (SERVED, [*SERVED, *OTHER, "teachers.b.data_sources=[other]"], ""),
        ([], [], ""),
        (SERVED, [*SERVED, *OTHER], "teachers.b"),
        ([*SERVED, *OTHER, "teachers.b.data_sources=[other]"], [*SERVED, *OTHER], "teachers.b"),
        (["teachers.b.path=b"], OTHER, "teachers.b"),
        (SERVED, [*SERVED, "teachers.a.model=other"], "teachers.a.model"),
        (["teachers.a.path=a", PLACE], ["teachers.a.path=b", PLACE], "teachers.a.path"),
        (["teachers.a.path=a", PLACE], ["teachers.a.path=a", PLACE, "teachers.a.device=cpu"], ""),
        (["teachers.a.path=a"], ["teachers.a.path=a", PLACE], "teachers.a"),
    ],
)
def test_a_finished_sample_has_the_log_probs_of_its_teachers_outside(
    tmp_path: Path, before: list[str], now: list[str], key: str
) -> None:
    prompt = Prompt(0, tokens_of([1]), "p", "d")
    one = Trajectory(
        score=Score(1.0), teachers={"a": floats_of([])} if {*before} & {SERVED[0], PLACE} else {}
    )
    slots = [Slot(prompt, 0, State.READY, sample=Sample(prompt, (one,), 0)), Slot(prompt, 0)]
    checkpoint = checkpoint_of(tmp_path / "run", *before, slots=slots)
    config = config_of(f"trainer.resume={checkpoint}", *now)
    if not key:
        assert open_run_dir(config).resume_from == checkpoint
        return
    with pytest.raises(ConfigError, match=rf"^{key} = .*finished samples .* have .*\. Fix: "):
        open_run_dir(config)


def test_the_journal_is_used_if_a_teacher_has_another_address() -> None:
    def of(*overrides: str) -> tuple[str, str]:
        return digests(config_of(*overrides).model_dump(mode="json"))

    samples, training = of(*SERVED)
    for key in ("base_url=http://elsewhere/v1", "max_concurrency=2", "on_failure=drop"):
        assert of(*SERVED, f"teachers.a.{key}") == (samples, training)
    assert of(*SERVED, "teachers.a.weight=2")[0] == samples
    assert of(*SERVED, "teachers.a.weight=2")[1] != training
    assert of(*SERVED, "teachers.a.model=other")[0] != samples
    assert of(*OTHER)[0] != samples != of()[0]


def test_what_is_past_is_said(tmp_path: Path) -> None:
    adaptive = ["algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.type=adaptive"]
    found = checkpoint_of(tmp_path / "run", *adaptive)
    now = ["sft.steps=300", "sft.lr=1e-3", "algorithm.kl_ctrl.kl_coef=0.1", *adaptive]
    now += ["actor.optim.lr_warmup_steps=0", "actor.optim.lr_warmup_steps_ratio=0.5"]
    now += ["actor.optim.lr=0.5"]
    run = open_run_dir(config_of(f"trainer.resume={found}", *now))
    assert {note.partition(":")[0] for note in run.notes} == {
        "sft.steps = 300",
        "sft.lr = 0.001",
        "algorithm.kl_ctrl.kl_coef = 0.1",
        "actor.optim.lr_warmup_steps_ratio = 0.5",
        CHANGED,
    }
    lr = config_of().actor.optim.lr
    assert f"actor.optim.lr = 0.5 (was {lr})" in run.notes[-1] and "resume" not in run.notes[-1]


def test_a_changed_key_that_the_run_does_not_read_is_not_said_to_be_used(tmp_path: Path) -> None:
    found = checkpoint_of(tmp_path / "run")
    off = "algorithm.use_kl_in_reward=false", "algorithm.kl_ctrl.kl_coef=0.1"
    assert not open_run_dir(config_of(f"trainer.resume={found}", *off)).notes


def test_a_changed_part_is_said_by_the_keys_that_are_set(tmp_path: Path) -> None:
    parts = [f"reward.mix.{name}.function={__file__}:{name}" for name in ("one", "other")]
    found = checkpoint_of(tmp_path / "run", *parts)
    (note,) = open_run_dir(
        config_of(f"trainer.resume={found}", *parts, "reward.mix.other.weight=0.5")
    ).notes
    then, now = ("{'one': {'function': '", "'weight': 0.5}} (was {'one': {'function': '")
    assert then in note and now in note and "template" not in note and "timeout_s" not in note


def test_another_model_is_refused_and_the_same_one_elsewhere_is_not(tmp_path: Path) -> None:
    shape = Config().model.shape
    deeper = shape.model_copy(update={"num_hidden_layers": 5})
    for name, one in (("mine", shape), ("moved", shape), ("other", deeper)):
        write_shape(tmp_path / name, one, vocab_size=32)
    found = checkpoint_of(tmp_path / "run", f"model.path={tmp_path / 'mine'}")
    config = (tmp_path / "mine" / "config.json").read_bytes()
    (found / "model" / "config.json").write_bytes(config)  # as problems.copy_config does
    assert "model/config.json" not in json.loads((found / "manifest.json").read_text())["files"]
    said = f"trainer.resume={found}"
    moved = config_of(said, f"model.path={tmp_path / 'moved'}")
    assert open_run_dir(moved).resume_from == found
    with pytest.raises(ConfigError, match=r"model.path = .*num_hidden_layers is 5.*made with 3"):
        open_run_dir(config_of(said, f"model.path={tmp_path / 'other'}"))
    for folder, text in ((found / "model", "old"), (tmp_path / "moved", "new")):
        (folder / "chat_template.jinja").write_text(text)
    assert any("chat template has no effect" in note for note in open_run_dir(moved).notes)
    (tmp_path / "moved" / "chat_template.jinja").write_text("old")
    (note,) = open_run_dir(moved).notes
    assert note.startswith(f"{CHANGED}: model.path = ")
    more = json.loads(config) | {"num_experts_per_tok": 4}
    (tmp_path / "other" / "config.json").write_text(json.dumps(more))
    with pytest.raises(ConfigError, match=r"num_experts_per_tok is 4.*made with None"):
        open_run_dir(config_of(said, f"model.path={tmp_path / 'other'}"))
    with pytest.raises(ConfigError, match=r"model.path = 'some/model'.*Fix: model.path=.*mine"):
        open_run_dir(config_of(said, "model.path=some/model"))


def test_the_optimizer_takes_its_settings_from_the_configuration(tmp_path: Path) -> None:
    """Moments come from the checkpoint. Weight decay, betas, eps and a fixed KL weight do not."""
    write_shape(tmp_path / "model", Config().model.shape, vocab_size=32)

    def engine(**optim: object) -> fsdp_train.FsdpTrainEngine:
        config = Config(
            trainer={"device": "cpu"},
            actor={"optim": optim},
            critic={"optim": optim},
            algorithm={
                "adv_estimator": "gae",
                "kl_ctrl": {"kl_coef": 0.5 if optim else 0.001},
            },
        )
        made = fsdp_train.build(config, str(tmp_path / "model"), rank=0, world_size=1)
        made.restart(config.actor.optim, 10)
        return made

    asyncio.run(engine().save(str(tmp_path / "saved")))
    now = engine(weight_decay=0.2, betas=(0.8, 0.9), eps=1e-6)
    asyncio.run(now.load(str(tmp_path / "saved")))
    assert now.kl_coef == 0.5
    for model in (now.actor, now.critic):
        assert model is not None and isinstance(model.optimizer, torch.optim.AdamW)
        groups = model.optimizer.param_groups
        assert [(tuple(g["betas"]), g["eps"]) for g in groups] == [((0.8, 0.9), 1e-6)] * 2
        assert [g["weight_decay"] for g in groups] == [0.2, 0.0]
        assert [min(p.ndim for p in g["params"]) >= 2 for g in groups] == [True, False]


def test_an_adaptive_kl_goes_on_where_it_was(tmp_path: Path) -> None:
    write_shape(tmp_path / "model", Config().model.shape, vocab_size=32)
    ctrl = {"type": "adaptive", "kl_coef": 0.5}
    config = Config(trainer={"device": "cpu"}, algorithm={"kl_ctrl": ctrl})
    made = fsdp_train.build(config, str(tmp_path / "model"), rank=0, world_size=1)
    made.restart(config.actor.optim, 10)
    made.kl_coef = 0.25
    asyncio.run(made.save(str(tmp_path / "saved")))
    made.restart(config.actor.optim, 10)
    asyncio.run(made.load(str(tmp_path / "saved")))
    assert made.kl_coef == 0.25
