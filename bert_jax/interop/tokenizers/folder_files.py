"""Reader of the tokenizer files of Hugging Face folders.

It determines the vocabulary and the tokenization rules from files that may contradict each other.
"""

import dataclasses
import functools
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bert_jax.config import TokenizerConfig
from bert_jax.interop.model_bundle import ReadOptions
from bert_jax.interop.tokenizers.family_files import (
    GPT2_PIECE,
    SENTENCEPIECE_FILES,
    gpt2_json,
    gpt_json,
    mpnet_json,
    require_sentencepiece,
    sentencepiece_family_json,
    serialized,
    with_added_tokens,
)
from bert_jax.interop.tokenizers.json_format import (
    added_tokens,
    bert_rules,
    exact_rules,
    merge_pairs,
    parse_model,
    part_of,
    sentencepiece_json,
    steps_of,
    wordpiece_json,
)
from bert_jax.io.untrusted_folder import LARGEST, LARGEST_TOKENIZER, inside, json_object, read_small
from bert_jax.tokenization import SPECIAL_PIECES, build_tokenizer
from bert_jax.tokenization.byte_bpe import ROBERTA_PIECES, byte_bpe_content, pieces_by_id
from bert_jax.tokenization.json_tokenizer import has_own_rules
from bert_jax.tokenization.wordpiece import MAX_CHARS_PER_WORD, read_pieces

# A vocabulary is assumed to be cased if more than this fraction of its pieces have capitals, and to keep accents if
# more than this fraction of its pieces have accents.
_SIGNIFICANT = 0.01
# Families whose folders are recognized by the class of the tokenizer or of the model.
_CLASSES = {
    "Albert": "albert", "BigBird": "big_bird", "Camembert": "camembert", "DebertaV2": "deberta-v2",
    "MPNet": "mpnet", "XLMRoberta": "xlm-roberta",
}  # fmt: skip
# Classes of transformers (without Tokenizer, Fast) whose rules for a file are BERT's or RoBERTa's.
_GENERAL = ("", "PreTrained", "TokenizersBackend")
_WITH_RULES_OF_BERT = (
    *_GENERAL, "Bert", "BertLegacy", "ConvBert", "DPRContextEncoder", "DPRQuestionEncoder", "DPRReader",
    "DistilBert", "Electra", "Funnel", "LayoutLM", "LayoutLMv2", "Lxmert", "MPNet", "MobileBert", "Realm",
    "RetriBert", "Splinter", "SqueezeBert",
)  # fmt: skip
_WITH_RULES_OF_ROBERTA = (*_GENERAL, "Bart", "GPT2", "LED", "Longformer", "OpenAIGPT", "Roberta")
# Added tokens: content, id (None: not stated) and the flags of tokenizer.json that the folder states.
Added = Sequence[Mapping[str, Any]]
# Name of each rule in (TokenizerConfig, tokenizer_config.json, BertNormalizer).
RULES = (
    ("lower_case", "do_lower_case", "lowercase"),
    ("strip_accents", "strip_accents", "strip_accents"),
    ("split_cjk", "tokenize_chinese_chars", "handle_chinese_chars"),
)


def read_tokenizer_files(
    folder: Path, options: ReadOptions
) -> tuple[TokenizerConfig | None, bytes | None, tuple[str, ...]]:
    """Return the tokenizer settings of a folder, the content of its vocabulary file, and notes.

    ``tokenizer.model`` takes precedence over ``tokenizer.json``. For WordPiece the pieces are those of
    ``vocab.txt``, which is kept byte for byte, or of ``tokenizer.json`` if ``vocab.txt`` does not exist.
    Returns (None, None, notes) for a folder without a tokenizer. Raises ``ValueError`` with a one-line message for
    files that are damaged or too large, a missing vocabulary, an unsupported tokenizer and, unless
    ``options.allow_mismatch`` is True, files that contradict each other.
    """
    files = _Files(folder, options, [])
    settings = files.json("tokenizer_config.json") or {}
    max_length = _max_length(settings.get("model_max_length"))
    config, content = files.read(settings)
    if config is None or content is None:
        if settings or files.json("special_tokens_map.json") is not None:
            names = "vocab.txt, tokenizer.json, tokenizer.model or vocab.json with merges.txt"
            raise ValueError(f"{folder}: the tokenizer's vocabulary is missing; add {names}")
        return None, None, ("the folder has no tokenizer: the inputs of the model are ids",)
    tokenizer = build_tokenizer(config, content, str(folder / config.file))  # raises for an invalid file
    lower_case = config.lower_case if tokenizer.kind == "wordpiece" else tokenizer.lower_case
    inputs = settings.get("model_input_names")
    config = dataclasses.replace(
        config, lower_case=lower_case, max_length=max_length, truncation_side=files.truncation_side(settings),
        pair_types=not (isinstance(inputs, list) and tokenizer.second_type) or "token_type_ids" in inputs,
    )  # fmt: skip
    return config, content, tuple(files.notes)


def _max_length(value: Any) -> int:
    """Return ``value``, the ``model_max_length`` of a tokenizer, or 0 (no limit) if it is absent or at least 1e6.

    transformers stores 1e30 if there is no limit.
    """
    whole = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1e6
    return int(value) if whole else 0


@dataclass
class _Files:
    """The tokenizer files of one folder, and the notes on them."""

    folder: Path
    options: ReadOptions
    notes: list[str]

    def content(self, name: str) -> bytes | None:
        """Return the bytes of the file ``name`` in the folder, or None if the file does not exist."""
        path = inside(self.folder, name)
        if path is None:
            return None
        most = LARGEST_TOKENIZER if name == "tokenizer.json" else LARGEST
        content = read_small(path, "a tokenizer file", most)
        if not content:
            raise ValueError(f"{self.folder / name}: the file is empty")
        return content

    @functools.cached_property
    def state(self) -> dict[str, Any] | None:
        """The parsed ``tokenizer.json``."""
        return self.json("tokenizer.json")

    def json(self, name: str) -> dict[str, Any] | None:
        content = self.content(name)
        return None if content is None else json_object(content, self.folder / name)

    def differ(self, message: str) -> None:
        """Raise ``ValueError`` with ``message``; if ``options.allow_mismatch`` is True, add a note instead."""
        if not self.options.allow_mismatch:
            raise ValueError(f"{self.folder}: {message}; set --allow_mismatch to accept this")
        self.notes.append(message)

    def truncation_side(self, settings: Mapping[str, Any]) -> Any:
        """Return the side at which transformers truncates, from ``settings`` or ``tokenizer.json``."""
        stored = part_of(self.state or {}, "truncation").get("direction", "right")
        side = settings.get("truncation_side") or str(stored).lower()
        if side not in ("right", "left"):
            raise ValueError(f"{self.folder}: truncation_side is {str(side)[:40]!r}; allowed: right, left")
        return side

    def read(self, settings: Mapping[str, Any]) -> tuple[TokenizerConfig | None, bytes | None]:
        state = self.state
        self.check_code(settings)
        model, added = self.content("tokenizer.model"), self.stated_tokens(settings)
        by_json = TokenizerConfig(file="tokenizer.json", lower_case=False)
        if model is not None and not self.is_other_model(model, state):
            found = _foreign(added, SPECIAL_PIECES)
            if not found:
                return TokenizerConfig(file="tokenizer.model"), model
            return by_json, self.with_tokens(sentencepiece_json(model), found)
        kind = None if state is None else part_of(state, "model").get("type")
        if kind is None and state is not None:  # older files have no type
            kind = "BPE" if "merges" in part_of(state, "model") else "WordPiece"
        vocabulary = self.content("vocab.txt")
        if state is not None and has_own_rules(state):
            listed = {token["content"] for token in added_tokens(state, str(self.folder / "tokenizer.json"))}
            found = [token for token in added if token["content"] not in listed]
            # Kept byte for byte, unless other files add tokens: every rule of the file applies.
            return by_json, self.with_tokens(state, found) if found else self.content("tokenizer.json")
        if kind == "BPE":
            return by_json, self.byte_bpe(state or {}, added)
        if kind not in (None, "WordPiece"):
            raise ValueError(
                f"{self.folder / 'tokenizer.json'}: a {str(kind)[:40]} tokenizer is not supported; allowed: "
                "WordPiece, BPE, Unigram, tokenizer.model (SentencePiece) like that of BERT"
            )
        table = self.json("vocab.json") if state is None and vocabulary is None else None
        made = self.family_state(settings, vocabulary, table) if state is None else None
        if made is not None:
            return by_json, self.with_tokens(made, added)
        if state is not None or vocabulary is not None:
            return self.wordpiece(settings, state, vocabulary, added)
        if table is not None:
            return by_json, self.roberta_files(table, settings, added)
        return None, None

    def with_tokens(self, state: Mapping[str, Any], added: Added) -> bytes:
        """Return the content of a ``tokenizer.json`` with the rules of ``state`` and the ``added`` tokens."""
        return serialized(with_added_tokens(dict(state), added, str(self.folder)))

    def stated_class(self, settings: Mapping[str, Any]) -> str:
        """Return the class that ``settings`` or config.json name, without the endings Tokenizer and Fast."""
        config = self.json("config.json") or {}
        classes = (settings.get("tokenizer_class"), config.get("tokenizer_class"))
        return next((str(name) for name in classes if name), "").removesuffix("Fast").removesuffix("Tokenizer")

    def check_code(self, settings: Mapping[str, Any]) -> None:
        """Refuse code of the folder (``auto_map``) that may split text by other rules than the files state."""
        stated = settings.get("auto_map")
        stated = stated.get("AutoTokenizer") if isinstance(stated, dict) else stated
        slow, fast = stated[:2] if isinstance(stated, list) and len(stated) > 1 else (stated, None)
        if self.state is not None and fast:
            self.notes.append(f"tokenizer.json is used; the code that auto_map names ({str(fast)[:60]}) is not run")
        elif slow or fast:
            self.differ(
                f"the tokenizer is code of the folder (auto_map {str(slow or fast)[:60]}), which is never run; "
                "save it as the tokenizer.json of a fast tokenizer"
            )

    def check_class(self, settings: Mapping[str, Any], known: Sequence[str], rules: str) -> None:
        """Refuse a class whose rules for the vocabulary are not ``rules``."""
        stated = self.stated_class(settings)
        if stated == "BertJapanese":
            kinds = [settings.get(f"{part}_tokenizer_type", "") for part in ("word", "subword")]
            stated = "Bert" if kinds == ["basic", "wordpiece"] else stated
        if stated not in known:
            self.differ(
                f"tokenizer_class {stated[:40]}Tokenizer splits text by other rules than {rules}, which this "
                "library does not have; add its tokenizer.json with these rules, or separate the words of every "
                "text with spaces as that tokenizer does"
            )

    def is_other_model(self, model: bytes, state: Mapping[str, Any] | None) -> bool:
        """Return True if ``tokenizer.json`` has rules of its own and was not made from ``tokenizer.model``."""
        if state is None or not has_own_rules(state):
            return False
        require_sentencepiece(model, str(self.folder / "tokenizer.model"))
        pieces = [piece.text for piece in parse_model(model)[0]]
        table = part_of(state or {}, "model").get("vocab")
        listed = [item[0] for item in table] if isinstance(table, list) else list(table or ())
        if listed != pieces or not set(SPECIAL_PIECES) <= set(pieces):
            self.notes.append("tokenizer.json is used; tokenizer.model has other pieces or no pieces like [CLS]")
            return True
        return False

    def family_state(
        self, settings: Mapping[str, Any], vocabulary: bytes | None, table: Mapping[str, Any] | None
    ) -> dict[str, Any] | None:
        """Return a ``tokenizer.json`` made from the files of a family other than BERT and RoBERTa, or None if the
        folder has no such files."""
        model_type = (self.json("config.json") or {}).get("model_type")
        family = _CLASSES.get(self.stated_class(settings), model_type)
        if vocabulary is not None:
            name = str(self.folder / "vocab.txt")
            return mpnet_json(read_pieces(vocabulary, name), settings) if family == "mpnet" else None
        if table is not None:
            pieces = pieces_by_id(table, str(self.folder / "vocab.json"))
            ids = {piece: i for i, piece in enumerate(pieces)}
            if GPT2_PIECE in ids and "</s>" not in ids:
                return gpt2_json(ids, self.merges(), add_prefix_space=settings.get("add_prefix_space") is True)
            is_gpt = "<unk>" in ids and "</s>" not in ids and any(piece.endswith("</w>") for piece in pieces)
            return gpt_json(ids, self.merges()) if is_gpt else None
        for name, families in SENTENCEPIECE_FILES.items():
            content = self.content(name)
            if content is not None:
                chosen = families[0] if len(families) == 1 else family
                if chosen not in families:
                    raise ValueError(
                        f"{self.folder / name}: the family is unknown; set model_type in config.json to one of "
                        f"{', '.join(families)}, or add tokenizer.json"
                    )
                return sentencepiece_family_json(content, chosen, settings, str(self.folder / name))
        return None

    def byte_bpe(self, state: Mapping[str, Any], added: Added) -> bytes:
        """Return a canonical ``tokenizer.json`` with the vocabulary, merges, ``add_prefix_space`` and added tokens
        of ``state``, which must be a byte-level BPE like that of RoBERTa."""
        name = str(self.folder / "tokenizer.json")
        levels = [part for part in steps_of(state.get("pre_tokenizer")) if part.get("type") == "ByteLevel"]
        if not levels or len(steps_of(state.get("pre_tokenizer"))) > 1:
            raise ValueError(f"{name}: the BPE is not byte-level like that of RoBERTa; only this kind is supported")
        model = part_of(state, "model")
        if model.get("byte_fallback") or model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
            raise ValueError(f"{name}: a BPE with subword prefix, word suffix or byte fallback is not supported")
        prefix, merges = levels[0].get("add_prefix_space") is True, merge_pairs(model.get("merges"), name)
        pieces = pieces_by_id(model.get("vocab"), name)
        return self.roberta_content(pieces, merges, prefix, added, name)

    def roberta_content(
        self, pieces: list[str], merges: Sequence[tuple[str, str]], prefix: bool, added: Added, name: str
    ) -> bytes:
        pieces = self.with_special(pieces, added, ROBERTA_PIECES)
        content = byte_bpe_content(pieces, merges, add_prefix_space=prefix, name=name)
        found = _foreign(added, ROBERTA_PIECES)
        return self.with_tokens(json_object(content, name), found) if found else content

    def merges(self) -> list[tuple[str, str]]:
        """Return the merges of ``merges.txt``, sorted by rank."""
        name = str(self.folder / "merges.txt")
        content = self.content("merges.txt")
        if content is None:
            raise ValueError(f"{name}: the file is missing; a tokenizer needs vocab.json and merges.txt")
        try:
            lines = content.decode().split("\n")
        except UnicodeDecodeError:
            raise ValueError(f"{name}: not valid UTF-8") from None
        merges = [line.rstrip("\r") for line in lines if line.strip() and not line.startswith("#version")]
        return merge_pairs(merges, name)

    def roberta_files(self, table: Mapping[str, Any], settings: Mapping[str, Any], added: Added) -> bytes:
        self.check_class(settings, _WITH_RULES_OF_ROBERTA, "RoBERTa's")
        name = str(self.folder / "vocab.json")
        prefix = settings.get("add_prefix_space") is True
        return self.roberta_content(pieces_by_id(table, name), self.merges(), prefix, added, name)

    def stated_tokens(self, settings: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return content, id (None: not stated) and, if the folder states them, the flags of every added token in
        ``tokenizer.json``, which has priority, ``added_tokens.json``, and ``added_tokens_decoder`` and lists of
        special tokens in ``settings`` and special_tokens_map.json."""
        listed = self.json("added_tokens.json") or {}
        added = {piece: {"content": piece, "id": number} for piece, number in listed.items()}
        decoder = settings.get("added_tokens_decoder")
        for number, token in (decoder if isinstance(decoder, dict) else {}).items():
            if isinstance(token, dict) and isinstance(token.get("content"), str) and str(number).isdecimal():
                added[token["content"]] = {"id": int(str(number)[:19]), **token, **added.get(token["content"], {})}
        for file in (settings, self.json("special_tokens_map.json") or {}):
            for key in ("additional_special_tokens", "extra_special_tokens"):
                tokens = file.get(key)
                tokens = list(tokens.values()) if isinstance(tokens, dict) else tokens
                for token in tokens if isinstance(tokens, list) else ():
                    flags = token if isinstance(token, dict) else {"content": token}
                    if isinstance(piece := flags.get("content"), str):
                        added[piece] = {"id": None, **flags, **added.get(piece, {}), "special": True}
        for token in added_tokens(self.state or {}, str(self.folder / "tokenizer.json")):
            added[token["content"]] = {**added.get(token["content"], {}), **token}
        return list(added.values())

    def with_special(self, pieces: list[str], added: Added, special: Sequence[str]) -> list[str]:
        """Return ``pieces`` followed by those ``special`` pieces among the added tokens that ``pieces`` lacks.
        Raises ``ValueError`` if their ids do not follow the ids of ``pieces``."""
        ids = {token["content"]: token["id"] for token in added}
        lacking = {*ids}.intersection(special).difference(pieces)
        extra = sorted(lacking, key=lambda piece: str(ids[piece]).zfill(20))
        if [ids[piece] for piece in extra] != list(range(len(pieces), len(pieces) + len(extra))):
            raise ValueError(
                f"{self.folder}: ids of added tokens must directly follow those of the vocabulary: {_some(extra)}"
            )
        return [*pieces, *extra]

    def wordpiece(
        self, settings: Mapping[str, Any], state: Mapping[str, Any] | None, content: bytes | None,
        added: Added,
    ) -> tuple[TokenizerConfig, bytes]:  # fmt: skip
        self.check_class(settings, _WITH_RULES_OF_BERT, "BERT's")
        name = str(self.folder / ("vocab.txt" if content is not None else "tokenizer.json"))
        limit = 100  # default of transformers for a vocabulary without tokenizer.json
        pieces = None if content is None else self.vocab_txt(content, name)
        if state is not None:
            json_name = str(self.folder / "tokenizer.json")
            model = part_of(state, "model")
            if model.get("unk_token", "[UNK]") != "[UNK]" or model.get("continuing_subword_prefix", "##") != "##":
                raise ValueError(f"{json_name}: unk_token must be [UNK], and continuing_subword_prefix must be ##")
            limit = model.get("max_input_chars_per_word", 100)
            listed = pieces_by_id(model.get("vocab"), json_name)
            if pieces is None:
                pieces = listed
            elif [piece.strip() for piece in listed] != pieces:
                self.differ("vocab.txt and tokenizer.json contain different vocabularies; vocab.txt has priority")
        known = pieces or []
        pieces = self.with_special(known, added, SPECIAL_PIECES)
        if found := _foreign(added, SPECIAL_PIECES):
            config = self.rules(settings, state, pieces)
            rules = bert_rules(
                lower_case=config.lower_case, strip_accents=config.strip_accents, split_cjk=config.split_cjk
            )
            made = wordpiece_json(pieces, rules, limit)
            return TokenizerConfig(file="tokenizer.json", lower_case=False), self.with_tokens(made, found)
        if content is None or len(pieces) > len(known):
            if any("\n" in piece for piece in pieces):
                raise ValueError(f"{name}: a piece contains a line break, which vocab.txt cannot represent")
            content = "".join(piece + "\n" for piece in pieces).encode("utf-8", "surrogatepass")
        if limit != MAX_CHARS_PER_WORD:
            self.notes.append(
                f"words of more than {limit} and at most {MAX_CHARS_PER_WORD} characters are split into pieces, as "
                "in google-research/bert; transformers replaces them with [UNK]"
            )
        return self.rules(settings, state, pieces), content

    def vocab_txt(self, content: bytes, name: str) -> list[str]:
        """Return the pieces of a ``vocab.txt``; raises ``ValueError`` for the pieces of a SentencePiece model."""
        lines = content.decode("utf-8", "replace").split("\n")
        marked = sum(line.startswith("\u2581") for line in lines)
        if marked > _SIGNIFICANT * len(lines) and not any(line.startswith("##") for line in lines):
            raise ValueError(
                f"{name}: {marked} pieces begin with \u2581, so they are those of a SentencePiece model, not of "
                "WordPiece; save the tokenizer as the tokenizer.json of a fast tokenizer, and remove vocab.txt"
            )
        return read_pieces(content, name)

    def rules(
        self, settings: Mapping[str, Any], state: Mapping[str, Any] | None, pieces: Sequence[str]
    ) -> TokenizerConfig:
        """Return the settings for case, accents and CJK from the options or the files, or guess them from the
        pieces."""
        stated = {ours: settings[theirs] for ours, theirs, _ in RULES if theirs in settings}
        rust = self.normalizer(state, stated)
        # transformers builds the class BertTokenizer from tokenizer_config.json and any other from tokenizer.json.
        by_config = str(settings.get("tokenizer_class") or "BertTokenizer").removesuffix("Fast") == "BertTokenizer"
        chosen = {**rust, **stated} if by_config else {**stated, **rust}
        for ours, theirs, rusts in RULES:
            if ours in stated and ours in rust and stated[ours] != rust[ours]:
                self.notes.append(
                    f"tokenizer_config.json has {theirs} {stated[ours]}, tokenizer.json {rusts} {rust[ours]}: "
                    f"{chosen[ours]} is used, as in transformers"
                )
        if self.options.lower_case is not None:
            if chosen.get("lower_case", self.options.lower_case) != self.options.lower_case:
                self.notes.append(f"lower_case {self.options.lower_case} of the options replaces that of the files")
            chosen["lower_case"] = self.options.lower_case
        for ours, value in chosen.items():
            if not isinstance(value, bool) and (ours != "strip_accents" or value is not None):
                raise ValueError(f"{self.folder}: {ours} {str(value)[:40]!r} is not allowed; allowed: true, false")
        if "lower_case" not in chosen:
            chosen |= self.guess(pieces, chosen)
        return TokenizerConfig(file="vocab.txt", **chosen)

    def normalizer(self, state: Mapping[str, Any] | None, stated: Mapping[str, Any]) -> dict[str, Any]:
        """Return the settings of BERT's normalizer in ``tokenizer.json``. Return an empty dict for other rules,
        which are a contradiction unless this library wrote them."""
        if state is None:
            return {}
        normalizer, splits = part_of(state, "normalizer"), part_of(state, "pre_tokenizer")
        if normalizer.get("type") != "BertNormalizer" or splits.get("type") != "BertPreTokenizer":
            if not _is_ours({"normalizer": normalizer, "pre_tokenizer": splits}, stated):
                self.differ(
                    "tokenizer.json has other rules than BERT's (BertNormalizer, BertPreTokenizer), which are not "
                    "supported"
                )
            return {}
        if normalizer.get("clean_text", True) is not True:
            self.notes.append("control characters are dropped here, but kept by tokenizer.json")
        return {ours: normalizer[rusts] for ours, _, rusts in RULES if rusts in normalizer}

    def guess(self, pieces: Sequence[str], chosen: Mapping[str, Any]) -> dict[str, Any]:
        words = [piece for piece in pieces if piece not in SPECIAL_PIECES]
        capitals = sum(piece.lower() != piece for piece in words)
        lower_case = capitals <= _SIGNIFICANT * len(words)
        guessed: dict[str, Any] = {"lower_case": lower_case}
        letters = (unicodedata.normalize("NFD", piece) for piece in words)
        accents = sum(any(unicodedata.category(char) == "Mn" for char in piece) for piece in letters)
        if lower_case and "strip_accents" not in chosen and accents > _SIGNIFICANT * len(words):
            guessed["strip_accents"] = False
        how = "lower-cased" if lower_case else "cased"
        how += ", accents kept" if guessed.get("strip_accents") is False else ""
        self.notes.append(
            f"no file sets the case: {how}, guessed from the pieces ({capitals} of {len(words)} with capitals, "
            f"{accents} with accents); set it with --do_lower_case"
        )
        return guessed


def _is_ours(rules: Mapping[str, Any], stated: Mapping[str, Any]) -> bool:
    """Return True if ``rules`` are those that this library writes for the settings ``stated``."""
    if not {"lower_case", "split_cjk"} <= set(stated) or not all(
        value in (True, False, None) for value in stated.values()
    ):
        return False
    return rules == exact_rules(
        lower_case=stated["lower_case"], strip_accents=stated.get("strip_accents"), split_cjk=stated["split_cjk"]
    )


def _foreign(added: Added, special: Sequence[str]) -> Added:
    """Return the tokens of ``added`` that are not ``special``."""
    return [token for token in added if token["content"] not in special]


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(repr(name[:40]) for name in names[:5])
    return shown + (f" and {len(names) - 5} more" if len(names) > 5 else "")
