"""Files of tokenizers of all families, with small vocabularies that are trained on lines of text."""

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import sentencepiece
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

PIECES = 6000


def sentencepiece_model(folder: Path, name: str, lines: Sequence[str], **options: Any) -> None:
    """Train a SentencePiece model in the file ``name`` of ``folder``."""
    options = {
        "model_type": "unigram",
        "vocab_size": PIECES,
        "character_coverage": 0.999,
        "num_threads": 2,
        **options,
    }
    with (folder / name).open("wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines), model_writer=file, minloglevel=2, **options
        )


def albert(folder: Path, lines: Sequence[str]) -> None:
    sentencepiece_model(
        folder, "spiece.model", [line.lower() for line in lines], pad_id=0, unk_id=1, bos_id=2, eos_id=3,
        pad_piece="<pad>", unk_piece="<unk>", bos_piece="[CLS]", eos_piece="[SEP]", control_symbols=["[MASK]"],
        user_defined_symbols=["(", ")", '"', "-", ".", "\u2013", "\u00a3", "\u20ac"],
    )  # fmt: skip


def big_bird(folder: Path, lines: Sequence[str]) -> None:
    sentencepiece_model(
        folder, "spiece.model", lines, pad_id=0, eos_id=1, bos_id=2, unk_id=3,
        control_symbols=["[CLS]", "[SEP]", "[MASK]"],
    )  # fmt: skip


def fairseq(folder: Path, lines: Sequence[str]) -> None:
    sentencepiece_model(folder, "sentencepiece.bpe.model", lines)


def deberta(folder: Path, lines: Sequence[str]) -> None:
    sentencepiece_model(
        folder, "spm.model", lines, pad_id=0, bos_id=1, eos_id=2, unk_id=3, pad_piece="[PAD]", bos_piece="[CLS]",
        eos_piece="[SEP]", unk_piece="[UNK]",
    )  # fmt: skip


def bpe_files(folder: Path, made: Any) -> None:
    """Write ``vocab.json`` and ``merges.txt`` of a trained BPE."""
    model = json.loads(made.to_str())["model"]
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    (folder / "vocab.json").write_text(json.dumps(model["vocab"], ensure_ascii=False), encoding="utf-8")
    text = "".join(line + "\n" for line in ["#version: 0.2", *merges])
    (folder / "merges.txt").write_text(text, encoding="utf-8")


def byte_bpe(lines: Sequence[str], special: Sequence[str]) -> Any:
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=PIECES, special_tokens=list(special), initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(lines, trainer)
    return made


def roberta(folder: Path, lines: Sequence[str]) -> None:
    bpe_files(folder, byte_bpe(lines, ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]))


def gpt2(folder: Path, lines: Sequence[str]) -> None:
    bpe_files(folder, byte_bpe(lines, ["<|endoftext|>"]))


def gpt(folder: Path, lines: Sequence[str]) -> None:
    made = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    made.normalizer = normalizers.BertNormalizer(lowercase=True)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.BpeTrainer(
        vocab_size=PIECES, special_tokens=["<unk>"], end_of_word_suffix="</w>", limit_alphabet=1500,
        show_progress=False,
    )  # fmt: skip
    made.train_from_iterator(lines, trainer)
    bpe_files(folder, made)


def word_pieces(lines: Sequence[str], special: Sequence[str]) -> list[str]:
    made = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer(lowercase=True)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(
        vocab_size=PIECES, special_tokens=list(special), limit_alphabet=1500, show_progress=False
    )
    made.train_from_iterator(lines, trainer)
    table = made.get_vocab()
    return sorted(table, key=table.__getitem__)


def write_pieces(folder: Path, pieces: Sequence[str]) -> None:
    (folder / "vocab.txt").write_text("".join(piece + "\n" for piece in pieces), encoding="utf-8")


def bert(folder: Path, lines: Sequence[str]) -> None:
    write_pieces(folder, word_pieces(lines, ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]))


def mpnet(folder: Path, lines: Sequence[str]) -> None:
    old = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    write_pieces(folder, [*word_pieces(lines, ["<s>", "<pad>", "</s>", "<unk>", *old]), "<mask>"])


def modernbert(folder: Path, lines: Sequence[str]) -> None:
    made = byte_bpe(lines, ["<|padding|>", "<|endoftext|>"])
    made.normalizer = normalizers.NFC()
    made.add_tokens([AddedToken("|||IP_ADDRESS|||", normalized=True)])
    made.add_tokens([AddedToken(" " * n, normalized=True) for n in range(24, 1, -1)])
    names = ("[UNK]", "[CLS]", "[SEP]", "[PAD]", "[MASK]")
    made.add_special_tokens([AddedToken(name, normalized=False, lstrip=name == "[MASK]") for name in names])
    made.add_tokens([AddedToken(f"[unused{n}]", normalized=True) for n in range(3)])
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(name, made.token_to_id(name)) for name in ("[CLS]", "[SEP]")],
    )  # fmt: skip
    made.save(str(folder / "tokenizer.json"))
    names = dict(zip(("unk_token", "cls_token", "sep_token", "pad_token", "mask_token"), names, strict=True))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **names}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


# Name -> (model_type of config.json, trainer, content of tokenizer_config.json).
FAMILIES: dict[str, tuple[str, Callable[[Path, Sequence[str]], None], dict[str, Any]]] = {
    "albert": ("albert", albert, {}),
    "albert, cased": ("albert", albert, {"do_lower_case": False, "keep_accents": True}),
    "big_bird": ("big_bird", big_bird, {}),
    "camembert": ("camembert", fairseq, {}),
    "xlm-roberta": ("xlm-roberta", fairseq, {}),
    "deberta-v2": ("deberta-v2", deberta, {"do_lower_case": False}),
    "roberta": ("roberta", roberta, {}),
    "longformer": ("longformer", roberta, {}),
    "gpt2": ("gpt2", gpt2, {}),
    "openai-gpt": ("openai-gpt", gpt, {}),
    "mpnet": ("mpnet", mpnet, {}),
    "bert": ("bert", bert, {"do_lower_case": True}),
    "distilbert": ("distilbert", bert, {"do_lower_case": True}),
    "electra": ("electra", bert, {"do_lower_case": True}),
    "modernbert": ("modernbert", modernbert, {}),
}


def make_files(root: Path, names: Sequence[str], lines: Sequence[str]) -> None:
    """Write the folder "files" of each family; one vocabulary per trainer."""
    made: dict[Any, Path] = {}
    for name in names:
        family, train, settings = FAMILIES[name]
        folder = root / name / "files"
        folder.mkdir(parents=True)
        if train in made:
            for file in made[train].iterdir():
                (folder / file.name).write_bytes(file.read_bytes())
        else:
            train(folder, lines)
            made[train] = folder
        (folder / "config.json").write_text(json.dumps({"model_type": family}))
        if settings:
            (folder / "tokenizer_config.json").write_text(json.dumps(settings))
