"""GGUF, the file format of llama.cpp: export, import, comparison with llama.cpp."""

FORMATS = {"gguf": "bert_jax.contrib.llama_cpp.gguf_file:FORMAT"}
