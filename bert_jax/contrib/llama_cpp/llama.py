"""Comparison of a GGUF file with llama.cpp, which runs in a separate process (``llama_process.py``)."""

import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from bert_jax.contrib.llama_cpp import llama_process
from bert_jax.interop.model_bundle import Differences, ModelBundle

# Largest allowed 1 - cosine of the vector of a text in llama.cpp and ours, by the dtype of the weights. llama.cpp
# reads GELU from a table in float16. With 8-bit weights it rounds the inputs of products to 8 bits too; how much
# that may change depends on the use.
BARS = {"float32": 1e-4, "float16": 1e-4, "int8": np.inf}
_TIMEOUT = 1800
_TEXTS = (
    "The river rose by 1,234.50 feet (in two days)!", "What is the capital of France?", "naïve CAFÉ, über-cool",
    "a", "中文 abc 字", "cats and dogs; dogs and cats", "It's 5 o'clock -- tea?", "snow",
    " ".join(["The bank raised its rates again, and nobody in the village was surprised by it."] * 6),
)  # fmt: skip


def llama_vectors(file: Path, texts: Sequence[str], python: str | None = None) -> tuple[str, np.ndarray] | None:
    """Return the version of llama.cpp and float32[texts, E], the vectors of ``texts``, divided by their norm.

    ``python`` is a Python executable with the xllamacpp package; None: the running Python. Returns None if it lacks
    the package. Raises ``ValueError`` if llama.cpp does not load ``file``.
    """
    found = shutil.which(python) if python is not None else sys.executable
    if found is None:
        raise ValueError(f"{python}: not a Python executable; set --peer_python to the path of one")
    with tempfile.TemporaryDirectory() as scratch:
        (Path(scratch) / "texts.json").write_text(json.dumps([*texts]), encoding="utf-8")
        source = Path(llama_process.__file__).read_text(encoding="utf-8")
        command = [str(Path(found).absolute()), "-c", source, str(file.absolute()), scratch]
        done = subprocess.run(command, cwd=scratch, capture_output=True, text=True, timeout=_TIMEOUT, check=False)
        if done.returncode == llama_process.MISSING:
            return None
        if done.returncode:
            lines = done.stderr.strip().splitlines() or ["no message"]
            cause = next(filter(re.compile("GGML_ASSERT| E ").search, lines), lines[-1])
            raise ValueError(f"{file}: llama.cpp cannot load the model: {cause[:300]}")
        answer = json.loads((Path(scratch) / "vectors.json").read_text(encoding="utf-8"))
    return answer["version"], np.asarray(answer["vectors"], np.float32)


def check_llama(folder: Path, weights: ModelBundle, dtype: str, python: str | None) -> Differences | str:
    """Compare the vectors of texts in llama.cpp with those of ``weights``, tokenizers included.

    ``dtype`` selects the bar (:data:`BARS`). If xllamacpp is not installed, returns a string that reports this.
    """
    from bert_jax.inference.loaded import prepare  # this module is imported with the table of formats

    model = prepare(weights)
    assert model.tokenizer is not None  # the format requires one
    lengths = map(len, model.tokenizer.encode_batch(_TEXTS))
    texts = [text for text, length in zip(_TEXTS, lengths, strict=True) if length + 2 <= model.spec.max_length]
    answer = llama_vectors(folder / "model.gguf", texts, python)
    if answer is None:
        return f"{python or 'this Python'} lacks xllamacpp; set --peer_python to a Python that has it"
    version, theirs = answer
    ours = model.embed(texts, normalize=True)
    values = {
        "vectors of texts, 1 - cosine": (float(np.max(1 - np.sum(ours * theirs, axis=1))), BARS[dtype]),
        "vectors of texts": (float(np.abs(ours - theirs).max()), np.inf),
    }
    return Differences(version, values)
