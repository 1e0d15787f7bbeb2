"""Log-probabilities of texts against a loop over single masked texts, and minimal pairs."""

import dataclasses
import functools
import gzip
import itertools
import json

import numpy as np
import pytest
from inference_models import PIECES, make_model, make_weights, plain, random_texts, shared_model

from bert_jax.config import HeadsConfig, TokenizerConfig
from bert_jax.contrib.analysis.minimal_pairs import LEVELS, accuracies, read_pairs, score_pairs
from bert_jax.contrib.generation.generate import generate
from bert_jax.inference.loaded import prepare
from bert_jax.inference.score import METHODS, _Open, copies, score
from bert_jax.metrics.resampling import wilson_interval
from bert_jax.tokenization import SPECIAL_PIECES, build_tokenizer
from bert_jax.tokenization.byte_bpe import byte_bpe_content

BAR = 1e-5
TEXTS = [
    *(text for text in random_texts(12, 30) if text), "w1xy, w2xyx w3?", "w1xy, w2xyy w3?", "w4", "w4", "yx w5x",
]  # fmt: skip
GOOD, BAD = "w1 w2xy w3 ?", "w1 w2xy w4 ?"


def loop(loaded, text, method):
    """The value of each token: a forward pass of each masked text alone."""
    tokenizer, values = loaded.tokenizer, []
    ids = tokenizer.build_inputs(tokenizer.encode(text))[0]
    for position in range(1, len(ids) - 1):
        masked, end = list(ids), position + 1
        while method == "PLL-word-l2r" and PIECES[ids[end]].startswith("##"):
            end += 1
        masked[position:end] = [tokenizer.mask_id] * (end - position)
        output = loaded.forward({"input_ids": np.array([masked]), "attention_mask": np.ones((1, len(ids)), int)})
        logits = output["mlm_logits"][0, position].astype(np.float64)
        values.append(logits[ids[position]] - np.logaddexp.reduce(logits))
    return values


@functools.cache
def causal(heads=None, **changes):
    weights = make_weights(heads or HeadsConfig(), positions=100)
    model = dataclasses.replace(weights.spec.model, attention="causal", **changes)
    return prepare(dataclasses.replace(weights, spec=dataclasses.replace(weights.spec, model=model)), name="small")


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_values_are_those_of_a_loop_over_single_texts(method):
    loaded = shared_model(HeadsConfig(mlm=True))
    short = [*TEXTS[:2], *TEXTS[-5:]]
    for text, row in zip(short, loaded.score(iter(short), method=method), strict=True):
        expected = loop(loaded, text, method)
        assert row.text == text
        assert list(row.pieces) == loaded.tokenizer.pieces(loaded.tokenizer.encode(text))
        np.testing.assert_allclose(row.log_probabilities, expected, atol=BAR)
        assert abs(row.score - sum(expected)) <= BAR * len(expected)


def test_methods_differ_only_before_the_end_of_a_word():
    loaded = shared_model(HeadsConfig(mlm=True))
    left_to_right, original = (loaded.score("w1xy w2", method=method) for method in METHODS)
    assert left_to_right == loaded.score("w1xy w2")  # the default
    differs = np.abs(np.subtract(left_to_right.log_probabilities, original.log_probabilities)) > 1e-3
    assert left_to_right.pieces == ("w1", "##x", "##y", "w2") and differs.tolist() == [True, True, False, False]


@pytest.mark.slow
@pytest.mark.parametrize("batch_tokens", [70, 300])
def test_packing_and_windows_do_not_change_the_values(monkeypatch, batch_tokens):
    loaded = shared_model(HeadsConfig(mlm=True))
    packed = loaded.score(TEXTS)
    monkeypatch.setattr("bert_jax.inference.engine.INPUTS_PER_ROW", 1)
    monkeypatch.setattr("bert_jax.inference.score.WINDOW", 7)  # texts end in other windows than they begin in
    alone = loaded.score(TEXTS, batch_tokens=batch_tokens)
    assert [row.text for row in alone] == TEXTS
    for one, other in zip(packed, alone, strict=True):
        np.testing.assert_allclose(one.log_probabilities, other.log_probabilities, atol=BAR)


@pytest.mark.slow
def test_equal_copies_run_once_and_texts_are_streamed():
    loaded, passes = shared_model(HeadsConfig(mlm=True)), []
    both = loaded.score([GOOD, BAD], progress=passes.append)
    assert sum(passes) == 6 + 6 - 1
    for row in both:
        np.testing.assert_allclose(row.log_probabilities, loop(loaded, row.text, METHODS[0]), atol=BAR)
    passes.clear()
    loaded.score(["w1 w4", "w1 w5", "w1 w6", "w1 w4"], progress=passes.append)  # one copy for two labels
    assert sum(passes) == 4 + 1
    endless = score(loaded, (text for text in itertools.cycle([GOOD, BAD])))
    assert [row.text for row in itertools.islice(endless, 5)] == [GOOD, BAD, GOOD, BAD, GOOD]


class TestCausal:
    @pytest.mark.slow
    @pytest.mark.parametrize("changes", [{}, {"relative_positions": "alibi"}])
    def test_values_are_those_of_all_logits(self, changes):
        loaded = causal(HeadsConfig(mlm=True), **changes)
        for text, row in zip(TEXTS, loaded.score(TEXTS), strict=True):
            logits = plain(loaded, text).mlm_logits[0].astype(np.float64)  # [CLS] text [SEP]
            ids = loaded.tokenizer.encode(text)
            expected = logits[np.arange(len(ids)), ids] - np.logaddexp.reduce(logits, axis=-1)[: len(ids)]
            np.testing.assert_allclose(row.log_probabilities, expected, atol=BAR)

    def test_a_run_without_head(self):
        """Its greedy tokens are the most probable of all, one after the other."""
        loaded = causal()
        (made,) = generate(loaded, ["w1 w2"], max_new_tokens=1)
        piece = loaded.tokenizer.pieces(made.ids)[0]
        candidates = [f"w1 w2 {word}" for word in PIECES[5:] if not word.startswith("##")]
        best = max(loaded.score(candidates), key=lambda row: row.score)
        assert best.pieces[-1] == piece

    def test_a_method_is_refused(self):
        with pytest.raises(ValueError, match="method: 'PLL-original' is not allowed for small, a causal model"):
            causal().score(["w1"], method="PLL-original")
        with pytest.raises(ValueError, match="small: no language-model head, only token"):
            causal(HeadsConfig(token_labels=("a", "b"))).score(["w1"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("w1 " * 69, "text 1: 'w1 w1 .* has 71 tokens, special tokens included; the maximum is 70"),
        (" ", "text 1: ' ' has no tokens"),
        (3, "input 1: int '3' is not allowed; use texts"),
    ],
)
@pytest.mark.parametrize("make", [lambda: shared_model(HeadsConfig(mlm=True)), causal])
def test_texts_that_are_refused(make, text, message):
    loaded = make()
    if loaded.config.attention == "causal" and isinstance(text, str) and text.strip():
        text, message = (
            "w1 " * 100,
            "text 1: 'w1 w1 .* has 101 tokens, special tokens included; the maximum is 100",
        )
    with pytest.raises(ValueError, match=message):
        loaded.score(["w1", text])


def test_models_that_are_refused():
    with pytest.raises(ValueError, match="small: no language-model head; use a masked or causal language model"):
        shared_model().score(["w1"])
    with pytest.raises(ValueError, match="method: 'other' is not allowed; use one of PLL-word-l2r, PLL-original"):
        shared_model(HeadsConfig(mlm=True)).score(["w1"], method="other")
    loaded = make_model(HeadsConfig(mlm=True))
    loaded.tokenizer.mask_id = loaded.tokenizer.unk_id
    with pytest.raises(ValueError, match="small: the tokenizer has no mask piece"):
        loaded.score(["w1"])
    loaded.tokenizer = None
    with pytest.raises(ValueError, match="no vocabulary"):
        loaded.score(["w1"])


class TestWords:
    def test_word_pieces(self):
        tokenizer = shared_model().tokenizer
        ids, numbers = tokenizer.encode_with_words("w1xy, w2 w99x ?")
        assert ids == tokenizer.encode("w1xy, w2 w99x ?") and numbers == [0, 0, 0, 1, 2, 3, 4]
        assert tokenizer.encode_with_words("") == ([], [])

    def test_bytes_split_punctuation_from_words(self):
        special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
        letters = [*"abc.,'", "\u0120", "\u0120a", "ab", "\u0120ab"]
        content = byte_bpe_content(
            {piece: i for i, piece in enumerate([*special, *letters])}, [("\u0120", "a"), ("a", "b")]
        )
        tokenizer = build_tokenizer(TokenizerConfig(file="tokenizer.json", lower_case=False), content, "t")
        ids, numbers = tokenizer.encode_with_words("abc abc, c.")
        assert ids == tokenizer.encode("abc abc, c.") and len(ids) == len(numbers)
        pieces = tokenizer.pieces(ids)
        words = ["".join(p for p, n in zip(pieces, numbers, strict=True) if n == k) for k in range(numbers[-1] + 1)]
        assert words == ["abc", "\u0120abc", ",", "\u0120c", "."]

    def test_sentence_pieces_split_at_white_space(self, tmp_path):
        from sentencepiece import SentencePieceTrainer

        (tmp_path / "text.txt").write_text("abc abd, bcd cda. dab\n" * 50)
        SentencePieceTrainer.train(
            input=str(tmp_path / "text.txt"), model_prefix=str(tmp_path / "m"), vocab_size=20, minloglevel=2,
            hard_vocab_limit=False, pad_id=0, unk_id=1, bos_id=2, eos_id=3, pad_piece="[PAD]", unk_piece="[UNK]",
            bos_piece="[CLS]", eos_piece="[SEP]", control_symbols="[MASK]",
        )  # fmt: skip
        content = (tmp_path / "m.model").read_bytes()
        tokenizer = build_tokenizer(TokenizerConfig(file="t.model", lower_case=False), content, "t")
        ids, numbers = tokenizer.encode_with_words("abcd abd,")
        pieces = tokenizer.pieces(ids)
        words = ["".join(p for p, n in zip(pieces, numbers, strict=True) if n == k) for k in (0, 1)]
        assert words == ["\u2581abcd", "\u2581abd,"] and len(ids) > 2 and not set(SPECIAL_PIECES) & set(pieces)


class TestPairs:
    def lines(self):
        term = {"linguistics_term": "agreement"}
        return [
            {"sentence_good": GOOD, "sentence_bad": BAD, "field": "syntax", "UID": "a", "pairID": "0", **term},
            {"sentence_good": BAD, "sentence_bad": GOOD, "field": "syntax/semantics", "UID": "a", **term},
            {"sentence_good": GOOD, "sentence_bad": GOOD, "field": "syntax_semantics", "UID": "b", **term},
            {"sentence_good": "W1 w2", "sentence_bad": "w1  w2", "UID": "b"},
            {"sentence_good": "w1", "sentence_bad": "w1 w2 w3 w4 w5 w6"},
        ]

    @pytest.fixture
    def file(self, tmp_path):
        path = tmp_path / "pairs.jsonl.gz"
        with gzip.open(path, "wt") as stream:
            stream.write("\n\n".join(map(json.dumps, self.lines())) + "\n")
        return path

    @pytest.mark.slow
    @pytest.mark.parametrize("make", [lambda: shared_model(HeadsConfig(mlm=True)), causal])
    def test_groups(self, file, make):
        loaded = make()
        pairs = read_pairs(file)
        assert [pair["pairID"] for pair in pairs[:1]] == ["0"] and len(pairs) == 5
        scored = list(score_pairs(loaded, pairs))
        values = {text: loaded.score(text).score for text in (GOOD, BAD)}
        assert abs(scored[0].good - values[GOOD]) < 1e-4 and abs(scored[0].bad - values[BAD]) < 1e-4
        assert [one.correct for one in scored] == [
            values[GOOD] > values[BAD], values[BAD] > values[GOOD], False, False, True
        ]  # fmt: skip
        assert [one.tokens for one in scored] == [(6, 6), (6, 6), (6, 6), (2, 2), (1, 6)]
        rows = {(one.level, one.name): (one.pairs, one.ties, one.accuracy.value) for one in accuracies(scored)}
        assert rows["overall", "all"] == (5, 2, 2 / 5)
        assert rows["phenomenon", "agreement"] == (3, 1, 1 / 3)
        assert rows["field", "syntax_semantics"][:2] == (2, 1) and rows["field", "syntax"][:2] == (1, 0)
        assert rows["paradigm", "a"] == (2, 0, 1 / 2) and rows["paradigm", "b"] == (2, 2, 0)
        assert len(rows) == 6 and {level for level, _ in rows} == {"overall", *LEVELS}

    def test_the_limit_is_per_paradigm(self, file):
        assert [pair.get("UID") for pair in read_pairs(file, 1)] == ["a", "b", None]
        with pytest.raises(ValueError, match="--limit: 0 is not allowed; use 1 or more"):
            read_pairs(file, 0)

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            (b'{"sentence_good": "a"}', r'pairs\.jsonl:1: no sentence_bad; write \{"sentence_good"'),
            (b'{"sentence_good": " ", "sentence_bad": "a"}', r"pairs\.jsonl:1: no sentence_good"),
            (b'\n{"sentence_good": "a", "sentence_bad": 1}', r"pairs\.jsonl:2: no sentence_bad"),
            (b'{"sentence_good": "a", "sentence_bad": "b", "UID": 3}', r"UID: 3 is not allowed; use a string"),
            (b"[1]", r"pairs\.jsonl:1: not a JSON object; write"),
            (b"a", r"pairs\.jsonl:1: not JSON"),
            (b"\xff", r"pairs\.jsonl:1: not valid UTF-8"),
            (b"\n", r"pairs\.jsonl: no pairs; write"),
        ],
    )
    def test_files_that_are_refused(self, tmp_path, content, message):
        (tmp_path / "pairs.jsonl").write_bytes(content)
        with pytest.raises(ValueError, match=message):
            read_pairs(tmp_path / "pairs.jsonl")

    def test_damaged_gzip_files(self, file):
        content = file.read_bytes()
        for damaged in (content[: len(content) // 2], b"{}", content[:20] + b"\0" * 30 + content[50:]):
            file.write_bytes(damaged)
            with pytest.raises(ValueError, match=r"pairs\.jsonl\.gz: the compressed file is damaged"):
                read_pairs(file)


def test_the_wilson_interval():
    """Against the closed form with z = 1.959964."""
    z, n, p = 1.959963984540054, 50, 0.9
    center, half = p + z * z / (2 * n), z * np.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    expected = p, (center - half) / (1 + z * z / n), (center + half) / (1 + z * z / n)
    np.testing.assert_allclose(wilson_interval(45, 50), expected, rtol=1e-9)
    assert wilson_interval(0, 5).low == 0 and 0.3 < wilson_interval(0, 5).high < 0.5
    with pytest.raises(ValueError, match="no records to score"):
        wilson_interval(0, 0)


def test_copies_that_predict_different_places_are_two():
    # "4 [MASK]" without 4 and "[MASK] 5" without 5 are the same tokens, where texts can hold a mask.
    def opened(*ids):
        return _Open("", np.array([2, *ids, 3], np.int32), [0] * 4, 1, np.arange(2) + 1)

    texts = opened(4, 9), opened(9, 5)
    units = copies([(texts[0], 0), (texts[1], 1), (texts[0], 0)], mask_id=9)
    assert [unit.targets["masked"] for unit in units] == [1, 2]
    assert [len(unit.extra) for unit in units] == [2, 1]
