"""Parts of ``tokenizer.json``, the format of the ``tokenizers`` library, that several readers or writers share."""

import json
from collections.abc import Iterable, Mapping, Sequence

from bert_jax.json_values import Json


def tokenizer_json(**parts: Json) -> dict[str, Json]:
    """Return a ``tokenizer.json`` with the ``parts``, in this order, and without truncation and padding."""
    return {"version": "1.0", "truncation": None, "padding": None, **parts}


def serialized(state: Json) -> bytes:
    """Return ``state`` as the content of a file."""
    return json.dumps(state, ensure_ascii=False, separators=(",", ":")).encode()


def added_entries(
    ids: dict[str, int], special: Iterable[str], plain: Iterable[str] = (), mask: str = "<mask>"
) -> list[dict[str, Json]]:
    """Return the ``added_tokens`` for the ``special`` and ``plain`` pieces, sorted by id. Those that ``ids`` lacks
    are added to ``ids``, after all others. The piece ``mask`` includes the white space before it."""
    entries: dict[int, dict[str, Json]] = {
        ids.setdefault(piece, len(ids)): {
            "content": piece, "single_word": False, "lstrip": piece == mask, "rstrip": False, "normalized": False,
            "special": is_special,
        }
        for pieces, is_special in ((special, True), (plain, False))
        for piece in pieces
    }  # fmt: skip
    return [{"id": number, **entries[number]} for number in sorted(entries)]


def bpe_model(ids: Mapping[str, int], merges: Iterable[Sequence[str]], **more: Json) -> dict[str, Json]:
    """Return the ``model`` of a BPE with ``merges`` sorted by rank; ``more`` are other settings."""
    return {
        "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
        "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
        "vocab": dict(ids), "merges": [list(merge) for merge in merges], **more,
    }  # fmt: skip


def byte_level(add_prefix_space: bool) -> dict[str, Json]:
    """Return the pre-tokenizer and decoder of a byte-level BPE."""
    return {"type": "ByteLevel", "add_prefix_space": add_prefix_space, "trim_offsets": True, "use_regex": True}


def part_of(state: Json, name: str) -> Mapping[str, Json]:
    """Return the JSON object under the key ``name`` of ``state``, or an empty dict if there is none."""
    part = state.get(name) if isinstance(state, dict) else None
    return part if isinstance(part, dict) else {}


def pieces_by_id(table: Json, name: str) -> list[str]:
    """Return the pieces of ``table``, a JSON object that maps pieces to ids, sorted by id.

    Raises ``ValueError`` unless the ids are 0 to N - 1.
    """
    if not isinstance(table, dict) or not table:
        raise ValueError(f"{name}: the vocabulary is empty")
    pieces = {number: piece for piece, number in table.items() if type(number) is int}
    if sorted(pieces) != list(range(len(table))):
        raise ValueError(f"{name}: the ids of the vocabulary must be 0 to {len(table) - 1}, each exactly once")
    return [pieces[number] for number in range(len(table))]
