"""Record tiny GGUF files and the vectors that llama.cpp computes from them: fixtures/llama_cpp/.

python tests/golden/record_llama.py PYTHON    # a Python with xllamacpp (tests/golden/requirements.lock)
"""

import sys
from pathlib import Path

import numpy as np
from builders import drawn

from bert_jax.config import HeadsConfig, ModelSpec, SentenceConfig, TokenizerConfig
from bert_jax.contrib.llama_cpp.gguf_file import write_gguf
from bert_jax.contrib.llama_cpp.llama import llama_vectors
from bert_jax.interop.hf.config_json import model_parts

FOLDER = Path(__file__).parent / "fixtures" / "llama_cpp"
PIECES = [
    "[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "[unused0]", "[", "##[", "]", ",", "##,", "the", "river", "##s",
    "bank", "cafe", "é", "中", "文", "a", "##a",
]  # fmt: skip
TEXTS = [
    "the rivers, bank", "中文 café", "[the] [unused0] a", "The RIVER the bank " * 5, "unknown word, aaa", "a",
]  # fmt: skip
SIZES = {
    "vocab_size": len(PIECES), "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2,
    "intermediate_size": 32, "max_position_embeddings": 40,
}  # fmt: skip
FAMILIES = {"bert": {}, "modernbert": {"local_attention": 6}, "nomic_bert": {}}
DTYPES = {"bert": "int8", "modernbert": "float16", "nomic_bert": "float32"}


def model(family, pieces=PIECES, rules=None, **keys):
    """A model whose weights all show in its outputs; BERT pools the first token, the others the mean."""
    network = model_parts({"model_type": family, **SIZES, **FAMILIES[family], **keys}, "config.json").model
    spec = ModelSpec(
        model=network, heads=HeadsConfig(), family=family, tokenizer=rules or TokenizerConfig(),
        sentence=SentenceConfig(pooling=("cls" if family == "bert" else "mean",)),
    )  # fmt: skip
    return drawn(spec, 0.2, pieces)


if __name__ == "__main__":
    vectors = {}
    for family, dtype in DTYPES.items():
        folder = FOLDER / family
        folder.mkdir(parents=True, exist_ok=True)
        write_gguf(folder, model(family), dtype=dtype)
        vectors[family] = llama_vectors(folder / "model.gguf", TEXTS, sys.argv[1])[1]
    np.savez_compressed(FOLDER / "vectors.npz", **vectors)
