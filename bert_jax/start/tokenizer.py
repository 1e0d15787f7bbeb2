"""The tokenizer of a fine-tuning run: from a vocabulary file, or stored in its workdir."""

import dataclasses
import json
from pathlib import Path
from typing import Any

from bert_jax.config import TokenizerConfig
from bert_jax.config.loader import Setting
from bert_jax.config.schema import SWITCH
from bert_jax.io.errors import one_line
from bert_jax.io.storage import Location
from bert_jax.start.fixed_options import Given, value_of
from bert_jax.tokenization import FILE_NAMES, Tokenizer, WordPieceTokenizer, build_tokenizer, load_tokenizer

# File with the settings of the tokenizer in the workdir of a fine-tuning run.
TOKENIZER_FILE = "tokenizer_settings.json"
# Options of the case of a WordPiece, and their defaults.
CASE: dict[str, Any] = {"lower_case": True, "strip_accents": "auto"}


def named_vocabulary(name: str, given: Given) -> tuple[TokenizerConfig, bytes]:
    """Return the tokenizer settings for the vocabulary file ``name`` (the option ``data.vocab``), and its
    content."""
    path, names = Path(name), {Path(file).suffix: file for file in FILE_NAMES.values()}
    if path.suffix not in names or not path.is_file():
        kinds = "a vocab.txt (WordPiece), .model (SentencePiece) or tokenizer.json"
        raise ValueError(f"data.vocab: {path} is not a vocabulary file; give {kinds}")
    lower_case, strip = (value_of(given, f"data.{name}", value) for name, value in CASE.items())
    tokenizer = load_tokenizer(path, lower_case=lower_case, strip_accents=SWITCH[strip])
    if isinstance(tokenizer, WordPieceTokenizer) and path.suffix == ".json":
        return TokenizerConfig(**tokenizer.rules), tokenizer.vocab_txt
    return TokenizerConfig(file=names[path.suffix], **tokenizer.rules), path.read_bytes()


def vocabulary_size(config: TokenizerConfig, content: bytes, given: Given) -> tuple[Setting, ...]:
    """Return the setting ``model.vocab_size`` of a randomly initialized model; default: the number of pieces.

    Raises ``ValueError`` if the option ``model.vocab_size`` is less than the number of pieces.
    """
    pieces = build_tokenizer(config, content, "data.vocab").vocab_size
    size = value_of(given, "model.vocab_size", pieces)
    if size < pieces:
        raise ValueError(f"model.vocab_size: {size}, but the vocabulary has {pieces} pieces; omit model.vocab_size")
    return (Setting("data.vocab", "model.vocab_size", str(size)),)


def check_padding(position_offset: int, tokenizer: Tokenizer, name: str | Path) -> None:
    """Raise ``ValueError`` if a model with ``position_offset`` rows before the first position would take another
    piece than that of ``tokenizer``, which ``name`` names, for padding: it is the last of these rows (RoBERTa)."""
    if position_offset and tokenizer.pad_id != position_offset - 1:
        raise ValueError(
            f"model.position_offset: {position_offset}, but padding has id {tokenizer.pad_id} in {name}; allowed: "
            f"{tokenizer.pad_id + 1}, the id of padding + 1 (model.max_position_embeddings counts these rows), or "
            "0 with family bert"
        )


def store_tokenizer(folder: Path, config: TokenizerConfig, content: bytes) -> None:
    """Write the vocabulary file and the tokenizer settings into ``folder``, the workdir of a fine-tuning run."""
    (folder / config.file).write_bytes(content)
    text = json.dumps(dataclasses.asdict(config), indent=1)
    (folder / TOKENIZER_FILE).write_text(f"{text}\n", encoding="utf-8")


def stored_tokenizer(workdir: Location) -> tuple[TokenizerConfig, bytes]:
    path = workdir / TOKENIZER_FILE
    try:
        config = TokenizerConfig(**json.loads(path.read_text(encoding="utf-8")))
        return config, (workdir / config.file).read_bytes()
    except (OSError, ValueError, TypeError) as error:
        problem = one_line(error)
        raise ValueError(f"{path}: not readable ({problem}); restore it, or give another --workdir") from None
