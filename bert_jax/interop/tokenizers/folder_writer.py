"""Writer of the tokenizer files of Hugging Face folders.

``AutoTokenizer`` builds the tokenizer of the model from them. The writer returns notes on the differences.
"""

import json
from pathlib import Path

from bert_jax.config import ModelSpec
from bert_jax.interop.tokenizers.folder_files import RULES
from bert_jax.interop.tokenizers.tokenizer_state import check_state, otherwise_treated, rules_of, state_of
from bert_jax.json_values import Json
from bert_jax.tokenization import build_tokenizer
from bert_jax.tokenization.json_parts import part_of
from bert_jax.tokenization.json_tokenizer import GPT2_PIECE


def write_tokenizer_files(
    folder: Path, spec: ModelSpec, content: bytes | None, *, exact: bool = False
) -> list[str]:
    """Write the files from which ``AutoTokenizer`` builds the tokenizer of the model.

    The files are ``tokenizer.json`` (WordPiece: with the rules of BertTokenizer or, with ``exact``, rules that only
    the tokenizers library reads), ``tokenizer_config.json``, ``special_tokens_map.json`` and an exact copy of the
    vocabulary. Returns notes on the differences between the two tokenizers. Raises ``ValueError`` for a tokenizer
    that ``tokenizer.json`` cannot express, and ``exits.Stop`` if the written file encodes sample texts differently
    for a reason that no note states.
    """
    config = spec.tokenizer
    if config is None or content is None:
        return ["the model has no vocabulary: no tokenizer is written"]
    tokenizer = build_tokenizer(config, content, config.file)
    state, notes = state_of(tokenizer, config, content, exact=exact)
    written = json.dumps(state, ensure_ascii=False).encode()
    is_plain = tokenizer.kind == "wordpiece" and not exact
    notes += check_state(tokenizer, written, otherwise_treated(**rules_of(config)) if is_plain else ())
    specials = dict(zip(("pad", "unk", "cls", "sep", "mask"), tokenizer.special_pieces, strict=True))
    tokens = {f"{name}_token": piece for name, piece in specials.items()}
    settings: dict[str, Json] = {
        "model_max_length": spec.max_length,
        **tokens,
        "clean_up_tokenization_spaces": False,
    }
    inputs = ["input_ids", "token_type_ids", "attention_mask"]
    if not tokenizer.framed:
        end = GPT2_PIECE if GPT2_PIECE in specials.values() else None
        tokens = {"unk_token": specials["unk"], "pad_token": specials["pad"]}
        tokens |= {"bos_token": end, "eos_token": end} if end else {}
        settings = {key: value for key, value in settings.items() if not key.endswith("_token")} | tokens
    if tokenizer.kind == "byte_bpe":
        tokens |= {"bos_token": "<s>", "eos_token": "</s>"}
        prefix = part_of(state, "pre_tokenizer")["add_prefix_space"]
        settings |= {"tokenizer_class": "RobertaTokenizer", "add_prefix_space": prefix, **tokens}
        inputs.remove("token_type_ids")
    else:
        if tokenizer.second_type == 0 or spec.model.type_vocab_size < 2:
            inputs.remove("token_type_ids")
        # BertTokenizer would use its own rules, which replace words of more than 100 characters with [UNK].
        settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    if tokenizer.kind == "wordpiece":
        settings |= {theirs: getattr(config, ours) for ours, theirs, _ in RULES}
    settings["model_input_names"] = inputs
    settings |= {"truncation_side": "left"} if config.truncation_side == "left" else {}
    if config.file != "tokenizer.json":
        (folder / config.file).write_bytes(content)
    (folder / "tokenizer.json").write_bytes(written if config.file != "tokenizer.json" else content)
    for name, value in (("tokenizer_config.json", settings), ("special_tokens_map.json", tokens)):
        text = json.dumps(value, indent=2, ensure_ascii=False) + "\n"
        (folder / name).write_text(text, encoding="utf-8")
    return notes
