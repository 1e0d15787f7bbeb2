"""Classes without training, by entailment and by words at a mask: each text against the model's plain outputs."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
from inference_models import make_model, make_weights, plain, random_texts, shared_model

from bert_jax.commands import main as cli
from bert_jax.config import HeadsConfig
from bert_jax.interop.saved_model import write_saved
from bert_jax.tokenization.byte_bpe import ByteBPETokenizer, byte_bpe_content

BAR = 2e-6  # half of the last place that is given, and rounding
NLI = ("CONTRADICTION", "Entailment", "neutral")
WORDS = {"no": ["w1", "w2"], "maybe": ["w3"], "yes": ["w4", "w5", "w6"]}


def nli_model(labels=NLI, seed=1, **options):
    return shared_model(HeadsConfig(pooler=True, sequence_labels=labels, **options), seed=seed)


@pytest.fixture(scope="module")
def nli():
    return nli_model()


@pytest.fixture(scope="module")
def mlm():
    return shared_model(HeadsConfig(mlm=True))


def softmax(logits):
    return np.exp(logits) / np.exp(logits).sum()


def means(logits):
    """Of the words of each label, in their order."""
    logits = np.array(logits, np.float64)
    return np.array([logits[:2].mean(), logits[2], logits[3:].mean()])


def agree(row, chances):
    assert list(row["probabilities"]) == ["no", "maybe", "yes"]
    np.testing.assert_allclose(list(row["probabilities"].values()), chances, atol=BAR)


def agree_on_one(row, logits):
    chances = softmax(logits)
    agree(row, chances)
    assert row["label"] == ["no", "maybe", "yes"][int(chances.argmax())]
    assert row["score"] == max(row["probabilities"].values())


def nli_logits(loaded, text, hypotheses):
    """float64[hypotheses, classes]"""
    return np.array([plain(loaded, text, one).sequence_logits[0, 0] for one in hypotheses], np.float64)


def mask_logits(loaded, ids, words):
    """Logits of ``words`` at the mask of one input with these ids, which has the batch to itself."""
    tokenizer = loaded.tokenizer
    ids = [tokenizer.cls_id, *ids, tokenizer.sep_id]
    size = loaded.spec.max_length
    arrays = {"input_ids": (ids, tokenizer.pad_id), "attention_mask": ([1] * len(ids), 0)}
    padded = {name: np.array([[*row, *[filler] * (size - len(row))]]) for name, (row, filler) in arrays.items()}
    logits = loaded.forward(padded)["mlm_logits"]
    return logits[0, ids.index(tokenizer.mask_id), [tokenizer.piece_id(word) for word in words]]


# ------------------------------------------------------------------ entailment

HYPOTHESES = [f"w9 w{i}, w8?" for i in range(1, 7)]


@pytest.mark.slow
def test_entailment_of_one_label(nli):
    texts = ["", *random_texts(7, 20), "w7 " * 200, "w7 w7"]
    rows = nli.zero_shot(iter(texts), WORDS, template="w9 {}, w8?")
    for text, row in zip(texts, rows, strict=True):
        # The hypothesis has five tokens and there are three special ones: so much of the text is left.
        whole = nli_logits(nli, " ".join(text.split()[: 70 - 8]), HYPOTHESES)
        agree_on_one(row, means(whole[:, 1]))
        assert row.get("truncated", False) == (len(text) > 200)
    assert len({row["label"] for row in rows}) > 1
    assert nli.zero_shot(texts[1], WORDS, template="w9 {}, w8?") == rows[1]


def test_the_longest_hypothesis_says_how_much_of_the_text_all_of_them_see(nli):
    text = " ".join(f"w{i % 40}" for i in range(100))
    row = nli.zero_shot(text, ["w1", "w2 w3 w4"], template="{} ?")
    kept = " ".join(text.split()[: 70 - 3 - 4])
    logits = nli_logits(nli, kept, ["w1 ?", "w2 w3 w4 ?"])[:, 1]
    np.testing.assert_allclose(list(row["probabilities"].values()), softmax(logits), atol=BAR)
    assert row["truncated"] and list(row["probabilities"]) == ["w1", "w2 w3 w4"]


def test_entailment_of_several_labels():
    nli = nli_model(seed=18)  # whose probabilities lie on both sides of one half
    named = {"template": "w9 {}, w8?", "multi_label": True}
    texts = random_texts(8, 20)
    rows = nli.zero_shot(texts, WORDS, **named)
    assert len({tuple(row["labels"]) for row in rows}) > 1
    for text, row in zip(texts, rows, strict=True):
        logits = nli_logits(nli, text, HYPOTHESES)
        chances = 1 / (1 + np.exp(-means(logits[:, 1] - logits[:, 0])))
        agree(row, chances)
        assert row["labels"] == [label for label, p in zip(WORDS, chances, strict=True) if p >= 0.5]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("classes", "at", "options"),
    [(("not_entailment", "entailment"), 1, {}), (("zero", "one", "two"), 2, {"entailment": "TWO"})],
)
def test_without_a_class_of_contradiction_it_is_the_share_of_all(classes, at, options):
    loaded = nli_model(classes)
    row = loaded.zero_shot("w7 w8", ["w3", "w1"], template="w9 {}", multi_label=True, **options)
    chances = [softmax(logits)[at] for logits in nli_logits(loaded, "w7 w8", ["w9 w3", "w9 w1"])]
    np.testing.assert_allclose([*row["probabilities"].values()], chances, atol=BAR)


@pytest.mark.parametrize(
    ("heads", "options", "message"),
    [
        (HeadsConfig(pooler=True, sequence_labels=("a", "b", "c")), {}, "no single class of entailment.* a, b, c"),
        (HeadsConfig(pooler=True, sequence_labels=("entails", "entailed")), {}, "no single class of entailment"),
        (HeadsConfig(pooler=True, sequence_labels=NLI), {"entailment": "yes"}, "no class 'yes'; set --entailment"),
        (HeadsConfig(pooler=True, mlm=True), {}, r"no head with classes \(heads: pooler, mlm\)"),
        (HeadsConfig(pooler=True, sequence_labels=NLI, problem="multi_label"), {}, "no head with classes"),
        (HeadsConfig(pooler=True, sequence_labels=NLI), {"template": "{} and {}"}, "'{} and {}' is not allowed"),
        (
            HeadsConfig(pooler=True, sequence_labels=NLI),
            {"template": "nothing"},
            "one {} for the label, or a prompt",
        ),
        (HeadsConfig(pooler=True, sequence_labels=NLI), {"template": "{text} {}"}, "is not allowed"),
        (HeadsConfig(pooler=True, sequence_labels=NLI), {"template": "w1 " * 66 + "{}"}, "70 of"),
        (HeadsConfig(pooler=True, sequence_labels=NLI), {"template": "{text} [MASK]"}, "no masked-LM head"),
        (HeadsConfig(pooler=True, sequence_labels=NLI), {"labels": ["w1"]}, r"labels \(w1\); give 2 or more"),
        (
            HeadsConfig(pooler=True, sequence_labels=NLI),
            {"labels": [], "multi_label": True},
            r"\(none\); give 1 or more",
        ),
        (HeadsConfig(pooler=True, sequence_labels=NLI), {"labels": {"a": [], "b": ["c"]}}, "'a' has the words"),
        (HeadsConfig(pooler=True, sequence_labels=NLI), {"labels": {"a": "bc", "b": ["c"]}}, "'a' has the words"),
        (
            HeadsConfig(pooler=True, sequence_labels=NLI),
            {"labels": {"a": ["w1"], "b": ["w1"]}},
            "'w1' belongs to 'a' and 'b'",
        ),
        (HeadsConfig(mlm=True), {"template": "{text}"}, r"\[MASK\] 0 times; write it once"),
        (HeadsConfig(mlm=True), {"template": "[MASK] {text} [MASK]"}, "2 times"),
        (HeadsConfig(mlm=True), {"template": "{text} [MASK]" + " w1" * 67}, "70 of"),
        (
            HeadsConfig(mlm=True),
            {"template": "{text} [MASK]", "multi_label": True},
            "several labels per text require",
        ),
        (
            HeadsConfig(mlm=True),
            {"template": "{text} [MASK]", "entailment": "a"},
            "an entailment class requires",
        ),
        (HeadsConfig(mlm=True), {"template": "{text} [MASK]", "labels": ["w1", "w2xy"]}, r"3 \(w2 ##x ##y\)"),
        (HeadsConfig(mlm=True), {"template": "{text} [MASK]", "labels": ["w1", "w99"]}, "'w99' is not in the voc"),
    ],
)
def test_what_is_refused(heads, options, message):
    loaded = shared_model(heads)
    with pytest.raises(ValueError, match=message) as caught:
        loaded.zero_shot(["w1"], **({"labels": ["w1", "w2"]} | options))
    assert "\n" not in str(caught.value)


# ------------------------------------------------------------------ words at a mask


def test_words_at_a_mask(mlm):
    tokenizer = mlm.tokenizer
    flat = [word for words in WORDS.values() for word in words]
    for template in ("w9, {text} w8 [MASK]?", "[MASK] w9 {text}"):
        left, right = template.split("[MASK]")
        texts = ["", "[MASK] w4", *random_texts(10, 25), "w7 " * 20 + "w3xy " * 60]
        rows = mlm.zero_shot(iter(texts), WORDS, template=template)
        for text, row in zip(texts, rows, strict=True):
            # A mask that is written in a text is none; of the last text whole words and pieces go at the end.
            pieces = tokenizer.encode(text)
            around = [tokenizer.encode(part) for part in (left + right).split("{text}")]
            room = 70 - 2 - 1 - len(around[0]) - len(around[1])
            ids = [*around[0], *pieces[:room], *around[1]]
            at = len(ids) - 1 if left else 0  # before the question mark, or first
            ids.insert(at, tokenizer.mask_id)
            agree_on_one(row, means(mask_logits(mlm, ids, flat)))
            assert row.get("truncated", False) == (len(pieces) > room) == (text == texts[-1])


@pytest.mark.slow
def test_a_vocabulary_that_knows_words_with_their_blank():
    letters = [*map(chr, range(97, 123)), "\u0120", "\u0120a", "\u0120b"]
    pieces = ["<s>", "<pad>", "</s>", "<unk>", *letters, "<mask>"]
    content = byte_bpe_content({piece: i for i, piece in enumerate(pieces)}, [("\u0120", "a"), ("\u0120", "b")])
    loaded = make_model(HeadsConfig(mlm=True), family="roberta")
    loaded.tokenizer = ByteBPETokenizer(content)
    for template, words in (("{text} c <mask>", ["\u0120a", "\u0120b"]), ("d<mask> {text}", ["a", "b"])):
        for text in ("de", "d" * 100):
            # Two special tokens, three of the template.
            before, _, after = template.replace("{text}", text[: 68 - 5]).partition("<mask>")
            encode = loaded.tokenizer.encode
            ids = [*encode(before.rstrip()), loaded.tokenizer.mask_id, *encode(after)]
            row = loaded.zero_shot(text, ["a", "b"], template=template)
            chances = softmax(mask_logits(loaded, ids, words).astype(np.float64))
            np.testing.assert_allclose([*row["probabilities"].values()], chances, atol=BAR)


# ------------------------------------------------------------------ the command


@pytest.fixture
def call(tmp_path, capsys):
    """Run ``bert-jax zero-shot`` with a small model: (exit code, lines of stdout, lines of stderr)."""
    write_saved(tmp_path / "model", make_weights(HeadsConfig(pooler=True, sequence_labels=NLI), seed=1, layers=1))

    def run(*words):
        code = cli.main(["zero-shot", *map(str, words), "--model", str(tmp_path / "model")])
        captured = capsys.readouterr()
        return code, captured.out.splitlines(), captured.err.splitlines()

    return run


def same(lines, expected):
    """Lines of JSON against predictions of other batches, whose last digits differ."""
    rows = [json.loads(line) for line in lines]
    assert [(row["label"], [*row["probabilities"]]) for row in rows] == [
        (row["label"], [*row["probabilities"]]) for row in expected
    ]
    for row, other in zip(rows, expected, strict=True):
        np.testing.assert_allclose([*row["probabilities"].values()], [*other["probabilities"].values()], atol=BAR)


def test_command_says_what_the_library_says_and_how_much_is_right(call, nli, tmp_path):
    texts = random_texts(9, 20)
    words = {"1": ["w1", "w2 w3"], "w4": ["w4"]}
    expected = nli.zero_shot(texts, words, template="w9 {}")
    options = ("--template", "w9 {}", "--labels", "1=w1, w2 w3", "w4")
    code, out, err = call(texts[3], *options)
    assert (code, err) == (0, [])
    same(out, [expected[3]])

    # Seven have a label, two of them the wrong one; a number is as good as its text.
    right = [row["label"] for row in expected]
    right[0], right[1] = ({"1": "w4", "w4": "1"}[label] for label in right[:2])
    lines = [
        {"text": text, **({"label": int(label) if label == "1" else label} if i < 7 else {})}
        for i, (text, label) in enumerate(zip(texts, right, strict=True))
    ]
    source = tmp_path / "texts.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    code, out, err = call("--input", source, *options)
    assert code == 0
    same(out, expected)
    assert err[0] == "7 labeled texts" and err[1].startswith(f"accuracy {5 / 7:.4f} [")
    pairs = [(one["probabilities"]["w4"], label == "w4") for one, label in zip(expected[:7], right, strict=False)]
    wins = [a > b for a, is_right in pairs if is_right for b, other in pairs if not other]
    assert err[2].startswith("f1_macro ") and err[3].startswith(f"auroc {np.mean(wins):.4f} [") and len(err) == 4
    code, out, err = call("--input", source, *options, "--output", tmp_path / "out.jsonl")
    assert (code, out[0], err) == (0, "7 labeled texts", [])
    assert [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()] == expected


def test_command_with_several_labels(call, nli, tmp_path):
    texts = random_texts(8, 20)
    chosen = [row["labels"] for row in nli.zero_shot(texts, ["w1", "w2"], multi_label=True)]
    chosen[2] = [label for label in ("w1", "w2") if label not in chosen[2]]
    source = tmp_path / "texts.jsonl"
    rows = zip(texts, chosen, strict=True)
    source.write_text("".join(json.dumps({"text": text, "labels": one}) + "\n" for text, one in rows))
    code, out, err = call("--input", source, "--multi_label", "--labels", "w1", "w2")
    assert code == 0 and len(out) == 8 and err[1].startswith("accuracy 0.8750 [")
    assert err[3].startswith("mean_average_precision ")
    source.write_text(json.dumps({"text": "w1", "label": "w2"}) + "\n")
    code, out, err = call("--input", source, "--labels", "w1", "w2")
    assert code == 0 and [line.split()[0] for line in err] == ["1", "accuracy", "f1_macro"]


@pytest.mark.parametrize(
    ("words", "line", "message"),
    [
        (["--labels", "a,b"], {}, "--labels: 'a,b' is not allowed; allowed: LABEL or LABEL=WORD,WORD"),
        (["--labels", "a", "a=b"], {}, "--labels: 'a' occurs twice"),
        (["--labels", "a", "b=w1,"], {}, "'b' has the words"),
        (["--labels", "a=w1, w2", "w2"], {}, "'w2' belongs to 'a' and 'w2'"),
        (["--labels", "a"], {}, "labels: too few labels (a); give 2 or more"),
        (["--labels", "a", "b"], {"label": "c"}, "label: 'c' is not allowed; use a, b"),
        (["--labels", "a", "b", "--multi_label"], {"labels": ["a", "c"]}, "labels: 'c' is not allowed"),
        (["--labels", "a", "b"], {"text_pair": "w2"}, "accepts one text, without text_pair"),
        (["--labels", "a", "b", "--entailment", "x"], {}, "no class 'x'"),
    ],
)
def test_command_refuses_in_one_line(call, tmp_path, words, line, message):
    source = tmp_path / "texts.jsonl"
    source.write_text(json.dumps({"text": "w1"} | line) + "\n")
    code, out, err = call("--input", source, *words)
    assert (code, out, len(err)) == (2, [], 1) and message in err[0], err


def test_a_text_behind_the_labels_is_taken_for_one(call, monkeypatch):
    monkeypatch.setattr("sys.stdin", SimpleNamespace(isatty=lambda: True))
    code, out, err = call("--labels", "sport", "politics", "What a goal!")
    assert (code, out, len(err)) == (2, [], 1) and "texts before --labels" in err[0]
