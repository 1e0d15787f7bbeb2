"""Distillation before a task: which outputs are compared, devices, no gradient of the teacher, resuming, the saved
student, refusals."""

import dataclasses
import json
import re

import jax
import numpy as np
import pytest
from builders import content, drawn, tiny_model, words
from flax import linen as nn
from hf_folders import make_folder
from support import (
    random_batch,
    random_params,
    relative_difference,
    sums_of,
    tiny_config,
    train_synthetic,
    whole_and_resumed,
)

from bert_jax.config import HeadsConfig, ModelSpec, TokenizerConfig
from bert_jax.contrib.compression.distillation import Distillation
from bert_jax.contrib.compression.distillation_losses import (
    cosine_distance_loss,
    relation_loss,
    score_loss,
    soft_target_loss,
    squared_error_loss,
)
from bert_jax.contrib.compression.teachers.find import TEACHER_RECORD, check_vocabulary, find_teacher
from bert_jax.contrib.compression.teachers.inputs import TeacherInputs
from bert_jax.contrib.compression.teachers.outputs import Teacher
from bert_jax.inference.loaded import prepare
from bert_jax.interop.export import export_model
from bert_jax.interop.model_bundle import ReadOptions
from bert_jax.interop.readers import read_weights
from bert_jax.interop.saved_model import write_saved
from bert_jax.model import from_canonical, to_canonical
from bert_jax.model.canonical import abstract_params, canonical_shapes
from bert_jax.objectives.objective import Aux
from bert_jax.parallel import make_mesh, to_global
from bert_jax.tokenization import WordPieceTokenizer
from bert_jax.training.programs import train_programs
from bert_jax.training.state import make_prng_key
from bert_jax.training.step import loss_and_gradients

OPTIONS = (
    "--objective.name distillation --data.next_sentence none --execution.vocab_multiple 1 --model.num_layers 2 "
    "--model.num_attention_heads 2"
)
LAYERS, WIDTH = 4, 24


def spec(vocab_size, **changes):
    sizes = {"num_layers": LAYERS, "hidden_size": WIDTH, "num_attention_heads": 2, "max_position_embeddings": 64}
    return ModelSpec(
        model=tiny_model(vocab_size, **sizes | changes), heads=HeadsConfig(mlm=True, pooler=True),
        tokenizer=TokenizerConfig(),
    )  # fmt: skip


def teacher(config, **changes):
    bundle = drawn(spec(config.model.vocab_size, **changes), 0.2)
    return Teacher("teacher", bundle.spec, bundle.params, None, '{"teacher": "teacher"}')


def taught(config, mesh=None, **changes):
    """The objective with its teacher, and the teacher's parameters."""
    objective, given = Distillation(config, mesh), teacher(config, **changes)
    objective.teach(given.spec)
    plain = objective.teacher.clone(mesh=None)
    params = {name: given.params[name] for name in canonical_shapes(plain)}
    return objective, from_canonical(params, nn.unbox(abstract_params(plain)), config.model.vocab_size)


def hidden_states(model, params, batch):
    return jax.device_get(jax.jit(model.apply)({"params": params}, batch)).hidden_states


PRESETS = {
    "distilbert": f"--objective.hidden_loss cosine --objective.soft_weight 5 --objective.teacher_width {WIDTH}",
    "tinybert": (
        "--objective.mlm_weight 0 --objective.soft_weight 0 --objective.hidden_loss mse "
        "--objective.hidden_layers all --objective.attention_loss scores --objective.attention_weight 0.5 "
        f"--objective.hidden_weight 2 --objective.teacher_width {WIDTH}"
    ),
    "minilm": (
        "--objective.mlm_weight 0 --objective.soft_weight 0 --objective.attention_loss relations "
        "--objective.relation_heads 4 --objective.relation_layer 2"
    ),
    "few pieces": "--objective.soft_weight 3 --objective.soft_top_k 5",
}  # fmt: skip


@pytest.mark.slow
def test_the_losses_are_those_of_the_outputs():
    """Against the outputs of both networks, which are computed one by one; layers 0, 2, 4 of 4 for 0, 1, 2 of 2."""
    config = tiny_config(OPTIONS, PRESETS["tinybert"], "--objective.soft_weight 3 --objective.temperature 4")
    objective, params_t = taught(config)
    params, batch = random_params(objective.model, 3), random_batch(config, rows=4)
    sums = jax.jit(lambda: sums_of(objective, params, batch, teacher=params_t))()
    student, other = (
        jax.device_get(jax.jit(model.apply)({"params": own}, batch))
        for model, own in ((objective.model, params), (objective.teacher, params_t))
    )
    tokens = (batch["sequence_ids"] > 0).astype(np.float32)
    soft = soft_target_loss("x", student.mlm_logits, other.mlm_logits, batch["mlm_weights"], 4)["x_loss"]
    np.testing.assert_allclose(np.array(sums["soft_loss"]), np.array(soft), rtol=1e-5)
    kernel, bias = (params["teacher_projection"][name] for name in ("kernel", "bias"))
    hidden = sum(
        squared_error_loss("x", student.hidden_states[i] @ kernel + bias, other.hidden_states[2 * i], tokens)[
            "x_loss"
        ][0]
        for i in range(3)
    )
    np.testing.assert_allclose(np.array(sums["hidden_loss"]), (float(hidden), tokens.sum()), rtol=1e-5)
    # A step minimizes the weighted sum of the means.
    aux = Aux({"teacher": params_t})
    loss = jax.jit(lambda: loss_and_gradients(objective, params, batch, None, 1, aux=aux)[0])()
    means = {name: float(total / weight) for name, (total, weight) in sums.items() if weight}
    assert float(loss) == pytest.approx(
        3 * means["soft_loss"] + 2 * means["hidden_loss"] + 0.5 * means["attention_loss"], rel=1e-5
    )
    assert objective.evaluation({name: np.array(pair) for name, pair in sums.items()})["loss"] == pytest.approx(
        float(loss), rel=1e-5
    )


@pytest.mark.slow
def test_attention_is_that_of_queries_keys_and_values():
    """Computed here from the kernels of a layer and the hidden states before it."""

    def heads(params, layer, names, states, count):
        own = params["encoder"][f"layer_{layer}"]["attention"]
        vectors = (states @ own[name]["kernel"] + own[name]["bias"] for name in names)
        return [x.reshape(*x.shape[:2], count, -1) for x in vectors]

    for preset in ("tinybert", "minilm"):
        config = tiny_config(OPTIONS, PRESETS[preset], "--objective.hidden_loss cosine")
        config = dataclasses.replace(config, objective=dataclasses.replace(config.objective, teacher_width=WIDTH))
        objective, params_t = taught(config)
        params, batch = random_params(objective.model, 3), random_batch(config, rows=4)
        sums = jax.jit(lambda p, t, b, o=objective: sums_of(o, p, b, teacher=t))(params, params_t, batch)
        x = hidden_states(objective.model, params, batch)
        y = hidden_states(objective.teacher, params_t, batch)
        params, params_t = jax.device_get((params, params_t))
        ids, names = batch["sequence_ids"], ("query", "key", "value")
        if preset == "tinybert":
            parts = [
                score_loss(
                    "x", heads(params, own, names[:2], x[own], 2), heads(params_t, of, names[:2], y[of], 2), ids
                )
                for own, of in ((0, 1), (1, 3))
            ]  # fmt: skip
        else:
            pairs = zip(heads(params, 1, names, x[1], 1), heads(params_t, 2, names, y[2], 1), strict=True)
            parts = [relation_loss("x", s[:, :, 0], t[:, :, 0], ids, 4) for s, t in pairs]
        expected = sum(part["x_loss"][0] for part in parts), parts[0]["x_loss"][1]
        np.testing.assert_allclose(sums["attention_loss"], expected, rtol=1e-5)


slow = pytest.mark.slow


@pytest.mark.slow
@pytest.mark.parametrize("count", [pytest.param(1, marks=slow), 2])
def test_attention_of_networks_with_pruned_heads(count):
    """All layers of student and teacher have ``count`` of 4 heads."""
    changes = {"num_attention_heads": 4, "layer_heads": (count,) * LAYERS}
    config = tiny_config(OPTIONS, PRESETS["tinybert"], "--model.num_attention_heads 4")
    pruned = dataclasses.replace(config.model, layer_heads=(count,) * config.model.num_layers)
    config = dataclasses.replace(config, model=pruned)
    objective, params_t = taught(config, **changes)
    params, batch = random_params(objective.model, 3), random_batch(config, rows=4)
    sums = jax.jit(lambda p, t: sums_of(objective, p, batch, teacher=t))(params, params_t)
    expected = 0.0
    for own, of in ((0, 1), (1, 3)):
        vectors = []
        for model, layer, values in ((objective.model, own, params), (objective.teacher, of, params_t)):
            x = hidden_states(model, values, batch)[layer]
            kernels = jax.device_get(values["encoder"][f"layer_{layer}"]["attention"])
            flat = [x @ kernels[name]["kernel"] + kernels[name]["bias"] for name in ("query", "key")]
            vectors.append([one.reshape(*one.shape[:2], count, -1) for one in flat])
        expected += score_loss("x", *vectors, batch["sequence_ids"])["x_loss"][0]
    np.testing.assert_allclose(sums["attention_loss"][0], expected, rtol=1e-5)


@pytest.mark.slow
def test_the_last_hidden_states_without_a_projection():
    config = tiny_config(OPTIONS, PRESETS["distilbert"], f"--model.hidden_size {WIDTH}")
    objective, params_t = taught(config)
    params, batch = random_params(objective.model, 3), random_batch(config, rows=4)
    assert "teacher_projection" not in params
    sums = jax.jit(lambda p, t: sums_of(objective, p, batch, teacher=t))(params, params_t)
    states = [
        jax.jit(model.apply)({"params": own}, batch).sequence_output
        for model, own in ((objective.model, params), (objective.teacher, params_t))
    ]
    tokens = (batch["sequence_ids"] > 0).astype(np.float32)
    np.testing.assert_allclose(sums["hidden_loss"], cosine_distance_loss("x", *states, tokens)["x_loss"], rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "preset", [pytest.param("distilbert", marks=slow), "tinybert", "minilm", pytest.param("few pieces", marks=slow)]
)
def test_no_gradient_reaches_the_teacher_and_a_loop_over_layers_is_the_same(preset):
    config = tiny_config(OPTIONS, PRESETS[preset])
    objective, params_t = taught(config)
    params, batch = random_params(objective.model, 3), random_batch(config, rows=4)

    def loss(params_t):
        sums = sums_of(objective, params, batch, teacher=params_t)
        return sum(sums[name][0] / total for name, total in objective.denominators(batch).items())

    value, gradient = jax.jit(jax.value_and_grad(loss))(params_t)
    assert value > 0 and not any(np.any(leaf) for leaf in jax.tree.leaves(gradient))  # exactly 0
    scanned = tiny_config(OPTIONS, PRESETS[preset], "--execution.scan_layers true")
    other, params_s = taught(scanned)
    own = random_params(other.model, 3)
    aux = Aux({"teacher": params_s})
    found = jax.jit(lambda: loss_and_gradients(other, own, batch, None, 1, aux=aux)[0])()
    assert float(found) == pytest.approx(float(value), rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "preset", ["minilm", *(pytest.param(name, marks=slow) for name in ("distilbert", "tinybert", "few pieces"))]
)
def test_devices_and_accumulation_are_as_one(preset):
    """With dropout in the student."""

    def run(words="", accumulation=1, devices=1):
        config = tiny_config(OPTIONS, PRESETS[preset], words)
        mesh = make_mesh(config.mesh, jax.devices()[:devices])
        objective, _ = taught(config, mesh)
        given = teacher(config)
        objective.teach(given.spec, given.params)
        abstract = train_programs(objective).abstract.params
        params = jax.device_put(
            random_params(objective.model, 3), jax.tree.map(lambda leaf: leaf.sharding, abstract)
        )
        batch = to_global(random_batch(config, rows=8), mesh, 8)
        key = make_prng_key(config.execution, 1)
        compute = jax.jit(
            lambda p, t, b: loss_and_gradients(objective, p, b, key, accumulation, aux=Aux({"teacher": t}))[:2]
        )
        loss, gradients = compute(params, objective.fixed["teacher"], batch)
        return float(loss), to_canonical(jax.device_get(gradients), config.model.vocab_size)

    loss, gradients = run()
    other, others = run("--mesh.data 2 --mesh.tensor 2", accumulation=2, devices=4)
    assert other == pytest.approx(loss, rel=1e-6)
    assert relative_difference(others, gradients) <= 1e-6


@pytest.mark.slow
@pytest.mark.parametrize(
    "preset", ["few pieces", *(pytest.param(name, marks=slow) for name in ("tinybert", "minilm"))]
)
def test_outputs_in_the_batch_are_as_those_of_the_teacher_in_the_step(preset):
    """With microbatches, which then divide the outputs too; the slow ones on devices."""
    devices = 1 if preset == "few pieces" else 4
    config = tiny_config(OPTIONS, PRESETS[preset], "--mesh.data 2 --mesh.tensor 2" if devices == 4 else "")
    mesh = make_mesh(config.mesh, jax.devices()[:devices])
    objective, params_t = taught(config, mesh)
    params, batch = random_params(objective.model.clone(mesh=None), 3), random_batch(config, rows=8)
    expected = jax.jit(
        lambda: loss_and_gradients(objective, params, batch, None, 2, aux=Aux({"teacher": params_t}))[:2]
    )()
    outputs = jax.device_get(jax.jit(objective.outputs)(params_t, batch))
    stored, _ = taught(config, mesh)
    stored.use_stored({name: (array.shape[1:], array.dtype) for name, array in outputs.items()})
    assert {name: (x.shape, x.dtype) for name, x in stored.batch_shapes(8).items() if name in outputs} == {
        name: (array.shape, array.dtype) for name, array in outputs.items()
    }
    whole = to_global({name: (batch | outputs)[name] for name in stored.features}, mesh, 8)
    found = jax.jit(lambda b: loss_and_gradients(stored, params, b, None, 2)[:2])(whole)
    assert float(found[0]) == pytest.approx(float(expected[0]), rel=1e-6)
    size = config.model.vocab_size
    gradients = [to_canonical(jax.device_get(tree), size) for _, tree in (found, expected)]
    assert relative_difference(*gradients) <= 1e-6
    assert not stored.fixed and stored.flops_per_sequence() < objective.flops_per_sequence()


@pytest.mark.slow
def test_it_trains_resumes_and_the_student_is_saved_alone(tmp_path):
    steps = "--training.num_steps 4 --training.eval_interval 2 --training.eval_batches 2"
    config = tiny_config(OPTIONS, PRESETS["distilbert"], steps)
    lines = whole_and_resumed(config, tmp_path, 6, inputs=TeacherInputs(teacher(config)))
    last = [line for line in lines if line.get("split") == "eval"][-1]
    assert last["loss"] == pytest.approx(last["mlm_loss"] + 5 * last["soft_loss"] + last["hidden_loss"], rel=1e-6)
    assert (tmp_path / "cut" / TEACHER_RECORD).read_text() == '{"teacher": "teacher"}'
    bundle = read_weights(tmp_path / "cut")
    assert bundle.spec.heads.present() == ("mlm",)
    assert not any(name.startswith("teacher_projection") for name in bundle.params)
    export_model(tmp_path / "cut", tmp_path / "hf", "hf")
    ids = np.arange(12).reshape(2, 6)
    outputs = [prepare(read_weights(tmp_path / name)).forward({"input_ids": ids}) for name in ("cut", "hf")]
    np.testing.assert_allclose(outputs[0]["mlm_logits"], outputs[1]["mlm_logits"], rtol=0, atol=1e-6)
    with pytest.raises(ValueError, match=r"^--teacher: missing; name the model that teaches; bert-jax plan"):
        train_synthetic(tiny_config(OPTIONS, "--training.num_steps 3"), tmp_path / "other")


@pytest.mark.slow
@pytest.mark.parametrize(
    "preset", ["tinybert", *(pytest.param(name, marks=slow) for name in ("few pieces", "distilbert", "minilm"))]
)
def test_a_run_ends_with_its_held_out_loss(preset, tmp_path, capsys):
    """With mlm_weight 0, too: there is no loss of masked words."""
    steps = "--training.num_steps 2 --training.eval_interval 2 --training.eval_batches 1"
    config, workdir = tiny_config(OPTIONS, PRESETS[preset], steps), tmp_path / "run"
    train_synthetic(config, workdir, inputs=TeacherInputs(teacher(config)))
    last = json.loads((workdir / "metrics.jsonl").read_text().splitlines()[-1])
    assert ("mlm_loss" in last) == ("mlm_weight 0" not in PRESETS[preset])
    named = f"MLM loss {last['mlm_loss']:.4f} nats on" if "mlm_loss" in last else f"loss {last['loss']:.4f}"
    assert f"held-out: {named}" in capsys.readouterr().out
    assert f"held-out: {named}" in (workdir / "report.html").read_text()


def save(folder, vocab_size=40, seed=0, pieces=None):
    bundle = drawn(spec(vocab_size), 0.2, seed=seed)
    write_saved(folder, dataclasses.replace(bundle, tokenizer_content=content(pieces or words(vocab_size - 5))))
    return folder


@pytest.mark.slow
def test_a_run_keeps_its_teacher(tmp_path):
    workdir = tmp_path / "run"
    workdir.mkdir()
    assert find_teacher([], workdir, ReadOptions()) is None
    found = find_teacher([str(save(tmp_path / "a"))], workdir, ReadOptions())
    assert found.spec.model.num_layers == LAYERS
    (workdir / TEACHER_RECORD).write_text(found.record)
    assert find_teacher([], workdir, ReadOptions()).name == str(tmp_path / "a")
    (tmp_path / "a").rename(tmp_path / "b")
    assert find_teacher([str(tmp_path / "b")], workdir, ReadOptions()).fingerprint == found.fingerprint
    save(tmp_path / "c", seed=1)
    began = re.escape(f"the run in {workdir} began with {tmp_path / 'a'}, another model")
    with pytest.raises(ValueError, match=f"^--teacher .*/c: {began}; give that one, or another --workdir$"):
        find_teacher([str(tmp_path / "c")], workdir, ReadOptions())
    check_vocabulary(found, WordPieceTokenizer(words(35), lower_case=True), tmp_path / "vocab.txt")
    other = WordPieceTokenizer([*words(34), "other"], lower_case=True)
    with pytest.raises(ValueError, match=r"^--teacher .*: the model has another vocabulary than .*vocab.txt; set"):
        check_vocabulary(found, other, tmp_path / "vocab.txt")


@pytest.mark.slow
def test_a_teacher_whose_files_contradict_each_other(tmp_path):
    folder, workdir = make_folder(tmp_path / "hf", config={"vocab_size": 7}), tmp_path / "run"
    with pytest.raises(ValueError, match=r"set --allow_mismatch"):
        find_teacher([str(folder)], workdir, ReadOptions())
    found = find_teacher([str(folder)], workdir, ReadOptions(allow_mismatch=True))
    assert any("vocab_size is 7" in note for note in found.notes)


@pytest.mark.parametrize(
    ("options", "changes", "heads", "message"),
    [
        ("", {}, HeadsConfig(), "--teacher: the model has no masked-LM head; set objective.soft_weight 0"),
        ("", {"vocab_size": 9}, None, "--teacher: the model has 9 pieces, but model.vocab_size is 211; use the"),
        ("", {"max_position_embeddings": 8}, None, "--teacher: the model has 8 positions, but data.seq_length is"),
        ("--objective.hidden_loss mse", {}, None, "objective.teacher_width: 0 is not allowed; the width .* is 24"),
        (
            f"--objective.hidden_loss mse --objective.hidden_layers all --objective.teacher_width {WIDTH}",
            {"num_layers": 3}, None, "model.num_layers: 2 is not allowed with a teacher of 3 layers",
        ),
        (
            "--objective.attention_loss scores", {"num_attention_heads": 4}, None,
            "model.num_attention_heads: 2 is not allowed; allowed: 4, as in the teacher, or objective.attention",
        ),
        (
            "--objective.attention_loss scores", {"layer_heads": (2, 1, 2, 2)}, None,
            "objective.attention_loss: scores is not allowed with layers of different numbers of heads; allowed",
        ),
        (
            "--objective.attention_loss relations --objective.relation_heads 5", {}, None,
            "objective.relation_heads: 5 is not allowed; allowed: a divisor of 24, the width of the teacher",
        ),
        (
            "--objective.attention_loss relations --objective.relation_heads 4 --objective.relation_layer 4", {},
            None, "objective.relation_layer: 4 is not allowed; allowed: -4 to 3",
        ),
    ],
)  # fmt: skip
def test_refusals(options, changes, heads, message):
    config = tiny_config(OPTIONS, options)
    given = spec(**{"vocab_size": config.model.vocab_size} | changes)
    given = given if heads is None else dataclasses.replace(given, heads=heads)
    with pytest.raises(ValueError, match=f"^{message}"):
        Distillation(config, None).teach(given)


def test_sentence_pairs_are_refused():
    config = tiny_config("--objective.name distillation")
    with pytest.raises(ValueError, match=r"^data.next_sentence: 'nsp' is not allowed with objective.name dist"):
        Distillation(config, None)
