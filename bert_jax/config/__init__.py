"""Configuration: options (``schema``, ``pretrain``, ``task``, ``finetune``), their loading from YAML and flags
(``loader``), descriptions of saved models (``spec``)."""

from bert_jax.config.architecture import ModelConfig
from bert_jax.config.finetune import FinetuneConfig
from bert_jax.config.loader import differences, dump_yaml, from_dict, load_config, to_dict
from bert_jax.config.pretrain import DataConfig, PretrainConfig
from bert_jax.config.schema import ExecutionConfig, MeshConfig, OptimizerConfig, RunOptions, TrainingConfig
from bert_jax.config.spec import (
    HeadsConfig,
    ModelSpec,
    SentenceConfig,
    SentenceModule,
    TaskSettings,
    TokenizerConfig,
    pretraining_heads,
    spec_from_json,
    spec_to_json,
)
from bert_jax.config.task import TaskDataConfig

# The config of a run. Code for both kinds of run reads only the attributes that both classes have.
RunConfig = PretrainConfig | FinetuneConfig
