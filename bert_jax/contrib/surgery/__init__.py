"""Changes of the network of an initial model: fewer layers, long inputs, frames of the inputs of a GPT."""

PRETRAIN_OPTIONS = {"changes": "bert_jax.contrib.surgery.run_options:ChangeOptions"}
FINETUNE_OPTIONS = {"changes": "bert_jax.contrib.surgery.run_options:TaskChangeOptions"}
EXTENSIONS = dict.fromkeys(
    ("--init_layers", "--to_long", "--gpt_inputs"), "bert_jax.contrib.surgery.network_changes:changed"
)
