"""Configuration: dataclasses (``schema``) and their loading from YAML and flags (``loader``)."""

from bert_jax.config.loader import differences, dump_yaml, from_dict, load_config, to_dict
from bert_jax.config.schema import (
    DataConfig,
    ExecutionConfig,
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
    PretrainConfig,
    TrainingConfig,
)

__all__ = [
    "DataConfig",
    "ExecutionConfig",
    "MeshConfig",
    "ModelConfig",
    "OptimizerConfig",
    "PretrainConfig",
    "TrainingConfig",
    "differences",
    "dump_yaml",
    "from_dict",
    "load_config",
    "to_dict",
]
