"""The whole configuration. It needs no torch.

`keys.py` has the root, and each section has a file of its own. `recipe.py` reads recipes and
overrides.
"""

from millrace.config.agent_keys import AgentConfig
from millrace.config.algorithm_keys import (
    ActorConfig,
    AlgorithmConfig,
    CriticConfig,
    FilterGroupsConfig,
    KlCtrlConfig,
    KlType,
    OptimConfig,
    PolicyLossConfig,
    TppoConfig,
)
from millrace.config.correction_keys import CorrectionConfig
from millrace.config.data_keys import DataConfig, OverlongBufferConfig, RewardConfig
from millrace.config.keys import Config, Derived, Sides
from millrace.config.megatron_keys import MegatronConfig
from millrace.config.model_keys import ModelConfig, ModelShape, SftConfig
from millrace.config.reward_keys import JudgeConfig, MixedReward, OneReward, RewardModelConfig
from millrace.config.rollout_keys import DrawnLengthsConfig, RolloutConfig, ValidationConfig
from millrace.config.schedule_keys import AsyncConfig
from millrace.config.section import Section
from millrace.config.teacher_keys import DistillationConfig, TeacherConfig
from millrace.config.trainer_keys import (
    GuardConfig,
    ObserveConfig,
    ReportConfig,
    SyncConfig,
    TrainerConfig,
)

__all__ = [
    "ActorConfig",
    "AgentConfig",
    "AlgorithmConfig",
    "AsyncConfig",
    "Config",
    "CorrectionConfig",
    "CriticConfig",
    "DataConfig",
    "Derived",
    "DistillationConfig",
    "DrawnLengthsConfig",
    "FilterGroupsConfig",
    "GuardConfig",
    "JudgeConfig",
    "KlCtrlConfig",
    "KlType",
    "MegatronConfig",
    "MixedReward",
    "ModelConfig",
    "ModelShape",
    "ObserveConfig",
    "OneReward",
    "OptimConfig",
    "OverlongBufferConfig",
    "PolicyLossConfig",
    "ReportConfig",
    "RewardConfig",
    "RewardModelConfig",
    "RolloutConfig",
    "Section",
    "SftConfig",
    "Sides",
    "SyncConfig",
    "TeacherConfig",
    "TppoConfig",
    "TrainerConfig",
    "ValidationConfig",
]
