"""Smaller models: trimmed vocabularies, pruned and factorized networks, early exit, int8, teachers."""

COMMANDS = dict.fromkeys(
    ("trim", "factorize", "prune", "early-exit", "augment"), "bert_jax.contrib.compression.commands:COMMANDS"
)
OBJECTIVES = {"distillation": "bert_jax.contrib.compression.distillation:Distillation"}
OBJECTIVE_OPTIONS = {"distillation": "bert_jax.contrib.compression.config:DistillationConfig"}
EXTENSIONS = {
    "export --calibration": "bert_jax.contrib.compression.commands:export_functions",
    "finetune --prune_heads": "bert_jax.contrib.compression.gradual:prune",
    "--teacher": "bert_jax.contrib.compression.teachers.find",
}
