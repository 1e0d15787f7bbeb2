"""Smaller models: trimmed vocabularies, pruned and factorized networks, early exit, int8, teachers."""

COMMANDS = dict.fromkeys(
    ("trim", "factorize", "prune", "early-exit", "augment"), "bert_jax.contrib.compression.commands:COMMANDS"
)
OBJECTIVES = {"distillation": "bert_jax.contrib.compression.distillation:Distillation"}
OBJECTIVE_OPTIONS = {"distillation": "bert_jax.contrib.compression.config:DistillationConfig"}
PRETRAIN_OPTIONS = {"teacher": "bert_jax.contrib.compression.run_options:TeacherOptions"}
FINETUNE_OPTIONS = {
    "prune": "bert_jax.contrib.compression.run_options:PruningOptions",
    "teacher": "bert_jax.contrib.compression.run_options:TaskTeacherOptions",
}
FINETUNE_CONFIG = {"distillation": "bert_jax.contrib.compression.config:TaughtConfig"}
EXTENSIONS = {"export --calibration": "bert_jax.contrib.compression.commands:export_functions"}
