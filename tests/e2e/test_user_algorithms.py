"""A loss and an estimator in a file of the user's: a real run, the command that checks them, and errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from millrace.run import algorithms
from tests.e2e import runs
from tests.e2e.runs import millrace

FILE = """
import torch
from millrace.algorithms.advantage import AdvantageBatch, Advantages, estimator
from millrace.algorithms.policy_loss import LossInput, LossOptions, policy_loss

class Options(LossOptions):
    pull: float = 0.1

@policy_loss(options=Options)
def pulled(inputs, options):
    x = inputs.trained()
    loss = -x.advantages * x.log_probs + options.pull * x.log_ratio().square()
    return loss, x.statistics(log_ratio=x.log_ratio(), clipped=torch.ones_like(loss) * x.mask)

@estimator("shifted")
def shifted(batch, options):
    return batch.scores - 0.5

def plain(inputs, options):
    x = inputs.trained()
    return -x.advantages * x.log_probs

def fails(inputs, options):
    return inputs.log_probs.mean()

def unmasked(inputs, options):
    return -inputs.advantages * inputs.log_probs

def first_half(batch, tokens, advantages):
    assert tokens.shape == advantages.shape and tokens.dtype == torch.int64
    ends = batch.lengths.cumsum(0)[torch.arange(len(batch.lengths)).repeat_interleave(batch.lengths)]
    left = ends - torch.arange(len(tokens))
    return (left > batch.each_token(batch.lengths) / 2).double()

@estimator("valued", needs={"values"}, reads={"gamma"}, by_token=True)
def valued(batch, options):
    return Advantages(batch.rewards() * options.gamma - batch.values, batch.rewards())

@estimator("no_targets", needs={"values"}, by_token=True)
def no_targets(batch, options):
    return batch.rewards() - batch.values

def not_a_number(inputs, options):
    x = inputs.trained()
    return -x.advantages * x.log_probs / (x.log_probs - x.log_probs)

def too_few(batch, tokens, advantages):
    return batch.scores

def turned(i, rows, outcomes):
    return -1 - i % len(rows) + len(rows)

def needs_a_critic(batch, options):
    return batch.scores - batch.values[:1]
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(FILE)
    return path


async def test_a_run_trains_with_a_loss_an_estimator_and_its_critic(
    tmp_path: Path, file: Path
) -> None:
    keys = [
        f"actor.policy_loss.loss_mode={file}:pulled",
        "actor.policy_loss.options.pull=0.5",
        *(f"algorithm.adv_estimator={file}:valued", "algorithm.gamma=0.5", "critic.optim.lr=1e-3"),
    ]
    async with runs.session(tmp_path, *keys) as s:
        assert (await runs.run(s, tmp_path / "run", *keys)).complete
    rows = [row for row in runs.rows(tmp_path / "run") if "actor/pg_clipfrac" in row]
    # Only this loss marks every trained token as clipped.
    assert rows and all(row["actor/pg_clipfrac"] == 1.0 for row in rows)
    assert any(row.get("critic/grad_norm", 0) > 0 for row in rows)


def test_a_run_resumes_and_exports_from_another_folder_after_its_file_moved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, other, run = tmp_path / "first", tmp_path / "other", tmp_path / "run"
    for folder in (first, other):
        folder.mkdir()
    ran = tmp_path / "ran"
    (first / "mine.py").write_text(FILE + f"open({str(ran)!r}, 'w').close()\n")
    monkeypatch.chdir(first)
    keys = [
        *("actor.policy_loss.loss_mode=mine.py:pulled", "algorithm.adv_estimator=mine.py:shifted"),
        *("algorithm.token_weights=mine.py:first_half", "algorithm.gamma=1"),
        "data.sampler=mine.py:turned",
        *("sft.steps=1", "rollout.n=2", "actor.ppo_mini_batch_size=2", "report.enable=false"),
        *("trainer.save_freq=1", "trainer.val_before_train=false", "data.val_max_samples=2"),
        f"trainer.run_dir={run}",
    ]
    steps = "rollout.total_rollout_steps="
    done = millrace("train", "quickstart", *keys, f"{steps}8")
    assert done.code == 0, done.printed
    assert ran.exists()
    ran.unlink()
    for reader in ("ledger", "why", "report", "query"):
        done = millrace(reader, str(run))
        assert done.code == 0 and "not a configuration" not in done.printed, done.printed
    assert not ran.exists(), "a command that reads a run ran the user's code"
    (first / "mine.py").rename(other / "mine.py")
    monkeypatch.chdir(other)
    keys += ["trainer.resume=auto", f"{steps}16"]
    done = millrace("train", "quickstart", *keys)
    assert done.code == 0 and "resum" in done.printed, done.printed
    (other / "mine.py").unlink()
    done = millrace("report", str(run))
    assert done.code == 0 and "mine.py" not in done.printed, done.printed
    checkpoint = max((run / "checkpoints").glob("version-*"))
    done = millrace("export", str(checkpoint), str(tmp_path / "model"))
    assert done.code == 0 and (tmp_path / "model" / "config.json").is_file(), done.printed


@pytest.mark.parametrize(
    ("name", "code", "words"),
    [
        ("pulled", 0, ["every property holds", "actor.policy_loss.loss_mode="]),
        ("shifted", 0, ["every property holds", "algorithm.adv_estimator="]),
        ("plain", 0, ["every property holds"]),
        ("fails", 1, ["shape ()", "Fix: return a loss for each token"]),
        ("unmasked", 1, ["mask", "inputs.trained()"]),
        ("needs_a_critic", 1, ["NoneType"]),
        ("nothing", 2, ["has no 'nothing'", "plain"]),
    ],
)
def test_the_command_names_what_breaks(name: str, code: int, words: list[str], file: Path) -> None:
    done = millrace("check-algorithm", f"{file}:{name}")
    assert done.code == code, done.printed
    assert all(word in done.printed for word in words), done.printed


def test_the_command_takes_options_and_names_of_the_package(file: Path) -> None:
    assert millrace("check-algorithm", f"{file}:pulled", "pull=2").code == 0
    assert millrace("check-algorithm", "sapo", "tau_pos=2").code == 0
    for wrong in ([f"{file}:pulled", "push=2"], ["sapo", "push=2"], [f"{file}:shifted", "push=2"]):
        done = millrace("check-algorithm", *wrong)
        assert done.code == 2 and "push = 2" in done.printed and "Traceback" not in done.printed
    done = millrace("check-algorithm", f"{file}:unmasked", "--json")
    found = json.loads(done.printed.splitlines()[-1])
    assert done.code == 1 and "mask" in {b["property"] for b in found["broken"]}


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (["actor.policy_loss.loss_mode={}:fails", "mode=colocate_sync"], ["shape ()"]),
        (["actor.policy_loss.loss_mode={}:plain"], ["bounds_stale=True"]),
        (["actor.policy_loss.loss_mode={}:pulled", "actor.policy_loss.options.push=1"], ["push"]),
        (["actor.policy_loss.loss_mode={}:pulled", "actor.policy_loss.tau_pos=2"], ["sapo"]),
        (["actor.policy_loss.options.pull=1"], ["actor.policy_loss.options"]),
        (["actor.policy_loss.loss_mode=vanila"], ["vanilla"]),
        (["algorithm.adv_estimator=grpoo"], ["grpo"]),
        (["algorithm.adv_estimator={}:needs_a_critic"], ["NoneType"]),
        (["algorithm.adv_estimator={}:no_targets"], ["critic", "Advantages(tokens, returns)"]),
        (["algorithm.adv_estimator={}:shifted", "algorithm.gamma=0.5"], ["algorithm.gamma"]),
        (["actor.policy_loss.loss_mode={}:not_a_number", "mode=colocate_sync"], ["not finite"]),
        (
            ["actor.policy_loss.loss_mode={}:pulled", "actor.policy_loss.options.clip_low=1"],
            ["actor.policy_loss.options.clip_low", "actor.clip_ratio_low"],
        ),
        (["algorithm.token_weights={}:too_few"], ["algorithm.token_weights", "trained token"]),
        (["algorithm.token_weights={}:none"], ["algorithm.token_weights", "has no 'none'"]),
        (["algorithm.adv_estimator={}:shifted", "algorithm.lam=0.5"], ["gae"]),
    ],
)
def test_a_run_refuses_what_cannot_work(
    keys: list[str], words: list[str], file: Path, tmp_path: Path
) -> None:
    given = [key.format(file) for key in keys]
    for more in ([f"trainer.run_dir={tmp_path / 'run'}"], ["--dry-run"]):
        done = millrace("train", "quickstart", *given, *more)
        assert done.code == 2 and all(word in done.printed for word in words), done.printed
        assert "Traceback" not in done.printed and not (tmp_path / "run").exists()


def test_a_loss_that_hangs_is_named_at_a_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hang.py").write_text(
        "import threading\n\ndef hang(inputs, options):\n    threading.Event().wait()\n"
    )
    monkeypatch.setattr(algorithms, "CHECK_S", 0.5)
    keys = [f"actor.policy_loss.loss_mode={tmp_path}/hang.py:hang", "mode=colocate_sync"]
    done = millrace("train", "quickstart", *keys, f"trainer.run_dir={tmp_path / 'run'}")
    assert done.code == 2 and "hang.py:hang" in done.printed and "took over" in done.printed, (
        done.printed
    )
    assert not (tmp_path / "run").exists()


def test_a_broken_property_is_a_warning(file: Path) -> None:
    keys = [f"actor.policy_loss.loss_mode={file}:unmasked", "mode=colocate_sync", "--dry-run"]
    done = millrace("train", "quickstart", *keys)
    assert done.code == 0 and "warning" in done.printed and "mask" in done.printed
