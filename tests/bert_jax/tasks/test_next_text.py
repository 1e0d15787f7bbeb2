"""The next-sentence loss beside a task's own: parts of texts, whose they are, and that the task's loss stays."""

import jax
import numpy as np
import pytest
from finetune_cases import PIECES, SPLITS, configured, lines, run

from bert_jax.config import ModelConfig
from bert_jax.config.finetune import FinetuneConfig
from bert_jax.config.task import TaskConfig
from bert_jax.finetuning.finetune import FinetuneJob
from bert_jax.finetuning.nsp_auxiliary import next_text_units, text_parts
from bert_jax.interop.readers import read_weights
from bert_jax.parallel import make_mesh
from bert_jax.tasks.task import Encoded, ModelInput
from bert_jax.tokenization.wordpiece import WordPieceTokenizer

TOKENIZER = WordPieceTokenizer([*PIECES, "##x"], lower_case=False)


def encoded(first, second=None):
    pair = None if second is None else TOKENIZER.encode(second)
    return Encoded(*TOKENIZER.build_inputs(TOKENIZER.encode(first), pair))


def copies(chosen, units, step, max_length=32, types=2):
    config = FinetuneConfig(task=TaskConfig(max_length=max_length), model=ModelConfig(type_vocab_size=types))
    return next_text_units(chosen, units, config, TOKENIZER, step)


@pytest.mark.parametrize(
    ("given", "first", "second"),
    [
        (("w1 w2 w3 w4",), ["w1", "w2"], ["w3", "w4"]),
        (("w1 w2x w3",), ["w1"], ["w2", "##x", "w3"]),  # never inside a word
        (("w1", "w2 w3"), ["w1"], ["w2", "w3"]),
        (("w1",), [], ["w1"]),
        (("", "w1"), [], ["w1"]),
        (("",), [], []),
    ],
)
def test_parts_of_a_text(given, first, second):
    found = text_parts(encoded(*given), TOKENIZER)
    assert [TOKENIZER.pieces(part) for part in found] == [first, second]


def test_half_of_the_second_parts_are_of_another_record_and_said_to_be():
    units = [ModelInput(i, (encoded(f"w{i} w{i} w{i} w{i}"),), {"labels": 1}) for i in range(50)]
    found = []
    for step in range(20):
        made = copies(units, units, step)
        found += zip(units, made, strict=True)
    for unit, made in found:
        ids, types = np.asarray(made.sequences[0].ids), np.asarray(made.sequences[0].types)
        first, second = ids[1:3], ids[4:6]
        assert set(first) == {unit.sequences[0].ids[1]} and types.tolist() == [0, 0, 0, 0, 1, 1, 1]
        assert made.targets["nsp_labels"] == (second[0] != first[0]) and made.targets["nsp_weights"] == 1
        assert made.weight == 0 and "labels" not in made.targets
    assert 0.42 < np.mean([made.targets["nsp_labels"] for _, made in found]) < 0.56
    again = copies(units, units, 3)
    assert again == [made for _, made in found[150:200]]


def test_what_has_no_second_part_is_left_out_and_long_ones_are_cut():
    units = [
        ModelInput(0, (encoded("w1"),)),
        ModelInput(1, (encoded(" ".join(["w1"] * 20), " ".join(["w2"] * 3)),)),
    ]
    (made,) = copies(units, units[1:], 0, max_length=12, types=1)
    assert TOKENIZER.pieces(made.sequences[0].ids) == ["[CLS]", *["w1"] * 6, "[SEP]", *["w2"] * 3, "[SEP]"]
    assert set(made.sequences[0].types) == {0}


def test_the_loss_of_the_task_is_not_touched(source, tmp_path):
    plain = "--model.hidden_dropout 0 --model.attention_dropout 0 --input.max_shapes 1"
    losses = []
    for options in ("", "--loss.nsp_weight 0.5"):
        config, start = configured(source, tmp_path / "w", f"{plain} {options}")
        job = FinetuneJob(config, SPLITS, [], start)
        mesh = make_mesh(config.mesh, jax.devices()[:1])
        features, info = next(job.data(mesh, complete=False).batches)
        assert info.sequences == 8 and np.sum(features["weights"]) == 8
        losses.append(features)
    assert np.sum(losses[1]["nsp_weights"]) >= 7 and np.sum(losses[1]["labels"]) == np.sum(losses[0]["labels"])
    assert np.all(losses[1]["weights"][losses[1]["nsp_weights"] > 0] == 0)


@pytest.mark.slow
def test_it_is_learned_and_leaves_no_trace(source, tmp_path):
    run(source, tmp_path / "w", "--loss.nsp_weight 1 --training.num_epochs 1")
    assert all(0 < line["nsp_loss"] < 2 for line in lines(tmp_path / "w") if line.get("nsp_loss") is not None)
    assert any("nsp_accuracy" in line for line in lines(tmp_path / "w"))
    assert not any(name.startswith("nsp_head") for name in read_weights(tmp_path / "w" / "best").params)
    with pytest.raises(ValueError, match=r"loss.nsp_weight: unknown option with task.kind choice"):
        run(source, tmp_path / "x", "--loss.nsp_weight 1 --task.kind choice")
