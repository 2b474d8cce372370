"""The whole configuration. It needs no torch.

`keys.py` has the root, and each section has a file of its own. `recipe.py` reads recipes and
overrides.
"""

from millrace.config.agent_keys import AgentConfig
from millrace.config.algorithm_keys import (
    ActorConfig,
    AlgorithmConfig,
    CriticConfig,
    KlType,
    OptimConfig,
    TppoConfig,
)
from millrace.config.data_keys import DataConfig, RewardConfig
from millrace.config.keys import Config, Sides
from millrace.config.model_keys import ModelConfig, ModelShape, SftConfig
from millrace.config.reward_keys import JudgeConfig, OneReward, RewardModelConfig
from millrace.config.rollout_keys import RolloutConfig
from millrace.config.teacher_keys import DistillationConfig, TeacherConfig
from millrace.config.trainer_keys import GuardConfig, MegatronConfig, ReportConfig, TrainerConfig

__all__ = [
    "ActorConfig",
    "AgentConfig",
    "AlgorithmConfig",
    "Config",
    "CriticConfig",
    "DataConfig",
    "DistillationConfig",
    "GuardConfig",
    "JudgeConfig",
    "KlType",
    "MegatronConfig",
    "ModelConfig",
    "ModelShape",
    "OneReward",
    "OptimConfig",
    "ReportConfig",
    "RewardConfig",
    "RewardModelConfig",
    "RolloutConfig",
    "SftConfig",
    "Sides",
    "TeacherConfig",
    "TppoConfig",
    "TrainerConfig",
]
