"""Analyses of text vectors: search, clustering, anisotropy."""

COMMANDS = {
    **dict.fromkeys(("search", "mine", "cluster", "anisotropy"), "bert_jax.contrib.analysis.commands:COMMANDS"),
    **dict.fromkeys(("neighbors", "probe"), "bert_jax.contrib.analysis.word_commands:COMMANDS"),
}
EXTENSIONS = {
    "embed --per_word": "bert_jax.contrib.analysis.word_vectors:word_lines",
    "embed --precision": "bert_jax.contrib.analysis.commands:write_index",
    "score --pairs": "bert_jax.contrib.analysis.commands:score_pairs",
}
