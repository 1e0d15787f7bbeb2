"""Analyses of text vectors: search, clustering, anisotropy."""

COMMANDS = {
    **dict.fromkeys(("search", "mine", "cluster", "anisotropy"), "bert_jax.contrib.analysis.commands:COMMANDS"),
    **dict.fromkeys(("neighbors", "probe"), "bert_jax.contrib.analysis.word_commands:COMMANDS"),
}
EXTENSIONS = {
    "embed --precision": "bert_jax.contrib.analysis.commands:write_index",
    "score --pairs": "bert_jax.contrib.analysis.commands:score_pairs",
}
