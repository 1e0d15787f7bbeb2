"""Records what transformers' AutoTokenizer makes of exported tokenizers: fixtures/tokenizers.json.

python -m tests.golden.record_tokenizers      (this library beside requirements.lock of this folder)
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from golden.tokenizer_cases import FIXTURE, LENGTHS, PAIRS, TEXTS, cases
from transformers import AutoTokenizer

from bert_jax.interop.tokenizers.folder_writer import write_tokenizer_files


def record(tokenizer: Any) -> dict[str, list[list[Any]]]:
    """For every length: ids, token types, mask, offsets (flat) of all texts, then of all pairs."""
    found: dict[str, list[list[Any]]] = {}
    for length in LENGTHS:
        cut = {} if length is None else {"truncation": True, "max_length": length}
        rows: list[list[Any]] = []
        for batch in (list(TEXTS), list(zip(TEXTS, PAIRS, strict=True))):
            made = tokenizer(batch, return_offsets_mapping=True, **cut)
            types = made.get("token_type_ids", [None] * len(batch))
            for i in range(len(batch)):
                places = [place for pair in made["offset_mapping"][i] for place in pair]
                kind = None if types[i] is None else "".join(map(str, types[i]))
                rows.append([made["input_ids"][i], kind, sum(made["attention_mask"][i]), places])
        found[str(length)] = rows
    return found


def main() -> None:
    recorded = {}
    for name, (spec, content) in cases().items():
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            write_tokenizer_files(folder, spec, content, exact=True)
            (folder / "config.json").write_text(json.dumps({"model_type": spec.family}))
            recorded[name] = record(AutoTokenizer.from_pretrained(folder))
    FIXTURE.write_text(json.dumps(recorded, separators=(",", ":")) + "\n")
    print(FIXTURE, FIXTURE.stat().st_size, "bytes")


if __name__ == "__main__":
    main()
