"""What files of tasks may hold, through ``run_finetune.py``: one clear line and exit code 2, or the right thing.

Elsewhere, because it needs no run:

- line ends, byte order marks, quotes, white space around labels, columns, ids that stand twice, every format's own
  mistakes: data_pipeline/tasks/test_task_*.py
- tags of dev alone: bert_jax/tasks/test_tagging.py, test_tagging_joint.py
- questions that are too long, answers that are not in their passage: bert_jax/tasks/test_qa_windows.py
- what is left of texts that are too long: bert_jax/tasks/test_truncation.py, test_tagging_windows.py
- batches that are not full, on one device and on eight: bert_jax/tasks/test_finetune.py
"""

import json
import math
import os
import sys
import time

import jax
import numpy as np
import pytest
from finetune_cases import lines, results, saved_model

from bert_jax.finetuning import finetune
from bert_jax.finetuning.evaluation import blank_scores
from bert_jax.parallel import make_mesh

pytestmark = pytest.mark.entry
CACHE = os.environ["JAX_COMPILATION_CACHE_DIR"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return saved_model(tmp_path_factory.mktemp("models") / "model")


@pytest.fixture
def call(model, finetuning, capsys, monkeypatch, tmp_path):
    """Call: write files, then run on them in ``tmp_path/w``; the exit code, stdout and stderr."""

    def run(files, words):
        for name, content in files.items():
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
        given = ["--init_from", model, "--workdir", tmp_path / "w", "--data.dir", tmp_path, "--task.max_length", 64]
        monkeypatch.setattr(sys, "argv", ["run_finetune.py", *map(str, given), *words.split()])
        capsys.readouterr()
        code = finetuning.main()
        return code, *capsys.readouterr()

    return run


def jsonl(*records):
    return "".join(f"{json.dumps(record)}\n" for record in records)


def labelled(*labels):
    """A line for each label, which are numbers of lines from 1."""
    return jsonl(*({"text": f"w{i}", "label": label} for i, label in enumerate(labels)))


def paired(*labels):
    return jsonl(*({"text": "w1", "text_pair": "w2", "label": label} for label in labels))


def chosen(*labels):
    return jsonl(*({"text": "w1", "choices": ["w2", "w3"], "label": label} for label in labels))


def asked(*answers):
    """A question about the passage "w1 w2 good" for each answer."""
    found = [{"text": text, "answer_start": 0} for text in answers]
    return jsonl(*({"text": "w3", "text_pair": "w1 w2 good", "answers": [one]} for one in found))


def slots(words, tags, labels):
    return {f"{part}/{name}": content for part in ("train", "dev") for name, content in
            (("seq.in", words), ("seq.out", tags), ("label", labels))}  # fmt: skip


GOOD = labelled("0", "1", "1")
VALUE, CHOICE, COSINE = (
    "--task.kind regression",
    "--task.kind choice",
    "--task.kind sentence --sentence.loss cosine",
)
SOFTMAX, SEVERAL = "--task.kind sentence --sentence.loss softmax", "--task.kind multi_label"
# Training file, dev file, options, message.
REFUSED = {
    "unknown label": (GOOD, labelled("0", "2"), "", "dev.jsonl:2: label '2' is not in data.labels"),
    "label out of range": (chosen(0, 1), chosen(2), CHOICE, "dev.jsonl:1: label '2' is not in data.labels"),
    "negative label": (chosen(0, -1), chosen(1), CHOICE, "train.jsonl:2: label '-1' is not in data.labels"),
    "label as text": (chosen(0, "b"), chosen(1), CHOICE, "train.jsonl:2: label 'b' is not in data.labels"),
    "one label of several": (
        jsonl({"text": "w1", "labels": ["a"]}), jsonl({"text": "w1", "labels": ["a", "b"]}), SEVERAL,
        "dev.jsonl:1: label 'b' is not in data.labels; allowed: a",
    ),
    "class of a pair": (paired("a", "b"), paired("a", "c"), SOFTMAX, "dev.jsonl:2: label 'c' is not"),
    "text for a value": (labelled(1, "good"), GOOD, VALUE, "train.jsonl:2: label 'good' is not allowed"),
    "nan": (labelled(1, math.nan), GOOD, VALUE, "train.jsonl:2: no label; training requires one"),
    "infinite": (GOOD, labelled(math.inf), VALUE, "dev.jsonl:1: label 'Infinity' is not allowed"),
    "nan of a pair": (paired(1, math.nan), paired(1), COSINE, "train.jsonl:2: no label; sentence.loss cosine"),
    "text of a pair": (paired(1), paired("alike"), COSINE, "dev.jsonl:1: label 'alike' is not allowed"),
    "beyond the scale": (
        paired(0.5, 3.8), paired(1), COSINE,
        "train.jsonl:2: label 3.8 divided by sentence.label_scale 1 is not allowed; use -1 to 1",
    ),
    "no second text": (paired(1), labelled(1), COSINE, "dev.jsonl:1: the record has a label but no second text"),
    "empty label": (labelled("0", "1", " "), GOOD, "", "train.jsonl:3: no label; training requires one"),
    "no labels in dev": (GOOD, labelled(None, ""), "", "data.dev: split dev has no labels"),
    "one class": (labelled("1", "1"), GOOD, "", "data.labels: labels in the training files: 1; 2 or more"),
    "wrong column": (GOOD, jsonl({"txt": "w1", "label": "1"}), "", "dev.jsonl:1: no column 'text', which classifi"),
    "id twice": (GOOD, jsonl(*[{"id": 7, "text": "w1", "label": "1"}] * 2), "", "dev.jsonl:2: id '7' is also the"),
    "answer elsewhere": (asked("bad"), asked("good"), "--task.kind qa", "1 of 1 training questions are excluded"),
    "patience without dev": (GOOD, GOOD, "--data.dev --training.patience 2", "training.patience: 2 "),
    "unknown metric": (GOOD, GOOD, "--task.metric bleu", "task.metric: 'bleu' is not allowed; allowed: accuracy"),
}  # fmt: skip


def assert_refused(result, message, workdir):
    code, out, err = result
    assert code == 2 and out == "", result
    assert err.startswith("error: ") and len(err.splitlines()) == 1 and message in err, err
    assert not workdir.exists()


def test_print_config_knows_the_model_and_the_grid(call, tmp_path):
    code, out, err = call(
        {}, "--print_config --data.train x.tsv --sweep optimizer.learning_rate=1e-3 --data.dev y.tsv"
    )
    assert code == 0 and "  hidden_size: 32\n" in out and not (tmp_path / "w").exists(), err
    code, _, err = call({}, "--print_config --data.train x.tsv --sweep optimizer.rate=1")
    assert code == 2 and "--sweep: optimizer.rate: unknown option" in err
    code, _, err = call({}, "--print_config --data.train x.tsv --init_from /nowhere")
    assert code == 2 and err == "error: /nowhere: does not exist\n"


@pytest.mark.parametrize("case", REFUSED)
def test_a_mistake_is_told_before_anything_is_trained(call, tmp_path, case):
    train, dev, words, message = REFUSED[case]
    files = {"train.jsonl": train, "dev.jsonl": dev}
    result = call(files, f"--data.train train.jsonl --data.dev dev.jsonl {words}")
    assert_refused(result, message, tmp_path / "w")


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (
            slots("w1 w2\nw3\n", "O B-a\n", "i\nj\n"),
            "train/seq.out: 1 lines, but seq.in has 2; the numbers",
        ),
        (slots("w1 w2\nw3\n", "O\nO\n", "i\nj\n"), "train/seq.out:1: 1 tags for the 2 words of seq.in; every word"),
        (slots("w1 w2\nw3\n", "O O\nO\n", "i\nj\n"), "data.train: tags in the training files: O; two or more"),
        (slots("w1 w2\nw3\n", "O B-a\nO\n", "i\ni\n"), "data.labels: labels in the training files: i; 2 or more"),
        (slots("w1 w2\nw3\n", "O B-a\nO\n", " \ni\n"), "train/seq.in:1: no label; training requires one"),
    ],
)
def test_slots_that_do_not_fit(call, tmp_path, files, message):
    result = call(files, "--task.kind joint --data.train train --data.dev dev")
    assert_refused(result, message, tmp_path / "w")


# ------------------------------------------------------------------ what is odd, but right

ODD = b"\xef\xbb\xbfid\ttext\ttext_pair\tlabel\r\n" + b"".join((
    b'a\t"w1 good\tw2""\t0 \n',  # quotes are text, a blank behind the label is none
    b"b\t\t\t0\r\n",  # empty texts
    b"c\tw3 w4 bad w5\t\t0\n",
))  # fmt: skip


@pytest.mark.slow
def test_a_file_that_is_odd_but_right(call, tmp_path):
    """Mixed line ends, a byte order mark, quotes, blanks, empty texts, one class alone, a text of 100,000 words;
    fewer records than devices, and than a batch has, each of them counted once."""
    odd = ODD + b"d\t" + b"w1 w2 w3 . " * 25_000 + b"\tw9\t0\r\n"
    dev = odd.replace(b"\t0\r\n", b"\t1\r\n")
    # Nothing is learned at rate 0, so the loss of the only step is that of the predictions.
    code, out, err = call(
        {"train.tsv": odd, "dev.tsv": dev},
        "--data.train train.tsv --data.dev dev.tsv --data.test train.tsv --data.labels 0 1 "
        "--task.truncation key_sentences --training.num_steps 1 --training.global_batch_size 7 "
        "--training.log_interval 1 --optimizer.learning_rate 0 "
        f"--model.hidden_dropout 0 --model.attention_dropout 0 --training.compilation_cache {CACHE}",
    )
    assert code == 0, err
    assert "8 x cpu" in out
    predictions = {
        split: [json.loads(line) for line in (tmp_path / "w" / f"predictions_{split}.jsonl").open()]
        for split in ("dev", "test")
    }
    for found, labels in zip(predictions.values(), ("0101", "0000"), strict=True):
        assert [one["id"] for one in found] == list("abcd")
        assert [one["gold"] for one in found] == list(labels)
    losses = [-math.log(one["probabilities"]["0"]) for one in predictions["test"]]
    assert len({round(loss, 4) for loss in losses}) == 4  # so that a record that counts twice would show
    (step,) = (line for line in lines(tmp_path / "w") if "loss" in line)
    assert step["loss"] == pytest.approx(np.mean(losses), abs=2e-5) and step["examples_seen"] == 4
    matrix = results(tmp_path / "w")["dev"]["confusion_matrix"]["counts"]
    assert [sum(row) for row in matrix] == [2, 2]


# ------------------------------------------------------------------ a document of 100,000 words

COUNT = 100_000
WORDS = [f"w{i}" for i in np.random.default_rng(0).integers(0, 60, COUNT)]
TEXT = " ".join(word if i % 17 else f"{word}." for i, word in enumerate(WORDS))
TAGS = ["B-a" if i % 7 == 0 else "O" for i in range(COUNT)]
ONE = labelled("0") + jsonl({"text": TEXT, "label": "1"})
TAGGED = "".join(f"{word}\t{tag}\n" for word, tag in zip(WORDS, TAGS, strict=True))
QUESTION = {"text": "w1", "text_pair": f"{TEXT} good", "answers": [{"text": "good", "answer_start": len(TEXT) + 1}]}
# Tokens of the text: full stops are words of their own.
TOKENS = COUNT + TEXT.count(".")
# Inputs of 64 tokens, two of them special, of which the next begins 31 later.
WINDOWS, TAGGING = (2 + (tokens - 62 - 1) // 31 for tokens in (TOKENS, COUNT))
# What is read, options, and how many inputs it becomes; before the long text there is a short one, or none.
LONG = {
    "longest_first": ({"long.jsonl": ONE}, "--task.truncation longest_first", 2),
    "head_tail": ({"long.jsonl": ONE}, "--task.truncation head_tail", 2),
    "key_sentences": ({"long.jsonl": ONE}, "--task.truncation key_sentences", 2),
    "windows": ({"long.jsonl": ONE}, "--task.truncation windows", 1 + WINDOWS),
    # A question of one token, a passage of one more than the text.
    "qa": ({"long.jsonl": jsonl(QUESTION)}, "--task.kind qa --qa.doc_stride 32", 2 + (TOKENS + 1 - 60 - 1) // 32),
    "tagging": ({"long.conll": TAGGED}, "--task.kind tagging", TAGGING),
    "document": ({"long.conll": TAGGED}, "--task.kind tagging --tagging.document_context true", TAGGING),
    "joint": (
        {
            "long/seq.in": f"w1\n{' '.join(WORDS)}\n",
            "long/seq.out": f"O\n{' '.join(TAGS)}\n",
            "long/label": "stop\nplay\n",
        },
        "--task.kind joint",
        1 + TAGGING,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", LONG)
def test_a_document_of_a_hundred_thousand_words(call, monkeypatch, case):
    """Everything that depends on its length, from the command line to the first batch, and from outputs to scores,
    takes seconds."""
    files, words, inputs = LONG[case]
    jobs = []
    monkeypatch.setattr(finetune, "train", lambda job, launch: jobs.append(job))
    name = next(iter(files)).partition("/")[0]
    began = time.process_time()
    code, _, err = call(files, f"--data.train {name} --data.dev {name} {words}")
    assert code == 0, err
    (job,) = jobs
    features, info = next(job.data(make_mesh(job.config.mesh, jax.devices()[:1]), complete=False).batches)
    units = job.resolved.inputs["dev"]
    assert blank_scores(job.task, job.model, job.resolved.records["dev"], units)
    spent = time.process_time() - began
    print(f"{case}: {spent:.1f} s, {len(units):,} inputs")
    assert spent < 20
    assert len(units) == inputs and all(unit.length <= 64 for unit in units)
    assert info.sequences == np.count_nonzero(features["weights"]) == min(inputs, 32)
