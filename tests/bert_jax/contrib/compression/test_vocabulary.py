"""Parts of vocabularies: texts of the corpus keep their pieces, and other texts get no further unknown
pieces."""

import io
import json

import numpy as np
import pytest
import sentencepiece
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from bert_jax.config import TokenizerConfig
from bert_jax.contrib.compression.vocabulary import subset
from bert_jax.tokenization import SPECIAL_PIECES, build_tokenizer

RNG = np.random.default_rng(0)
STARTS, ENDS = ("b", "d", "gr", "k", "sch", "t", "ш", "中"), ("a", "e", "ön", "ung", "is", "о", "文")
SYLLABLES = [start + end for start in STARTS for end in ENDS]


def sentences(count: int, seed: int) -> list[str]:
    """Sentences of words of one to four syllables, some of them much more frequent than others."""
    rng = np.random.default_rng(seed)

    def word() -> str:
        chosen = (rng.random(rng.integers(1, 5)) ** 2 * len(SYLLABLES)).astype(int)
        return "".join(SYLLABLES[i] for i in chosen)

    lines = [" ".join(word() for _ in range(rng.integers(3, 12))) for _ in range(count)]
    return [line.capitalize() + ("." if rng.random() < 0.9 else "?") for line in lines]


ALL = sentences(600, 0)
# The corpus, and other texts, some with characters that no piece has.
CORPUS, UNSEEN = ALL[:60], [*ALL[60:], "Grönœ kaða 文x.", "", "  Ba  "]


def wordpiece() -> bytes:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(vocab_size=700, special_tokens=list(SPECIAL_PIECES), show_progress=False)
    tokenizer.train_from_iterator(ALL, trainer)
    vocab = tokenizer.get_vocab()
    return "".join(f"{piece}\n" for piece in sorted(vocab, key=vocab.get)).encode()


def sentence_piece(kind: str, size: int = 400, **options) -> bytes:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(ALL), model_writer=model, model_type=kind, vocab_size=size, hard_vocab_limit=False,
        character_coverage=0.9995, minloglevel=2, num_threads=1, pad_id=0, unk_id=1, bos_id=2, eos_id=3,
        pad_piece="[PAD]", unk_piece="[UNK]", bos_piece="[CLS]", eos_piece="[SEP]", control_symbols=["[MASK]"],
        **options,
    )  # fmt: skip
    return model.getvalue()


def xlm_roberta() -> bytes:
    """A unigram tokenizer.json with <s>, </s> and a mask piece at the end."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    special = ["<s>", "<pad>", "</s>", "<unk>"]
    trainer = trainers.UnigramTrainer(
        vocab_size=400, special_tokens=special, unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(ALL, trainer)
    tokenizer.add_special_tokens([AddedToken("<mask>", lstrip=True)])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    return tokenizer.to_str().encode()


def byte_bpe() -> bytes:
    """RoBERTa's byte-level BPE."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=["<s>", "<pad>", "</s>", "<unk>", "<mask>"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    tokenizer.train_from_iterator(ALL, trainer)
    tokenizer.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0), add_prefix_space=False)
    return tokenizer.to_str().encode()


def gpt() -> bytes:
    """GPT's BPE, whose pieces at the end of a word have a suffix."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.BertPreTokenizer(), decoders.BPEDecoder("</w>")
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=["<unk>"], end_of_word_suffix="</w>", show_progress=False
    )
    tokenizer.train_from_iterator(ALL, trainer)
    return tokenizer.to_str().encode()


def json_wordpiece() -> bytes:
    """WordPiece with an added piece, and with <s> in the place of [CLS]."""
    pieces = wordpiece().decode().replace("[CLS]", "<s>").replace("[SEP]", "</s>").split("\n")[:-1]
    tokenizer = Tokenizer(models.WordPiece({p: i for i, p in enumerate(pieces)}, unk_token="[UNK]"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.NFC(), pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(["[PAD]", "[UNK]", "<s>", "</s>", "[MASK]"])
    tokenizer.add_tokens(["graschung"])
    tokenizer.post_processor = processors.BertProcessing(("</s>", 3), ("<s>", 2))
    return tokenizer.to_str().encode()


KINDS = {
    "wordpiece": (wordpiece, TokenizerConfig(lower_case=False)),
    "unigram": (lambda: sentence_piece("unigram"), TokenizerConfig(file="tokenizer.model")),
    "bpe": (lambda: sentence_piece("bpe"), TokenizerConfig(file="tokenizer.model")),
    "bytes": (
        lambda: sentence_piece(
            "bpe", 700, byte_fallback=True, user_defined_symbols=["schung"], split_by_whitespace=False
        ),
        TokenizerConfig(file="tokenizer.model"),
    ),
    "xlm_roberta": (xlm_roberta, TokenizerConfig(file="tokenizer.json")),
    "byte_bpe": (byte_bpe, TokenizerConfig(file="tokenizer.json")),
    "gpt": (gpt, TokenizerConfig(file="tokenizer.json")),
    "json_wordpiece": (json_wordpiece, TokenizerConfig(file="tokenizer.json")),
}  # fmt: skip


@pytest.mark.cases(1)
@pytest.mark.parametrize("kind", KINDS)
def test_texts_keep_their_pieces(kind):
    make, settings = KINDS[kind]
    content = make()
    whole = build_tokenizer(settings, content, "whole")
    lengths = [sum(map(len, whole.encode_batch(UNSEEN)))]
    kept = []
    for ngram in (5, 0):
        part = subset(settings, content, "whole", lambda: CORPUS, ngram)
        kept.append(set(part.ids.tolist()))
        lengths.append(check(whole, build_tokenizer(settings, part.content, "part"), part))
    assert kept[1] < kept[0] < set(range(whole.vocab_size)) and len(kept[1]) < 0.9 * whole.vocab_size
    # The likely pieces shorten unseen texts.
    assert lengths[0] <= lengths[1] < lengths[2] < 1.5 * lengths[0]


def check(whole, trimmed, part):
    """Compare texts of the corpus and other texts; return the number of tokens of the others."""
    assert trimmed.pieces(range(trimmed.vocab_size)) == whole.pieces(part.ids)
    assert trimmed.special_pieces == whole.special_pieces and trimmed.kind == whole.kind
    assert trimmed.continuation.tolist() == whole.continuation[part.ids].tolist()
    before, after = whole.encode_batch(CORPUS), trimmed.encode_batch(CORPUS)
    assert before == [part.ids[row].tolist() for row in after]
    assert (part.texts, part.tokens) == (len(CORPUS), sum(map(len, before)))
    for old, new in zip(before, after, strict=True):
        ids, types = whole.build_inputs(old, old)
        assert trimmed.build_inputs(new, new) == (np.searchsorted(part.ids, ids).tolist(), types)
    old, new = whole.encode_batch(UNSEEN), trimmed.encode_batch(UNSEEN)
    assert [row.count(whole.unk_id) for row in old] == [row.count(trimmed.unk_id) for row in new]
    for text in UNSEEN[:20]:
        assert trimmed.decode(trimmed.encode(text)) == whole.decode(whole.encode(text))
    return sum(map(len, new))


def test_pieces_on_the_way_are_kept():
    """Without them, a text of a BPE vocabulary would fall apart."""
    make, settings = KINDS["byte_bpe"]
    content = make()
    whole = build_tokenizer(settings, content, "whole")
    part = subset(settings, content, "whole", lambda: CORPUS, 0)
    used = {piece for row in whole.encode_batch(CORPUS) for piece in row}
    single = {number for number, piece in enumerate(whole.pieces(range(whole.vocab_size))) if len(piece) == 1}
    assert set(part.ids.tolist()) - used - single - set(np.flatnonzero(whole.special).tolist())
    merges = json.loads(part.content)["model"]["merges"]
    assert len(merges) < len(json.loads(content)["model"]["merges"])


def test_what_is_refused():
    make, settings = KINDS["gpt"]
    with pytest.raises(ValueError, match=r"^--corpus: no text in it; give files with one text per line$"):
        subset(settings, make(), "here", list)
    state = json.loads(make())
    state["model"]["ignore_merges"] = True
    with pytest.raises(
        ValueError, match=r"^here: BPE with continuing_subword_prefix or ignore_merges cannot be trim"
    ):
        subset(settings, json.dumps(state).encode(), "here", lambda: CORPUS)
    with pytest.raises(ValueError, match=r"^here: only unigram and BPE models of SentencePiece without unused"):
        subset(TokenizerConfig(file="a.model"), sentence_piece("char"), "here", lambda: CORPUS)
