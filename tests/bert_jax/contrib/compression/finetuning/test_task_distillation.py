"""Distillation on a task: the loss of each kind of task, teachers with another vocabulary or order of classes,
texts without labels, resuming, errors."""

import dataclasses
import math

import jax
import numpy as np
import pytest
from builders import StopAt, content
from finetune_cases import MODEL, PIECES, SPLITS, TWO_LAYERS, configured, lines, records, results, run, saved_model
from flax import linen as nn
from scipy.special import log_softmax, softmax

import bert_jax
from bert_jax.commands.finetune import records_of
from bert_jax.config import HeadsConfig, ModelSpec, SentenceConfig, TokenizerConfig
from bert_jax.contrib.compression.config import TaughtConfig, TaughtDataConfig
from bert_jax.contrib.compression.finetuning.teachers import Teaching, without_labels
from bert_jax.contrib.compression.teachers.find import find_task_teachers, find_teacher
from bert_jax.finetuning.finetune import FinetuneJob
from bert_jax.finetuning.task_objective import TaskObjective
from bert_jax.interop.model_bundle import ModelBundle, ReadOptions, parameter_shapes
from bert_jax.interop.saved_model import write_saved
from bert_jax.objectives.objective import Aux
from bert_jax.parallel import batch_sharding, make_mesh
from bert_jax.process import exits
from bert_jax.records import Answer, Record
from bert_jax.training.state import abstract_params
from bert_jax.training.step import loss_and_gradients
from data_pipeline.tasks import read_splits

TEXTS = [record.text for record in records(12, 7)]
TAGS, CLASSES = ("O", "B-good", "B-bad"), ("0", "1", "2")


def record(i, text, **fields):
    return Record(id=str(i), source=f"file:{i}", text=text, **fields)


def tags_of(text):
    return tuple(f"B-{word}" if word in ("good", "bad") else "O" for word in text.split())


def answer_of(text):
    word = text.split()[-1]
    return (Answer(text=word, start=text.rindex(word)),)


# Kind -> records, the head of a model of it, options.
KINDS = {
    "classification": (
        [record(i, t, label=CLASSES[i % 3]) for i, t in enumerate(TEXTS)],
        HeadsConfig(pooler=True, sequence_labels=CLASSES), "",
    ),
    "multi_label": (
        [record(i, t, labels=CLASSES[: i % 4]) for i, t in enumerate(TEXTS)],
        HeadsConfig(pooler=True, sequence_labels=CLASSES, problem="multi_label"), "",
    ),
    "regression": (
        [record(i, t, label=str(i / 3)) for i, t in enumerate(TEXTS)],
        HeadsConfig(pooler=True, sequence_labels=("score",), problem="regression"), "",
    ),
    "choice": (
        [record(i, t, label=str(i % 2), choices=(TEXTS[i - 1], TEXTS[i - 2])) for i, t in enumerate(TEXTS)],
        HeadsConfig(pooler=True, choice=True), "",
    ),
    "tagging": (
        [record(i, "", words=tuple(t.split()), tags=tags_of(t)) for i, t in enumerate(TEXTS)],
        HeadsConfig(token_labels=TAGS), f"--data.tags {' '.join(TAGS)} --task.max_length 10",
    ),
    "joint": (
        [
            record(i, "", words=tuple(t.split()), tags=tags_of(t), label=CLASSES[i % 3])
            for i, t in enumerate(TEXTS)
        ],
        HeadsConfig(pooler=True, token_labels=TAGS, sequence_labels=CLASSES),
        f"--data.tags {' '.join(TAGS)}",
    ),
    "qa": (
        [record(i, "w1 good", text_pair=t, answers=answer_of(t)) for i, t in enumerate(TEXTS)],
        HeadsConfig(span=True), "--task.max_length 14 --qa.doc_stride 4",
    ),
    "sentence": (
        [record(i, t, text_pair=TEXTS[i - 1], label=str(i % 3)) for i, t in enumerate(TEXTS)],
        HeadsConfig(), "--sentence.loss cosent",
    ),
}  # fmt: skip


def teacher_folder(folder, kind, *, model=MODEL, pieces=PIECES, seed=1, **heads):
    """A saved model of a kind of task with drawn weights that are large enough to tell texts apart."""
    spec = ModelSpec(
        model=model, heads=dataclasses.replace(KINDS[kind][1], **heads), tokenizer=TokenizerConfig(),
        sentence=SentenceConfig() if kind == "sentence" else None,
    )  # fmt: skip
    rng = np.random.default_rng(seed)
    params = {
        name: rng.normal(name.endswith("scale"), 0.3, shape).astype(np.float32)
        for name, shape in parameter_shapes(spec).items()
    }
    write_saved(folder, ModelBundle(spec=spec, params=params, tokenizer_content=content(pieces)))
    return folder


def teaching_of(folder, *teachers, unlabelled=()):
    return Teaching(*find_task_teachers([str(one) for one in teachers], folder, ReadOptions()), unlabelled)


def job_of(folder, kind, teaching, options="", splits=None, source=None):
    """A job of a kind of task, whose batches hold all records."""
    found, _, own = KINDS[kind]
    words = f"--task.kind {kind} {own} --training.global_batch_size 32 --execution.vocab_multiple 1 {options}"
    source = source or folder / "source"
    if not source.exists():
        saved_model(source)
    config, start = configured(source, folder / "w", words)
    return FinetuneJob(config, splits or {"train": found}, (), start, teaching)


def losses(job, batch, *params):
    """Value of each loss that is part of the total, with each of ``params``."""
    objective = TaskObjective(job.resolved.task, job.resolved.config, job.model, job.resolved.supervision)

    @jax.jit
    def parts(params):
        sums, _ = objective.sums(params, Aux({}), batch, None, axis=None)
        return {name: sums[name][0] / count for name, count in objective.denominators(batch).items()}

    return [{name: float(value) for name, value in parts(one).items()} for one in params]


def drawn_student(job, seed=3):
    """Parameters of the student that are not those of the teacher."""
    like = nn.unbox(abstract_params(job.model))
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: rng.normal(0, 0.3, x.shape).astype(np.float32), like)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_student_that_is_its_teacher_has_no_loss_and_another_has(kind, tmp_path):
    """Also in rows of several units and of several windows: each output is compared with its own."""
    model = TWO_LAYERS if kind == "classification" else MODEL
    teacher = teacher_folder(tmp_path / "t", kind, model=model)
    layers = "" if kind == "sentence" else "--distillation.layers_weight 0.5"
    source = saved_model(tmp_path / "source", model=model)
    job = job_of(tmp_path, kind, teaching_of(tmp_path, teacher), f"--distillation.weight 1 {layers}", source=source)
    batch = job.batches(make_mesh(job.config.mesh, jax.devices()[:1])).pack(0)[0]
    soft = job.resolved.supervision.soft
    assert batch["weights"].shape[1] > 1 and soft is not None
    same, parts = losses(job, batch, bert_jax.load(teacher).params, drawn_student(job))
    assert set(parts) == set(soft.denominators(batch))
    assert abs(sum(same.values())) < 2e-6, same
    assert min(parts.values()) > 1e-3, parts
    # Each unit has its share: the same in rows of its own.
    apart = FinetuneJob(
        dataclasses.replace(job.config, input=dataclasses.replace(job.config.input, packing=False)),
        {"train": KINDS[kind][0]}, (), job._start, job.resolved.supervision,
    )  # fmt: skip
    alone = apart.batches(make_mesh(job.config.mesh, jax.devices()[:1])).pack(0)[0]
    (single,) = losses(apart, alone, drawn_student(job))
    for name, value in parts.items():
        assert single[name] == pytest.approx(value, rel=1e-5), name


def kl(student, teacher, temperature=2.0):
    p, q = log_softmax(student / temperature, axis=-1), softmax(teacher / temperature, axis=-1)
    return temperature**2 * np.sum(q * (np.log(q) - p), axis=-1)


@pytest.mark.slow
def test_the_loss_of_classes_is_that_of_single_texts(tmp_path):
    """The definition, text by text and for two teachers, one of which has the classes in another order; the loss of
    the labels has the rest of the weight."""
    one = teacher_folder(tmp_path / "a", "classification")
    other = teacher_folder(tmp_path / "b", "classification", seed=2, sequence_labels=("2", "0", "1"))
    job = job_of(tmp_path, "classification", teaching_of(tmp_path, one, other), "--distillation.weight 0.7")
    batch = job.batches(make_mesh(job.config.mesh, jax.devices()[:1])).pack(0)[0]
    params = drawn_student(job)
    write_saved(
        tmp_path / "s",
        ModelBundle(
            spec=ModelSpec(model=MODEL, heads=KINDS["classification"][1], tokenizer=TokenizerConfig()),
            params={"/".join(path): x for path, x in flat(params)}, tokenizer_content=content(PIECES),
        ),
    )  # fmt: skip

    def logits(folder):
        found = bert_jax.load(folder).predict(TEXTS)
        return np.array([[math.log(one["probabilities"][name]) for name in CLASSES] for one in found])

    student = logits(tmp_path / "s")
    taught = np.mean(kl(student, (logits(one) + logits(other)) / 2))
    own = -np.mean(log_softmax(student, axis=-1)[np.arange(12), np.arange(12) % 3])
    (parts,) = losses(job, batch, params)
    assert set(parts) == {"loss", "teacher_loss"}
    assert parts["teacher_loss"] == pytest.approx(0.7 * taught, rel=1e-4)
    assert parts["loss"] == pytest.approx(0.3 * own, rel=1e-4)


def flat(params, path=()):
    for name, value in params.items():
        yield from flat(value, (*path, name)) if isinstance(value, dict) else [((*path, name), np.asarray(value))]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["classification", "tagging"])
def test_a_teacher_may_have_another_vocabulary(kind, tmp_path):
    """Its words have other pieces, and so other windows; words and texts carry what it says."""
    rest = [piece for piece in PIECES if piece not in ("w1", "w2", "w3")]
    pieces = [*rest, "w", "##1", "##2", "##3"]
    model = dataclasses.replace(MODEL, vocab_size=len(pieces))
    whole, other = (
        teacher_folder(tmp_path / "a", kind),
        teacher_folder(tmp_path / "b", kind, model=model, pieces=pieces),
    )
    job = job_of(tmp_path, kind, teaching_of(tmp_path, other))
    same = job_of(tmp_path, kind, teaching_of(tmp_path, whole))
    name = "soft_logits" if kind == "classification" else "soft_tags"
    pairs = list(zip(job.resolved.inputs["train"], same.resolved.inputs["train"], strict=True))
    assert all(np.shape(a.targets[name]) == np.shape(b.targets[name]) for a, b in pairs)
    predicted = bert_jax.load(other).predict(TEXTS if kind == "classification" else [
        {"words": text.split()} for text in TEXTS
    ])  # fmt: skip
    if kind == "classification":
        expected = [[one["probabilities"][name] for name in CLASSES] for one in predicted]
        found = [softmax(unit.targets["soft_logits"]) for unit, _ in pairs]
        np.testing.assert_allclose(found, expected, atol=1e-5)
        return
    # Longer windows see more; words of texts in one window are those of predict.
    short = [i for i, text in enumerate(TEXTS) if len(text.split()) < 5]
    assert len(short) > 2
    for unit, _ in pairs:
        if unit.record in short:
            best = [TAGS[n] for n in unit.targets["soft_tags"][unit.extra.tokens].argmax(-1)]
            assert best == [token["label"] for token in predicted[unit.record]["tokens"]]


@pytest.mark.slow
def test_texts_without_labels_have_no_loss_but_that_of_the_teacher(tmp_path):
    teacher = teacher_folder(tmp_path / "t", "classification")
    more = [record(i, f"{text} w9 w9") for i, text in enumerate(TEXTS)]
    jobs = [
        job_of(tmp_path, "classification", teaching_of(tmp_path, teacher, unlabelled=found))
        for found in ((), more)
    ]  # fmt: skip
    batches = [job.batches(make_mesh(job.config.mesh, jax.devices()[:1])).pack(0) for job in jobs]
    assert [count for _, count in batches] == [12, 24]
    params = drawn_student(jobs[0])
    alone, both = (losses(job, batch, params)[0] for job, (batch, _) in zip(jobs, batches, strict=True))
    assert both["loss"] == pytest.approx(alone["loss"], rel=1e-6)
    assert both["teacher_loss"] != pytest.approx(alone["teacher_loss"], rel=1e-3)
    # Without any label, classes are those of the teacher.
    job = job_of(
        tmp_path, "classification", teaching_of(tmp_path, teacher, unlabelled=more), "--distillation.weight 1",
        {"dev": KINDS["classification"][0]},
    )  # fmt: skip
    assert job.config.data.labels == CLASSES and len(job.resolved.inputs["train"]) == 12
    assert set(losses(job, batches[0][0], params)[0]) == {"teacher_loss"}


@pytest.mark.slow
def test_devices_and_microbatches_change_nothing(tmp_path):
    teacher = teaching_of(tmp_path, teacher_folder(tmp_path / "t", "joint"))
    values = []
    for devices, parts in ((1, ""), (8, "--mesh.data 2 --mesh.fsdp 2 --mesh.tensor 2")):
        steps = 2 if parts else 1
        options = (
            f"--input.packing false --training.global_batch_size 8 --training.accumulation_steps {steps} {parts}"
        )
        job = job_of(tmp_path, "joint", teacher, options, source=saved_model(tmp_path / str(devices)))
        mesh = make_mesh(job.config.mesh, jax.devices()[:devices])
        objective = TaskObjective(job.task, job.config, job.model.clone(mesh=mesh), job.resolved.supervision)
        batch = {name: jax.device_put(x, batch_sharding(mesh)) for name, x in job.batches(mesh).pack(0)[0].items()}
        compute = jax.jit(lambda p, b, o=objective, n=steps: loss_and_gradients(o, p, b, None, n)[:2])
        values.append(jax.tree.map(np.asarray, compute(drawn_student(job), batch)))
    for part in zip(*values, strict=True):  # the loss, the gradients
        one, other = (np.concatenate([np.ravel(x) for x in jax.tree.leaves(tree)]) for tree in part)
        assert np.linalg.norm(one - other) <= 1e-6 * np.linalg.norm(one)


UNLABELLED = [dataclasses.replace(one, label=None) for one in records(70, 5)]
ALONE = {"dev": SPLITS["dev"]}


@pytest.mark.slow
def test_a_student_without_labels_learns_the_answers_of_its_teacher(source, tmp_path):
    run(source, tmp_path / "teacher", "--training.num_epochs 6")
    teaching = teaching_of(tmp_path / "none", tmp_path / "teacher", unlabelled=UNLABELLED)
    options = "--distillation.weight 1 --training.num_epochs 6"
    run(source, tmp_path / "w", options, splits=ALONE, supervision=teaching)
    assert results(tmp_path / "w")["dev"]["metrics"]["accuracy"]["value"] > 0.9


@pytest.mark.slow
def test_a_run_with_a_teacher_resumes_bitwise_and_with_no_other_teacher(source, tmp_path):
    teacher = teacher_folder(tmp_path / "teacher", "classification", sequence_labels=("0", "1"))
    teaching = teaching_of(tmp_path / "none", teacher, unlabelled=UNLABELLED)
    options = "--distillation.weight 1 --training.num_epochs 1"
    run(source, tmp_path / "whole", options, splits=ALONE, supervision=teaching)
    with pytest.raises(exits.Stop):
        run(source, tmp_path / "cut", options, splits=ALONE, supervision=teaching, stop=StopAt(5))
    again = Teaching(*find_task_teachers([], tmp_path / "cut", ReadOptions()), UNLABELLED)
    assert [one.name for one in again.teachers] == [str(teacher.absolute())]
    run(source, tmp_path / "cut", options, splits=ALONE, supervision=again)
    assert lines(tmp_path / "cut") == lines(tmp_path / "whole")
    with pytest.raises(
        ValueError, match=r"^--teacher .*: the run in .*cut began with .*teacher, another model; give"
    ):
        find_task_teachers(
            [str(teacher_folder(tmp_path / "other", "classification"))], tmp_path / "cut", ReadOptions()
        )


def test_the_last_digits_of_a_teacher_do_not_stop_a_run_but_another_teacher_does(tmp_path):
    resolved = job_of(
        tmp_path, "regression", teaching_of(tmp_path, teacher_folder(tmp_path / "t", "regression"))
    ).resolved  # fmt: skip
    changed = [
        dataclasses.replace(unit, targets={**unit.targets, "soft_logits": unit.targets["soft_logits"] * (1 + 1e-6)})
        for unit in resolved.inputs["train"]
    ]
    near = dataclasses.replace(resolved, inputs={"train": changed})
    another = dataclasses.replace(resolved.supervision, record='[{"digest": "another"}]')
    other = dataclasses.replace(resolved, supervision=another)
    assert near.order_digest == resolved.order_digest != other.order_digest


BAD = {
    "regression": (
        "classification", "regression", {}, "",
        r"^--teacher .*: the model lacks an output layer for classes \(heads: pooler, sequence\); give a model for",
    ),
    "labels": (
        "classification", "classification", {"sequence_labels": ("a", "b", "c")}, "",
        r"^--teacher .*/t: the model has other names than data.labels \(teacher: a, b, c; data.labels: 0, 1, 2\)",
    ),
    "layers": (
        "classification", "classification", {"model": dataclasses.replace(MODEL, num_layers=3)},
        "--distillation.layers_weight 1", r"has 3 layers of width 32; .* allowed are a multiple of 2 layers and",
    ),
    "tokens": (
        "qa", "qa", {"model": dataclasses.replace(MODEL, max_position_embeddings=12)}, "",
        r"^--teacher: the model splits questions and passages into other tokens or windows; task.kind qa compares",
    ),
}  # fmt: skip


@pytest.mark.cases(1)
@pytest.mark.parametrize("case", BAD)
def test_a_model_that_cannot_teach_is_told(case, two_layers, tmp_path):
    kind, taught, changes, options, message = BAD[case]
    teacher = teacher_folder(tmp_path / "t", taught, **changes)
    with pytest.raises(ValueError, match=message):
        job_of(tmp_path, kind, teaching_of(tmp_path, teacher), options, source=two_layers)


@pytest.mark.slow
def test_options_without_their_meaning_are_told(two_layers, tmp_path):
    kind, texts = "classification", KINDS["classification"][0]
    teacher = teacher_folder(tmp_path / "t", kind)
    both = teaching_of(tmp_path, teacher, teacher)
    more = teaching_of(tmp_path, teacher, unlabelled=texts)
    for teaching, options, splits, message in (
        (Teaching(unlabelled=texts), "", None, "^data.unlabelled: no teacher labels these texts; add --teacher"),
        (
            Teaching(),
            "--distillation.weight 0.3",
            None,
            "^distillation: these options need --teacher MODEL; add it",
        ),
        (
            more,
            "",
            {"dev": texts},
            "^distillation.weight: 0.5 is not allowed without data.train",
        ),
        (more, "--input.balanced true", None, "^input.balanced: true is not allowed with data.unlabelled"),
        (both, "--distillation.layers_weight 1", None, "^distillation.layers_weight: not allowed with 2 teachers"),
    ):
        with pytest.raises(ValueError, match=message):
            job_of(tmp_path, kind, teaching, options, splits, two_layers)
    with pytest.raises(ValueError, match=r"^--teacher: 2 models are not allowed in pretraining; give one$"):
        find_teacher(["a", "b"], tmp_path, ReadOptions())


def test_labels_of_unlabelled_files_are_not_read(tmp_path):
    (tmp_path / "more.csv").write_text("text,label\ngood w1,strange\nbad w2,7\n")
    data = TaughtDataConfig(dir=str(tmp_path), unlabelled=("more.csv",))

    def read_unlabelled(data):
        return without_labels(records_of(TaughtConfig(data=data), "unlabelled"))

    found = read_unlabelled(data)
    assert [(one.text, one.label) for one in found] == [("good w1", None), ("bad w2", None)]
    assert read_splits(data, "classification") == {"train": []}
    own = dataclasses.replace(data, columns=("text=sentence", "label=label", "unlabelled:text=text"))
    assert read_unlabelled(own) == found
    wrong = dataclasses.replace(data, columns=("text=sentence", "label=label"))
    with pytest.raises(
        ValueError, match=r"existing columns: .*; if unlabelled files have other columns, set unlabe"
    ):
        read_unlabelled(wrong)
