"""Reader of the tokenizer files of Hugging Face folders.

It determines the vocabulary and the tokenization rules from files that may contradict each other.
"""

import dataclasses
import functools
import unicodedata
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from bert_jax.config import TokenizerConfig
from bert_jax.interop.model_bundle import ReadOptions
from bert_jax.interop.stored_model import listed
from bert_jax.interop.tokenizers import family_files, json_format
from bert_jax.io.untrusted_folder import LARGEST, LARGEST_TOKENIZER, inside, json_object, read_small
from bert_jax.json_values import Json
from bert_jax.tokenization import SPECIAL_PIECES, build_tokenizer
from bert_jax.tokenization.byte_bpe import ROBERTA_PIECES, byte_bpe_content
from bert_jax.tokenization.json_parts import part_of, pieces_by_id, serialized
from bert_jax.tokenization.json_tokenizer import GPT2_PIECE, has_own_rules
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
    files = _Files(folder, options)
    settings, max_length = files.settings, _max_length(files.settings.get("model_max_length"))
    found = files.read()
    if found is None:
        if settings or files.json("special_tokens_map.json") is not None:
            names = "vocab.txt, tokenizer.json, tokenizer.model or vocab.json with merges.txt"
            raise ValueError(f"{folder}: the tokenizer's vocabulary is missing; add {names}")
        return None, None, ("the folder has no tokenizer: the inputs of the model are ids",)
    config, content = found
    tokenizer = build_tokenizer(config, content, str(folder / config.file))  # raises for an invalid file
    lower_case = config.lower_case if tokenizer.kind == "wordpiece" else tokenizer.lower_case
    inputs = settings.get("model_input_names")
    config = dataclasses.replace(
        config, lower_case=lower_case, max_length=max_length, truncation_side=files.truncation_side(),
        pair_types=not (isinstance(inputs, list) and tokenizer.second_type) or "token_type_ids" in inputs,
    )  # fmt: skip
    return config, content, tuple(files.notes)


def _max_length(value: Json) -> int:
    """Return ``value``, the ``model_max_length`` of a tokenizer, or 0 (no limit) if it is absent or at least 1e6.

    transformers stores 1e30 if there is no limit.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        return 0
    return int(value) if 0 < value < 1e6 else 0


@dataclass
class _Files:
    """The tokenizer files of one folder, and the notes on them."""

    folder: Path
    options: ReadOptions
    notes: list[str] = field(default_factory=list)

    def path(self, name: str) -> str:
        """Return the path of a file of the folder, for messages."""
        return str(self.folder / name)

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

    def json(self, name: str) -> dict[str, Json] | None:
        """Return the JSON object in the file ``name``, or None if the file does not exist."""
        content = self.content(name)
        return None if content is None else json_object(content, self.folder / name)

    @functools.cached_property
    def settings(self) -> dict[str, Json]:
        """The content of ``tokenizer_config.json``."""
        return self.json("tokenizer_config.json") or {}

    @functools.cached_property
    def state(self) -> dict[str, Json] | None:
        """The content of ``tokenizer.json``; None if there is no such file."""
        return self.json("tokenizer.json")

    @functools.cached_property
    def added(self) -> dict[str, dict[str, Json]]:
        """The id (None: not stated) and, if the folder states them, the flags of every added token in
        ``tokenizer.json``, which has priority, ``added_tokens.json``, and ``added_tokens_decoder`` and lists of
        special tokens in the settings and special_tokens_map.json, by content."""
        added: dict[str, dict[str, Json]]
        added = {
            piece: {"content": piece, "id": number}
            for piece, number in (self.json("added_tokens.json") or {}).items()
        }
        for number, token in part_of(self.settings, "added_tokens_decoder").items():
            content = token.get("content") if isinstance(token, dict) else None
            if isinstance(token, dict) and isinstance(content, str) and str(number).isdecimal():
                added[content] = {"id": int(str(number)[:19]), **token, **added.get(content, {})}
        for file in (self.settings, self.json("special_tokens_map.json") or {}):
            for key in ("additional_special_tokens", "extra_special_tokens"):
                tokens = file.get(key)
                tokens = list(tokens.values()) if isinstance(tokens, dict) else tokens
                for token in tokens if isinstance(tokens, list) else ():
                    flags = token if isinstance(token, dict) else {"content": token}
                    if isinstance(piece := flags.get("content"), str):
                        added[piece] = {"id": None, **flags, **added.get(piece, {}), "special": True}
        for content, token in json_format.added_tokens(self.state or {}, self.path("tokenizer.json")).items():
            added[content] = {**added.get(content, {}), **token}
        return added

    def foreign(self, known: Collection[str]) -> dict[str, dict[str, Json]]:
        """Return the added tokens that are not ``known``."""
        return {content: token for content, token in self.added.items() if content not in known}

    def differ(self, message: str) -> None:
        """Raise ``ValueError`` with ``message``; if ``options.allow_mismatch`` is True, add a note instead."""
        if not self.options.allow_mismatch:
            raise ValueError(f"{self.folder}: {message}; set --allow_mismatch to accept this")
        self.notes.append(message)

    def truncation_side(self) -> Literal["right", "left"]:
        """Return the side at which transformers truncates, from the settings or ``tokenizer.json``."""
        stored = part_of(self.state, "truncation").get("direction", "right")
        side = self.settings.get("truncation_side") or str(stored).lower()
        if side == "right" or side == "left":
            return side
        raise ValueError(f"{self.folder}: truncation_side is {str(side)[:40]!r}; allowed: right, left")

    def read(self) -> tuple[TokenizerConfig, bytes] | None:
        """Return the settings of the tokenizer without limits, and the content of its file; None: no tokenizer."""
        state = self.state
        self.check_code()
        by_json = TokenizerConfig(file="tokenizer.json", lower_case=False)
        model = self.content("tokenizer.model")
        if model is not None and not self.is_other_model(model):
            if found := self.foreign(SPECIAL_PIECES):
                return by_json, self.with_tokens(json_format.sentencepiece_json(model), found)
            return TokenizerConfig(file="tokenizer.model"), model
        kind = part_of(state, "model").get("type")
        if kind is None and state is not None:  # older files have no type
            kind = "BPE" if "merges" in part_of(state, "model") else "WordPiece"
        if state is not None and has_own_rules(state):
            found = self.foreign(json_format.added_tokens(state, self.path("tokenizer.json")))
            # Kept byte for byte, unless other files add tokens: every rule of the file applies.
            content = self.with_tokens(state, found) if found else self.content("tokenizer.json")
            return by_json, content or b""
        if kind == "BPE":
            return by_json, self.byte_bpe(state)
        if kind not in (None, "WordPiece"):
            raise ValueError(
                f"{self.folder / 'tokenizer.json'}: a {str(kind)[:40]} tokenizer is not supported; use "
                "WordPiece, BPE, Unigram or a tokenizer.model (SentencePiece) with BERT's special tokens"
            )
        vocabulary = self.content("vocab.txt")
        table = self.json("vocab.json") if state is None and vocabulary is None else None
        made = self.family_state(vocabulary, table) if state is None else None
        if made is not None:
            return by_json, self.with_tokens(made, self.added)
        if state is not None or vocabulary is not None:
            return self.wordpiece(vocabulary)
        return None if table is None else (by_json, self.roberta_files(table))

    def with_tokens(self, state: Mapping[str, Json], added: Mapping[str, Mapping[str, Json]]) -> bytes:
        """Return the content of a ``tokenizer.json`` with the rules of ``state`` and the ``added`` tokens."""
        return serialized(family_files.with_added_tokens(state, added, str(self.folder)))

    @property
    def stated_class(self) -> str:
        """The class that the settings or config.json name, without the endings Tokenizer and Fast."""
        classes = (file.get("tokenizer_class") for file in (self.settings, self.json("config.json") or {}))
        return next((str(name) for name in classes if name), "").removesuffix("Fast").removesuffix("Tokenizer")

    def check_code(self) -> None:
        """Refuse code of the folder (``auto_map``) that may split text by other rules than the files state."""
        stated = self.settings.get("auto_map")
        stated = stated.get("AutoTokenizer") if isinstance(stated, dict) else stated
        slow, fast = stated[:2] if isinstance(stated, list) and len(stated) > 1 else (stated, None)
        if self.state is not None and fast:
            self.notes.append(f"tokenizer.json is used; the code that auto_map names ({str(fast)[:60]}) is not run")
        elif slow or fast:
            self.differ(
                f"the tokenizer is code of the folder (auto_map {str(slow or fast)[:60]}), which is never run; "
                "save it as the tokenizer.json of a fast tokenizer"
            )

    def check_class(self, known: Sequence[str], rules: str) -> None:
        """Refuse a class whose rules for the vocabulary are not ``rules``."""
        stated = self.stated_class
        if stated == "BertJapanese":
            kinds = [self.settings.get(f"{part}_tokenizer_type", "") for part in ("word", "subword")]
            stated = "Bert" if kinds == ["basic", "wordpiece"] else stated
        if stated not in known:
            self.differ(
                f"tokenizer_class {stated[:40]}Tokenizer splits text by other rules than {rules}, which this "
                "library does not have; add its tokenizer.json with these rules, or separate the words of every "
                "text with spaces as that tokenizer does"
            )

    def is_other_model(self, model: bytes) -> bool:
        """Return True if ``tokenizer.json`` has special rules and was not converted from ``tokenizer.model``."""
        if self.state is None or not has_own_rules(self.state):
            return False
        family_files.require_sentencepiece(model, self.path("tokenizer.model"))
        pieces = [piece.text for piece in json_format.parse_model(model)[0]]
        model_part = part_of(self.state, "model")
        table = model_part.get("vocab")
        stated = [item[0] for item in table] if isinstance(table, list) else [*part_of(model_part, "vocab")]
        if stated != pieces or not set(SPECIAL_PIECES) <= set(pieces):
            self.notes.append("tokenizer.json is used; tokenizer.model has other pieces or no pieces like [CLS]")
            return True
        return False

    def family_state(self, vocabulary: bytes | None, table: Json) -> dict[str, Json] | None:
        """Return a ``tokenizer.json`` converted from the files of a family other than BERT and RoBERTa, or None if
        the folder has no such files."""
        family = _CLASSES.get(self.stated_class, (self.json("config.json") or {}).get("model_type"))
        if vocabulary is not None:
            pieces = read_pieces(vocabulary, self.path("vocab.txt")) if family == "mpnet" else []
            return family_files.mpnet_json(pieces, self.settings) if pieces else None
        if table is not None:
            pieces = pieces_by_id(table, self.path("vocab.json"))
            ids = {piece: i for i, piece in enumerate(pieces)}
            if GPT2_PIECE in ids and "</s>" not in ids:
                return family_files.gpt2_json(ids, self.merges(), self.settings.get("add_prefix_space") is True)
            is_gpt = "<unk>" in ids and "</s>" not in ids and any(piece.endswith("</w>") for piece in pieces)
            return family_files.gpt_json(ids, self.merges()) if is_gpt else None
        for name, families in family_files.SENTENCEPIECE_FILES.items():
            content = self.content(name)
            if content is not None:
                chosen = families[0] if len(families) == 1 else str(family)
                if chosen not in families:
                    remedy = f"set model_type in config.json to one of {', '.join(families)}, or add tokenizer.json"
                    raise ValueError(f"{self.folder / name}: the family is unknown; {remedy}")
                return family_files.sentencepiece_family_json(content, chosen, self.settings, self.path(name))
        return None

    def byte_bpe(self, state: Json) -> bytes:
        """Return a canonical ``tokenizer.json`` with the vocabulary, merges, ``add_prefix_space`` and added tokens
        of ``state``, which must be a byte-level BPE like that of RoBERTa."""
        name, model = self.path("tokenizer.json"), part_of(state, "model")
        steps = json_format.steps_of(part_of(state, "pre_tokenizer"), "pretokenizers")
        if len(steps) != 1 or steps[0].get("type") != "ByteLevel":
            raise ValueError(f"{name}: the BPE is not byte-level like that of RoBERTa; only this kind is supported")
        if model.get("byte_fallback") or model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
            raise ValueError(f"{name}: a BPE with subword prefix, word suffix or byte fallback is not supported")
        prefix, merges = (
            steps[0].get("add_prefix_space") is True,
            json_format.merge_pairs(model.get("merges"), name),
        )
        return self.roberta_content(model.get("vocab"), merges, prefix, name)

    def roberta_files(self, table: Json) -> bytes:
        """Return the same for the pieces of ``vocab.json`` and the merges of ``merges.txt``."""
        self.check_class(_WITH_RULES_OF_ROBERTA, "RoBERTa's")
        prefix = self.settings.get("add_prefix_space") is True
        return self.roberta_content(table, self.merges(), prefix, self.path("vocab.json"))

    def roberta_content(self, table: Json, merges: Sequence[tuple[str, str]], prefix: bool, name: str) -> bytes:
        pieces = self.with_special(pieces_by_id(table, name), ROBERTA_PIECES)
        content = byte_bpe_content(pieces, merges, add_prefix_space=prefix, name=name)
        found = self.foreign(ROBERTA_PIECES)
        return self.with_tokens(json_object(content, name), found) if found else content

    def merges(self) -> list[tuple[str, str]]:
        """Return the merges of ``merges.txt``, sorted by rank."""
        name, content = self.path("merges.txt"), self.content("merges.txt")
        if content is None:
            raise ValueError(f"{name}: the file is missing; a tokenizer needs vocab.json and merges.txt")
        try:
            lines = content.decode().split("\n")
        except UnicodeDecodeError:
            raise ValueError(f"{name}: not valid UTF-8") from None
        merges = [line.rstrip("\r") for line in lines if line.strip() and not line.startswith("#version")]
        return json_format.merge_pairs(merges, name)

    def with_special(self, pieces: list[str], special: Sequence[str]) -> list[str]:
        """Return ``pieces`` followed by those ``special`` pieces among the added tokens that ``pieces`` lacks.
        Raises ``ValueError`` if their ids do not follow the ids of ``pieces``."""
        ids = {piece: token["id"] for piece, token in self.added.items()}
        lacking = {*ids}.intersection(special).difference(pieces)
        extra = sorted(lacking, key=lambda piece: str(ids[piece]).zfill(20))
        if [ids[piece] for piece in extra] != list(range(len(pieces), len(pieces) + len(extra))):
            problem = "ids of added tokens must directly follow those of the vocabulary"
            raise ValueError(f"{self.folder}: {problem}: {listed(list(map(repr, extra)), most=5)}")
        return [*pieces, *extra]

    def wordpiece(self, content: bytes | None) -> tuple[TokenizerConfig, bytes]:
        """Return the settings and the vocabulary of a WordPiece whose ``vocab.txt`` is ``content``, if any."""
        self.check_class(_WITH_RULES_OF_BERT, "BERT's")
        name, json_name = self.path("vocab.txt"), self.path("tokenizer.json")
        limit: Json = 100  # default of transformers for a vocabulary without tokenizer.json
        known = [] if content is None else self.vocab_txt(content, name)
        if self.state is not None:
            model = part_of(self.state, "model")
            if model.get("unk_token", "[UNK]") != "[UNK]" or model.get("continuing_subword_prefix", "##") != "##":
                raise ValueError(f"{json_name}: unk_token must be [UNK], and continuing_subword_prefix must be ##")
            limit = model.get("max_input_chars_per_word", 100)
            pieces = pieces_by_id(model.get("vocab"), json_name)
            if content is None:
                name, known = json_name, pieces
            elif [piece.strip() for piece in pieces] != known:
                self.differ("vocab.txt and tokenizer.json contain different vocabularies; vocab.txt has priority")
        pieces = self.with_special(known, SPECIAL_PIECES)
        if found := self.foreign(SPECIAL_PIECES):
            config = self.rules(pieces)
            rules = json_format.bert_rules(
                lower_case=config.lower_case, strip_accents=config.strip_accents, split_cjk=config.split_cjk
            )
            made = json_format.wordpiece_json(pieces, rules, limit)
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
        return self.rules(pieces), content

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

    def rules(self, pieces: Sequence[str]) -> TokenizerConfig:
        """Return the settings for case, accents and CJK from the options or the files, or guess them from the
        pieces."""
        stated = {ours: self.settings[theirs] for ours, theirs, _ in RULES if theirs in self.settings}
        rust = self.normalizer(stated)
        # transformers builds the class BertTokenizer from tokenizer_config.json and any other from tokenizer.json.
        kind = str(self.settings.get("tokenizer_class") or "BertTokenizer").removesuffix("Fast")
        chosen = {**rust, **stated} if kind == "BertTokenizer" else {**stated, **rust}
        for ours, theirs, rusts in RULES:
            if ours in stated and ours in rust and stated[ours] != rust[ours]:
                self.notes.append(
                    f"tokenizer_config.json has {theirs} {stated[ours]}, tokenizer.json {rusts} {rust[ours]}: "
                    f"{chosen[ours]} is used, as in transformers"
                )
        if self.options.lower_case is not None:
            if chosen.get("lower_case", self.options.lower_case) != self.options.lower_case:
                self.notes.append(
                    f"the option lower_case {self.options.lower_case} replaces the value in the files"
                )
            chosen["lower_case"] = self.options.lower_case
        flags = {ours: value for ours, value in chosen.items() if isinstance(value, bool)}
        for ours in chosen.keys() - flags.keys():
            if chosen[ours] is not None or ours != "strip_accents":
                value = str(chosen[ours])[:40]
                raise ValueError(f"{self.folder}: {ours} {value!r} is not allowed; allowed: true, false")
        if "lower_case" not in flags:
            flags |= self.guess(pieces, knows_accents="strip_accents" in chosen)
        return TokenizerConfig(
            file="vocab.txt", lower_case=flags["lower_case"], strip_accents=flags.get("strip_accents"),
            split_cjk=flags.get("split_cjk", True),
        )  # fmt: skip

    def normalizer(self, stated: Mapping[str, Json]) -> dict[str, Json]:
        """Return the settings of BERT's normalizer in ``tokenizer.json``. Return an empty dict for other rules,
        which are a contradiction unless this library wrote them for the settings ``stated``."""
        if self.state is None:
            return {}
        normalizer, splits = part_of(self.state, "normalizer"), part_of(self.state, "pre_tokenizer")
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

    def guess(self, pieces: Sequence[str], knows_accents: bool) -> dict[str, bool]:
        """Return the case of the pieces and, unless it ``knows_accents``, whether accents are stripped."""
        words = [piece for piece in pieces if piece not in SPECIAL_PIECES]
        capitals = sum(piece.lower() != piece for piece in words)
        guessed = {"lower_case": capitals <= _SIGNIFICANT * len(words)}
        letters = (unicodedata.normalize("NFD", piece) for piece in words)
        accents = sum(any(unicodedata.category(char) == "Mn" for char in piece) for piece in letters)
        how = "lower-cased" if guessed["lower_case"] else "cased"
        if guessed["lower_case"] and not knows_accents and accents > _SIGNIFICANT * len(words):
            guessed["strip_accents"] = False
            how += ", accents kept"
        self.notes.append(
            f"no file sets the case: {how}, guessed from the pieces ({capitals} of {len(words)} with capitals, "
            f"{accents} with accents); set it with --do_lower_case"
        )
        return guessed


def _is_ours(rules: Mapping[str, Json], stated: Mapping[str, Json]) -> bool:
    """Return True if ``rules`` are those that this library writes for the settings ``stated``."""
    lower_case, strip, split_cjk = (stated.get(key) for key in ("lower_case", "strip_accents", "split_cjk"))
    if not isinstance(lower_case, bool) or not isinstance(split_cjk, bool) or not isinstance(strip, bool | None):
        return False
    return rules == json_format.exact_rules(lower_case=lower_case, strip_accents=strip, split_cjk=split_cjk)
