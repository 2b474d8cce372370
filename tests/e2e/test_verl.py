"""The example of verl's fully-async recipe, with its own keys, trains from a parquet file."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]

from tests.e2e.runs import millrace

EXAMPLE = [
    "data.prompt_key=prompt",
    "data.truncation=left",
    "data.max_prompt_length=16",
    "data.max_response_length=4",
    "data.train_batch_size=0",
    "data.gen_batch_size=1",
    "data.return_raw_chat=True",
    "actor_rollout_ref.rollout.n=4",
    "algorithm.adv_estimator=grpo",
    "algorithm.use_kl_in_reward=False",
    "algorithm.kl_ctrl.kl_coef=0.0",
    "actor_rollout_ref.actor.fsdp_config.strategy=fsdp2",
    "critic.strategy=fsdp2",
    "actor_rollout_ref.actor.use_kl_loss=False",
    "actor_rollout_ref.actor.kl_loss_coef=0.0",
    "actor_rollout_ref.actor.clip_ratio_low=0.2",
    "actor_rollout_ref.actor.clip_ratio_high=0.28",
    "actor_rollout_ref.actor.clip_ratio_c=10.0",
    "actor_rollout_ref.model.use_remove_padding=True",
    "actor_rollout_ref.hybrid_engine=False",
    "actor_rollout_ref.actor.use_dynamic_bsz=True",
    "actor_rollout_ref.ref.log_prob_use_dynamic_bsz=True",
    "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=True",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=512",
    "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu=512",
    "actor_rollout_ref.actor.optim.lr=1e-3",
    "actor_rollout_ref.actor.optim.lr_warmup_steps=1",
    "actor_rollout_ref.actor.optim.weight_decay=0.1",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    "actor_rollout_ref.actor.fsdp_config.param_offload=False",
    "actor_rollout_ref.actor.fsdp_config.optimizer_offload=False",
    "actor_rollout_ref.actor.entropy_coeff=0",
    "actor_rollout_ref.actor.grad_clip=1.0",
    "actor_rollout_ref.actor.loss_agg_mode=token-mean",
    "actor_rollout_ref.actor.ulysses_sequence_parallel_size=1",
    "actor_rollout_ref.actor.fsdp_config.fsdp_size=-1",
    "actor_rollout_ref.rollout.name=hf",
    "actor_rollout_ref.rollout.mode=async",
    "actor_rollout_ref.rollout.calculate_log_probs=True",
    "actor_rollout_ref.rollout.temperature=1.0",
    "actor_rollout_ref.rollout.top_p=1.0",
    "actor_rollout_ref.rollout.top_k=-1",
    "actor_rollout_ref.rollout.val_kwargs.temperature=1.0",
    "actor_rollout_ref.rollout.val_kwargs.top_p=0.7",
    "actor_rollout_ref.rollout.val_kwargs.top_k=-1",
    "actor_rollout_ref.rollout.val_kwargs.do_sample=True",
    "actor_rollout_ref.rollout.val_kwargs.n=1",
    "reward.reward_manager.name=dapo",
    "+reward.reward_kwargs.overlong_buffer_cfg.enable=True",
    "+reward.reward_kwargs.overlong_buffer_cfg.len=2",
    "+reward.reward_kwargs.overlong_buffer_cfg.penalty_factor=1.0",
    "+reward.reward_kwargs.overlong_buffer_cfg.log=False",
    "+reward.reward_kwargs.max_resp_len=4",
    "trainer.logger=['console','tensorboard']",
    "trainer.project_name=DAPO",
    "trainer.experiment_name=dapo_tiny",
    "trainer.val_before_train=True",
    "trainer.save_freq=-1",
    "trainer.resume_mode=auto",
    "trainer.nnodes=1",
    "trainer.n_gpus_per_node=1",
    "rollout.nnodes=1",
    "rollout.n_gpus_per_node=1",
    "rollout.total_rollout_steps=32",
    "trainer.total_epochs=10",
    "trainer.test_freq=2",
    "async_training.staleness_threshold=0.5",
    "async_training.trigger_parameter_sync_step=2",
    "async_training.require_batches=2",
    "async_training.partial_rollout=True",
    "model.dtype=float32",
    "reward.function=exact",
]


def test_the_fully_async_example_trains_with_its_own_keys(tmp_path: Path) -> None:
    rows = [
        {
            "prompt": [{"role": "user", "content": f"{a}+{b}="}],
            "data_source": "sums",
            "reward_model": {"style": "rule", "ground_truth": str(a + b)},
        }
        for a in range(5)
        for b in range(4)
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "train.parquet")
    files = [
        f"data.train_files={tmp_path / 'train.parquet'}",
        f"data.val_files={tmp_path / 'train.parquet'}",
        f"trainer.default_local_dir={tmp_path / 'run'}",
        "data.val_max_samples=4",
    ]
    name = "--config-name=fully_async_ppo_trainer.yaml"
    done = millrace("train", "--config-path=config", name, *EXAMPLE, *files, "--json").json
    assert done["complete"] and done["mode"] == "async_partial"
    assert (done["versions"], done["samples_trained"], done["optimizer_steps"]) == (2, 32, 8)
    assert "val/sums/mean@1" in done["val"] and (tmp_path / "run" / "checkpoints").is_dir()
