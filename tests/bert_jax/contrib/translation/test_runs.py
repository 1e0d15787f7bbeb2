"""Runs that translate: metrics, resuming, predictions, files, starts from other models."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
from finetune_cases import PIECES, saved_model

import bert_jax
from bert_jax.commands.finetune import FinetuneRunOptions
from bert_jax.commands.main import main
from bert_jax.config.finetune import FinetuneConfig
from bert_jax.config.options import extended
from bert_jax.config.task import TaskConfig, TaskDataConfig
from bert_jax.contrib.translation.config import EncoderDecoderConfig, TranslationConfig
from bert_jax.contrib.translation.metrics import corpus_score, signatures
from bert_jax.contrib.translation.records import pairs, read_records
from bert_jax.inference.loaded import load
from bert_jax.interop.saved_files import BEST
from bert_jax.metrics.score import value

pytest.importorskip("sacrebleu", reason="BLEU and chrF need the extra translation")

OPTIONS = {
    "model.encoder": "encoder_decoder", "model.hidden_size": 32, "model.num_layers": 1,
    "model.num_attention_heads": 2, "model.intermediate_size": 64, "model.max_position_embeddings": 32,
    "optimizer.warmup_steps": 2, "training.log_interval": 2, "training.eval_interval": 4,
    "training.checkpoint_interval": 4,
}  # fmt: skip


def texts(count: int, seed: int) -> tuple[list[str], list[str]]:
    """Texts of words, and the same words in another order with other numbers."""
    rng = np.random.default_rng(seed)
    numbers = [rng.integers(0, 30, rng.integers(1, 8)) for _ in range(count)]
    return (
        [" ".join(f"w{n}" for n in own) for own in numbers],
        [" ".join(f"w{n + 30}" for n in own[::-1]) for own in numbers],
    )


def vocabulary(folder: Path) -> str:
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    words = [piece for piece in PIECES if piece not in special]
    (folder / "vocab.txt").write_text("\n".join([*special, *words]) + "\n")
    return str(folder / "vocab.txt")


def run(workdir: Path, model=None, num_steps=8, callbacks=(), **options):
    return bert_jax.finetune(
        model, task="translation", train=pairs(*texts(60, 1)), dev=pairs(*texts(12, 2)), workdir=workdir,
        num_steps=num_steps, learning_rate=3e-3, batch_size=8, max_length=16, seed=1, callbacks=callbacks,
        report=None, options=options,
    )  # fmt: skip


def start(folder: Path) -> dict:
    return {**OPTIONS, "data.vocab": vocabulary(folder)}


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    folder = tmp_path_factory.mktemp("translation")
    return run(folder / "run", **start(folder), **{"translation.beams": 2})


@pytest.mark.slow
def test_a_run_is_scored_and_predicts_what_it_predicted(done, capsys):
    (result,) = json.loads((done.workdir / "metrics.json").read_text())
    assert list(result["metrics"]) == ["bleu", "chrf", "nll"] and result["n"] == 12
    assert result["metrics"]["nll"]["value"] < np.log(len(PIECES))
    lines = [json.loads(line) for line in (done.workdir / "predictions_dev.jsonl").read_text().splitlines()]
    sources, references = texts(12, 2)
    assert [line["gold"] for line in lines] == references
    score = corpus_score("chrf", [line["label"] for line in lines], references)
    assert abs(value(score, 12) - result["metrics"]["chrf"]["value"]) < 1e-9
    model = load(done.workdir)
    assert model.spec.task.beams == 2
    assert [one["label"] for one in model.predict(sources)] == [line["label"] for line in lines]
    assert main(["predict", "--model", str(done.workdir), sources[0]]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["label"] == lines[0]["label"]
    with pytest.raises(ValueError, match="reads one text"):
        model.predict([(sources[0], "w1")])


@pytest.mark.slow
def test_a_resumed_run_ends_as_one_that_was_not_stopped(done, tmp_path):
    options = {**start(tmp_path), "translation.beams": 2}
    run(tmp_path / "run", callbacks=[lambda line: line.get("step") == 4], **options)
    (result,) = json.loads((tmp_path / "run" / "metrics.json").read_text())
    assert result["step"] == 4
    again = run(tmp_path / "run", **options)
    for name in ("metrics.json", "predictions_dev.jsonl"):
        one, other = ((folder / name).read_text() for folder in (again.workdir, done.workdir))
        assert [line for line in one.splitlines() if "seconds" not in line] == [
            line for line in other.splitlines() if "seconds" not in line
        ]
    one, other = (load(folder / BEST).bundle().params for folder in (again.workdir, done.workdir))
    assert all(np.array_equal(one[name], other[name]) for name in other)


@pytest.mark.slow
@pytest.mark.parametrize("decoder", ["same", "shared", "random"])
def test_a_run_starts_from_other_models(tmp_path, decoder):
    source = saved_model(tmp_path / "model")
    lines = []
    common = {"decoder_from": decoder, "optimizer.learning_rate": 0.0}
    trained = bert_jax.finetune(
        source, task="translation", train=texts(20, 1), dev=0.2, workdir=tmp_path / "run",
        num_steps=1, max_length=16, report=lines.append, options=common,
    )  # fmt: skip
    params, own = (load(path).bundle().params for path in (trained.workdir, source))
    table = "embeddings/word_embeddings/embedding"
    assert np.array_equal(params[f"encoder/source/{table}"], own[table])
    query = "attention/query/kernel"
    if decoder == "shared":
        assert f"encoder/target/{table}" not in params
    else:
        of_decoder = params[f"encoder/target/layer_0/{query}"]
        assert np.array_equal(of_decoder, own[f"encoder/layer_0/{query}"]) == (decoder == "same")
    assert any("randomly initialized" in line and "encoder/target" in line for line in lines)


def config(data: TaskDataConfig) -> FinetuneConfig:
    model = EncoderDecoderConfig(encoder="encoder_decoder")
    return extended(FinetuneConfig)(task=TaskConfig(kind="translation"), model=model, data=data)


def test_two_files_of_lines_and_files_with_columns_have_the_same_records(tmp_path):
    sources, targets = texts(5, 1)
    (tmp_path / "a.de").write_text("\n".join(sources) + "\n")
    with gzip.open(tmp_path / "a.en.gz", "wt") as file:
        file.write("\n".join(targets) + "\n")
    rows = [f"{target}\t{source}" for source, target in zip(sources, targets, strict=True)]
    (tmp_path / "a.tsv").write_text("\n".join(rows) + "\n")
    common = {"dir": str(tmp_path)}
    of_run = extended(FinetuneRunOptions)().records  # of the command, and of files from Python
    lines, tests = of_run(config(TaskDataConfig(train=("a.de+a.en.gz",), test=("a.de+a.en.gz",), **common)))
    assert tests == ["test"] and [one.label for one in lines["test"]] == targets
    columns = ("text=2", "label=1")
    tables, _ = read_records(config(TaskDataConfig(train=("a.tsv",), columns=columns, **common)))
    for both in zip(lines["train"], tables["train"], strict=True):
        assert len({(one.text, one.label) for one in both}) == 1
    (tmp_path / "b.en").write_text("one\n")
    with pytest.raises(ValueError, match="5 texts, but 1 translations"):
        read_records(config(TaskDataConfig(train=("a.de+b.en",), **common)))
    with pytest.raises(ValueError, match="no such file"):
        read_records(config(TaskDataConfig(train=("a.de+c.en",), **common)))
    with pytest.raises(ValueError, match=r"a\.tsv: not allowed with"):
        read_records(config(TaskDataConfig(train=("a.de+a.en.gz",), dev=("a.tsv",), **common)))


def test_scores_are_those_of_sacrebleu():
    cases = {
        "bleu": ("the cat sat on the mat now", "the cat sat on the mat today", 80.91),
        "chrf": ("我喜欢猫和狗。", "我喜欢猫和鸟。", 49.29),
    }
    for name, (hypothesis, reference, expected) in cases.items():
        assert round(value(corpus_score(name, [hypothesis], [reference]), 1), 2) == expected
    chinese = corpus_score("bleu", ["我喜欢猫和狗。"], ["我喜欢猫和鸟。"])
    assert round(value(chinese, 1), 2) == 64.35
    assert "tok:zh" in signatures(["我喜欢猫和鸟。"])[0] and "tok:13a" in signatures(["a cat"])[0]
    hypotheses, references = (["a b c d e", "f g h i j k", "l m n o p"], ["a b c d f", "f g h i j", "l m n o p q"])
    resampled = corpus_score("bleu", hypotheses, references).of(np.array([2, 0, 2]))
    chosen = [[one[i] for i in (2, 0, 2)] for one in (hypotheses, references)]
    assert abs(resampled - value(corpus_score("bleu", *chosen), 3)) < 1e-9


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model.encoder": "transformer"}, "model.encoder: 'transformer' is not allowed"),
        ({"optimizer.layer_decay": 0.9}, "optimizer.layer_decay: 0.9 is not allowed"),
        ({"decoder_from": "same"}, "--decoder_from: requires --init_from"),
        ({"model.decoder": ["num_layers=1"]}, "nothing for this decoder"),
    ],
)
def test_options_that_do_not_fit_are_refused(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        run(tmp_path / "run", **{**start(tmp_path), **options})


def test_a_pair_without_a_translation_is_refused(tmp_path):
    with pytest.raises(ValueError, match="pair:2: no text or no translation"):
        bert_jax.finetune(
            None, task="translation", train=pairs(["w1", "w2"], ["w3", " "]), workdir=tmp_path / "run",
            max_length=16, num_steps=1, options=start(tmp_path),
        )  # fmt: skip


def test_the_smoothing_is_an_option_of_translation():
    assert TranslationConfig().label_smoothing == 0.1
