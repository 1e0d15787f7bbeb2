"""``run_finetune.py --prune_heads --prune_units``: rounds of training and removal, killed and continued."""

import json
import os
import sys

import numpy as np
import pytest
from finetune_cases import SPLITS, TWO_LAYERS, saved_model

from bert_jax.contrib.compression import gradual
from bert_jax.interop.readers import read_weights

pytestmark = pytest.mark.entry


@pytest.fixture
def tune(finetuning, monkeypatch, capsys, tmp_path):
    """Call: exit code and output of ``run_finetune.py`` on the records of ``finetune_cases``."""
    model = saved_model(tmp_path / "model", model=TWO_LAYERS)
    for split, records in SPLITS.items():
        lines = [json.dumps({"text": record.text, "label": record.label}) for record in records]
        (tmp_path / f"{split}.jsonl").write_text("\n".join(lines) + "\n")
    fixed = (
        f"--init_from {model} --data.dir {tmp_path} --data.train train.jsonl --data.dev dev.jsonl "
        "--training.num_epochs 1 --training.global_batch_size 16 --optimizer.learning_rate 5e-3 "
        f"--task.max_length 32 --training.compilation_cache {os.environ['JAX_COMPILATION_CACHE_DIR']}"
    )

    def call(workdir, words):
        argv = ["run_finetune.py", "--workdir", str(tmp_path / workdir), *fixed.split(), *words.split()]
        monkeypatch.setattr(sys, "argv", argv)
        capsys.readouterr()
        code = finetuning.main()
        return code, "".join(capsys.readouterr())

    return call


@pytest.mark.slow
def test_heads_and_units_go_in_rounds_and_a_killed_run_continues(tune, tmp_path, monkeypatch):
    words = "--prune_heads 0.5 --prune_units 0.25 --prune_rounds 2"
    code, out = tune("calm", words)
    assert code == 0, out
    assert "round 2 of 2" in out and "importance: gradients of 70 examples" in out
    sizes = []
    for number in (1, 2):
        model = read_weights(tmp_path / f"calm/rounds/{number}/pruned").spec.model
        sizes.append((sum(model.heads_by_layer), sum(model.units_by_layer)))
    # 4 heads and 128 units: 0.5 + 0.5 / 8 and 0.25 + 0.75 / 8 of them, then the shares that were asked for.
    assert sizes == [(2, 44), (2, 32)]
    calm = read_weights(tmp_path / "calm")
    assert sum(calm.spec.model.units_by_layer) == 32
    (scores,) = json.loads((tmp_path / "calm/metrics.json").read_text())
    assert scores["metrics"]["accuracy"]["value"] > 0.8

    whole = gradual.prune_model

    def killed(source, target, *more, **options):
        if "rounds/2" in str(source):
            raise SystemExit(137)
        whole(source, target, *more, **options)

    monkeypatch.setattr(gradual, "prune_model", killed)
    with pytest.raises(SystemExit):
        tune("torn", words)
    monkeypatch.setattr(gradual, "prune_model", whole)
    code, out = tune("torn", words)
    assert code == 0 and "round 1 of 2" not in out
    code, out = tune("torn", words.replace("0.25", "0.5"))
    assert code == 2 and "other options (saved -> now): --prune_units: 0.25 -> 0.5; use the saved" in out
    torn = read_weights(tmp_path / "torn").params
    for name, values in calm.params.items():
        np.testing.assert_array_equal(torn[name], values, err_msg=name)


@pytest.mark.slow
def test_a_round_that_removes_nothing_is_left_out(tune, tmp_path):
    """3 of 4 heads are left after the first one."""
    code, out = tune("w", "--prune_heads 0.75 --prune_rounds 2")
    assert code == 0 and "round 1 of 1" in out, out
    assert sum(read_weights(tmp_path / "w").spec.model.heads_by_layer) == 3


@pytest.mark.slow
def test_movement_counts_from_the_start_of_each_round(tune, tmp_path):
    code, out = tune("w", "--prune_units 0.5 --prune_rounds 2 --prune_importance movement")
    assert code == 0, out
    assert sum(read_weights(tmp_path / "w").spec.model.units_by_layer) == 64


def test_bad_input_is_refused_before_anything_is_trained(tune, tmp_path):
    for words, message in (
        ("--prune_heads 0.5 --seeds 2", "not allowed with --sweep and --seeds"),
        ("--prune_heads 0", "--prune_heads: 0 is not allowed; allowed: a share to keep, above 0 and up to 1"),
        ("--prune_units 0.5 --prune_rounds 0", "prune_rounds"),
        ("--prune_rounds 4", "--prune_rounds: requires --prune_heads or --prune_units"),
        ("--teacher_outputs x", "teacher_outputs: unknown"),
        ("--prune_units 0.5 --prune_importance movement --init_layers 0", "movement is not allowed with --init_la"),
        ("--prune_heads 0.2 --prune_rounds 1", "0.2 of 4 leaves a layer with none"),
        ("--prune_heads 0.5 --task.kind joint", "gradient is not allowed with task.kind joint"),
        ("--prune_heads 0.5 --data.train", "gradient is not allowed without data.train, whose labels it reads"),
    ):
        code, out = tune("w", words)
        assert code == 2 and message in out.splitlines()[-1], out
        assert not (tmp_path / "w").exists()


def test_a_run_that_fails_before_its_first_round_fixes_no_options(tune, tmp_path):
    code, out = tune("w", f"--prune_heads 0.5 --teacher {tmp_path / 'none'}")
    assert code == 2 and "none: does not exist" in out, out
    code, out = tune("w", f"--prune_heads 0.75 --teacher {tmp_path / 'none'}")
    assert code == 2 and "none: does not exist" in out, out
