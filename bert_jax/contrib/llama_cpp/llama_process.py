"""Compute text vectors with llama.cpp; started as ``python -c SOURCE FILE SCRATCH``.

The Python needs xllamacpp, but no module of this library.
"""

import json
import sys
from pathlib import Path

MISSING = 7  # exit code: xllamacpp is not installed


def main(file: str, scratch: Path) -> int:
    """Write the vectors of the texts in texts.json to vectors.json, both in ``scratch``; return the exit code."""
    try:
        import xllamacpp
    except ImportError:
        return MISSING
    params = xllamacpp.CommonParams()
    params.model.path, params.embedding, params.warmup, params.n_parallel = file, True, False, 1
    # Flash attention rounds keys and values to float16.
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    server = xllamacpp.Server(params)
    texts = json.loads((scratch / "texts.json").read_text(encoding="utf-8"))
    vectors = [server.handle_embeddings({"input": text})["data"][0]["embedding"] for text in texts]
    answer = {"version": f"llama.cpp (xllamacpp {xllamacpp.__version__})", "vectors": vectors}
    (scratch / "vectors.json").write_text(json.dumps(answer), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))
