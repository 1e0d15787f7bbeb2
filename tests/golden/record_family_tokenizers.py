"""Record the inputs that AutoTokenizer of transformers 4.57 makes from the folders of family_tokenizer_cases.py.

python -m golden.record_family_tokenizers      (in tests/, with transformers 4.57 and sentencepiece)
"""

import json
import tempfile
from pathlib import Path
from typing import Any

from golden.family_tokenizer_cases import FIXTURE, LENGTHS, PAIRS, TEXTS, cases, make_folder
from transformers import AutoTokenizer


def recorded(folder: Path) -> list[list[Any]]:
    """Return [ids, types] of every text and pair at every length."""
    made = AutoTokenizer.from_pretrained(folder)
    rows = []
    for length in LENGTHS:
        options = {} if length is None else {"truncation": True, "max_length": length}
        for a, b in zip(TEXTS, PAIRS, strict=True):
            for texts in (a, (a, b)):  # as a batch: an empty second text alone is not a pair
                found = made([texts], return_token_type_ids=True, **options)
                rows.append([found["input_ids"][0], found["token_type_ids"][0]])
    return rows


def main() -> None:
    fixture = {}
    with tempfile.TemporaryDirectory() as temporary:
        for name in cases():
            make_folder(Path(temporary) / name, name)
            fixture[name] = recorded(Path(temporary) / name)
    FIXTURE.write_text(json.dumps(fixture, separators=(",", ":")) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
