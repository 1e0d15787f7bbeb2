"""Tokenizers and texts that the recording script and the tests share: tiny vocabularies, made here."""

from pathlib import Path

from bert_jax.config import HeadsConfig, ModelConfig, ModelSpec, TokenizerConfig
from bert_jax.tokenization import SPECIAL_PIECES
from bert_jax.tokenization.byte_bpe import ROBERTA_PIECES, byte_bpe_content

MODEL = {"hidden_size": 32, "num_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
# Cut to these lengths, special tokens included; None: not cut.
LENGTHS = (None, 4, 5, 8, 13)
TEXTS = (
    "The quick brown fox jumps, over 12 dogs!",
    "Na\u00efve CAF\u00c9 \u00dcbung \u00c5b a\u0301b",
    "\u039f\u0394\u039f\u03a3 \u03a3 \u03a3\u039f\u03a6\u039f\u03a3.",
    "\u4e2d\u6587ab\u5b57 line\u2028break\u3000x",
    "zero\u200bwidth \ue000x \ufffdy",
    "un" * 60 + " " + "un" * 101 + " b",
    "",
    " ",
    "un" * 9,
)
# Second texts, one for each first.
PAIRS = (*TEXTS[3:], *TEXTS[:3])


def _wordpieces(lower_case: bool) -> bytes:
    letters = "abcdefghijklmnopqrstuvwxyz0123456789\u03b1\u03b4\u03bf\u03c3\u03c2\u03c6\ue000"
    letters += "" if lower_case else "ABCDEFGHIJKLMNOPQRSTUVWXYZ\u00ef\u00c9\u00dc\u0391\u0394\u039f\u03a3\u03a6"
    words = [
        "the",
        "quick",
        "brown",
        "##own",
        "fox",
        "##ox",
        "line",
        "un",
        "##un",
        "break",
        "ab",
        "\u4e2d",
        "\u5b57",
    ]
    # As in the published Chinese vocabulary: a piece that is a line break to str.splitlines.
    pieces = [*SPECIAL_PIECES, *",.!", *letters, *("##" + letter for letter in letters), *words, "\u2028"]
    return "".join(piece + "\n" for piece in pieces).encode()


def byte_pieces() -> tuple[list[str], list[tuple[str, str]]]:
    """Pieces and merges of a byte-level BPE in RoBERTa's order of ids: all 256 bytes and a few words."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in shown]
    letters = [chr(byte) for byte in shown] + [chr(256 + i) for i in range(len(rest))]
    merges = [
        ("t", "h"),
        ("\u0120", "q"),
        ("th", "e"),
        ("T", "h"),
        ("Th", "e"),
        ("o", "x"),
        ("u", "n"),
        ("\u00c3", "\u00af"),
    ]
    first = ["<s>", "<pad>", "</s>", "<unk>"]
    return [*first, *letters, *(a + b for a, b in merges), "<mask>"], merges


def cases() -> dict[str, tuple[ModelSpec, bytes]]:
    """Name -> a model's spec and the content of its tokenizer's file."""

    def spec(content: bytes, family: str = "bert", **tokenizer: object) -> ModelSpec:
        model = ModelConfig(vocab_size=400, **MODEL)
        return ModelSpec(model=model, heads=HeadsConfig(), tokenizer=TokenizerConfig(**tokenizer), family=family)

    made: dict[str, tuple[ModelSpec, bytes]] = {}
    for name, lower_case, strip_accents, split_cjk in (
        ("uncased", True, None, True), ("cased", False, None, True), ("accents", True, False, True),
        ("joined", False, True, False),
    ):  # fmt: skip
        content = _wordpieces(lower_case)
        options = {"lower_case": lower_case, "strip_accents": strip_accents, "split_cjk": split_cjk}
        made[name] = spec(content, **options), content
    pieces, merges = byte_pieces()
    content = byte_bpe_content(pieces, merges)
    made["roberta"] = spec(content, "roberta", file="tokenizer.json", lower_case=False), content
    assert set(ROBERTA_PIECES) <= set(pieces)
    return made


FIXTURE = Path(__file__).parent / "fixtures" / "tokenizers.json"
