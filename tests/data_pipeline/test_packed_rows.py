"""Packed rows: the packing, builds, and models on them against unpacked rows of the same sequences."""

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from builders import StopAt
from input_shards import assert_equal, stream
from support import masked_lm, pretrain_on, random_params, relative_difference, tiny_config, untimed
from text_corpora import tree, write_corpus, write_vocab

from bert_jax.config import ExecutionConfig
from bert_jax.config.pretrain import DataConfig
from bert_jax.model import BertForPretraining, to_canonical
from bert_jax.model.dropout import TOKEN_FEATURES, TokenKey
from bert_jax.objectives.inputs import Inputs
from bert_jax.objectives.registry import objective_class
from bert_jax.parallel import make_mesh
from bert_jax.process.exits import Stop
from bert_jax.tokenization import load_tokenizer
from bert_jax.training.logging.metrics_file import read_metrics
from bert_jax.training.pretrain import PretrainJob
from bert_jax.training.step import loss_and_gradients
from data_pipeline.build import shard_jobs
from data_pipeline.build.ensure import ensure_data
from data_pipeline.build.inspection import inspect
from data_pipeline.read.pretrain_input import ShardSource, eval_batches
from data_pipeline.shards import shard_files as shards
from data_pipeline.shards.mixture_parts import Part
from data_pipeline.shards.tfexample import decode_example, encode_examples

# ------------------------------------------------------------------ builds

CHANGES: dict[str, Any] = {
    "seq_length": 128, "max_predictions": 20, "dupe_factor": 2, "num_shards": 3, "eval_fraction": 0.2, "workers": 1,
    "short_sequence_fraction": 0.5,
}  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packing")
    write_corpus(folder / "corpus.txt", documents=30, sentences=6)
    write_vocab(folder / "vocab.txt")
    return folder


def data_of(place: Path, name: str, **changes: Any) -> DataConfig:
    corpus = {"corpus": (str(place / "corpus.txt"),), "vocab": str(place / "vocab.txt")}
    return DataConfig(**corpus, **CHANGES | {"shards": str(place / name)} | changes)


def build(place: Path, name: str, **changes: Any) -> DataConfig:
    """Build shards, with the lines of the build in build.txt."""
    data = data_of(place, name, **changes)
    lines: list[str] = []
    ensure_data(data, vocab_size=1000, report=lines.append)
    (Path(data.shards) / "build.txt").write_text("\n".join(lines))
    return data


def batch_of(data: DataConfig, split: str) -> dict[str, np.ndarray]:
    """All rows of a split as one batch."""
    folder = Path(data.shards) / split
    count = shards.read_index(folder).records
    tokenizer = load_tokenizer(Path(data.vocab))
    (batch,) = eval_batches(data, folder=folder, batch_size=count, tokenizer=tokenizer)
    return batch


def sequences_of(batch: dict[str, np.ndarray]) -> dict[int, dict[str, list]]:
    """The contents of every sequence of a batch, by its key, with positions counted within the sequence."""
    found: dict[int, dict[str, list]] = {}
    for row, slot in np.argwhere(batch["nsp_weights"] > 0):
        own = batch["sequence_ids"][row] == slot + 1
        start = int(batch["cls_positions"][row, slot])
        assert np.flatnonzero(own).tolist() == list(range(start, start + own.sum()))
        masks = (batch["mlm_weights"][row] > 0) & own[batch["mlm_positions"][row]]
        key = int(batch["sequence_keys"][row, slot])
        assert key not in found
        found[key] = {
            "positions": batch["mlm_positions"][row][masks] - start,
            "labels": batch["mlm_labels"][row][masks],
            "label": [batch["nsp_labels"][row, slot]],
        } | {name: batch[name][row][own] for name in ("input_ids", "token_type_ids", "position_ids")}
        found[key] = {name: list(values) for name, values in found[key].items()}
    return found


@pytest.fixture(scope="module")
def both(place: Path) -> tuple[DataConfig, DataConfig]:
    """The same instances, unpacked and packed."""
    return build(place, "unpacked"), build(place, "packed", packing="best_fit")


@pytest.mark.cases(1)
@pytest.mark.parametrize("split", ["train", "eval"])
def test_packed_shards_hold_the_sequences_of_unpacked_ones(both: tuple[DataConfig, DataConfig], split: str) -> None:
    unpacked, packed = (batch_of(data, split) for data in both)
    assert sequences_of(packed) == sequences_of(unpacked)
    assert packed["sequence_keys"].max() >= 2**31, "keys fill 32 bits"
    for data, batch in zip(both, (unpacked, packed), strict=True):
        assert_equal([batch_of(dataclasses.replace(data, reader="numpy"), split)], [batch])
    assert len(packed["input_ids"]) < 0.8 * len(unpacked["input_ids"])
    assert (packed["position_ids"][packed["sequence_ids"] == 0] == 0).all()
    assert (packed["mlm_positions"][packed["mlm_weights"] == 0] == 0).all()
    manifest = shards.read_manifest(Path(both[1].shards) / split)
    assert manifest is not None
    counts, packing = manifest["counts"], manifest["packing"]
    assert counts["rows"] == len(packed["input_ids"])
    assert counts["instances"] == packed["nsp_weights"].sum() == len(unpacked["input_ids"])
    assert packing["tokens"] == (packed["sequence_ids"] > 0).sum()
    assert packed["sequence_keys"].shape[1] == packing["sequences_per_row"]
    assert packed["mlm_positions"].shape[1] == packing["predictions_per_row"]
    report = (Path(both[1].shards) / "build.txt").read_text()
    mean, padding = counts["instances"] / counts["rows"], 1 - packing["tokens"] / packed["sequence_ids"].size
    assert f"{split}: {counts['instances']} instances in {counts['rows']} rows of at most " in report
    assert f" (mean {mean:.2f}, padding {padding:.1%}), in " in report and "tokenized" not in report


def test_the_report_counts_instances(
    both: tuple[DataConfig, DataConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    reports = []
    for data in both:
        inspect(
            Path(data.shards) / "train", examples=0, most_records=10**6, vocab=Path(data.vocab), lower_case=True
        )
        lines = [line.split("  ", 1) for line in capsys.readouterr().out.splitlines() if "  " in line]
        reports.append({name: value.strip() for name, value in lines})
    unpacked, packed = reports
    for name in ("ids out of range", "random next share", "predictions", "masking shares", "words masked whole"):
        assert packed[name] == unpacked[name], name
    assert packed["tokens per instance"].split(",")[0] == unpacked["tokens per record"].split(",")[0]
    share = float(packed["tokens per instance"].rpartition(" ")[2])
    manifest = shards.read_manifest(Path(both[1].shards) / "train")
    assert manifest is not None
    assert abs(share - manifest["packing"]["tokens"] / manifest["counts"]["rows"] / 128) < 1e-4


@pytest.mark.slow
def test_bytes_depend_on_nothing_but_text_and_settings(place: Path, both: Any, monkeypatch: Any) -> None:
    expected = tree(Path(both[1].shards))
    monkeypatch.setattr(shard_jobs, "_PACKED_ROWS", 7)
    monkeypatch.setattr(shard_jobs, "PART_TOKENS", 400)
    again = build(place, "again", packing="best_fit", workers=2)
    found = tree(Path(again.shards))
    assert found.keys() == expected.keys()
    for name in expected:
        if name.endswith((".tfrecord", "records.index", "manifest.json")):
            assert found[name] == expected[name], name


def test_unmasked_sequences_without_pairs(place: Path) -> None:
    options = {"masking": "dynamic", "next_sentence": "none", "max_predictions": 3}
    data = build(place, "unmasked", **options, packing="best_fit", sequences_per_row=4)
    batch = batch_of(data, "train")
    assert batch["sequence_keys"].shape[1] == 4 and not batch["nsp_weights"].any()
    assert batch["mlm_positions"].shape[1] == data.most_predictions(4) == 12
    for row in range(len(batch["input_ids"])):
        used = batch["mlm_weights"][row] > 0
        positions = batch["mlm_positions"][row][used]
        assert (np.diff(positions) > 0).all() and not batch["mlm_positions"][row][~used].any()
        for slot in range(batch["sequence_ids"][row].max()):
            own = batch["sequence_ids"][row] == slot + 1
            count = min(3, max(1, int(np.rint(own.sum() * 0.15))))
            assert own[positions].sum() == count


def test_unmasked_rows_keep_the_starts_of_words(place: Path) -> None:
    starts = []
    for name, packing in (("plain_starts", "none"), ("packed_starts", "best_fit")):
        data = build(place, name, masking="dynamic", packing=packing)
        found: dict[int, list[int]] = {}
        for entry in shards.read_index(folder := Path(data.shards) / "train").entries:
            for row in map(decode_example, shards.read_records(folder / entry.name)):
                ids = row["sequence_ids"] if packing == "best_fit" else row["input_mask"]
                for slot in range(ids.max()):
                    found[int(row["sequence_keys"][slot])] = row["word_starts"][ids == slot + 1].tolist()
        starts.append(found)
    assert starts[0] == starts[1]


def test_shards_and_config_must_agree(place: Path, both: Any, tmp_path: Path) -> None:
    unpacked, packed = both
    tokenizer = load_tokenizer(Path(packed.vocab))
    for data, packing, message in (
        (packed, "none", r"data\.packing: none, but the rows .*packed/train are packed; use best_fit"),
        (unpacked, "best_fit", r"data\.packing: best_fit, but the rows .*unpacked/train are not packed; use none"),
    ):
        other = dataclasses.replace(data, packing=packing)
        with pytest.raises(ValueError, match=message):
            next(eval_batches(other, folder=Path(data.shards) / "train", batch_size=4, tokenizer=tokenizer))
    with pytest.raises(ValueError, match=r"data\.packing: shards none, config best_fit; set"):
        build(place, "unpacked", packing="best_fit")
    with pytest.raises(ValueError, match=r"packed/train: .*data\.packing: shards best_fit, config none; set"):
        build(place, "packed")
    narrow = build(place, "narrow", packing="best_fit", sequences_per_row=5)
    parts = [Part(name, 1, place / name / "train") for name in ("packed", "narrow")]
    with pytest.raises(ValueError, match=r"mixture: narrow: the features .*with the same data\.sequences_per_row"):
        stream(parts, packed, tokenizer=tokenizer)  # type: ignore[arg-type]
    (Path(narrow.shards) / "train" / "manifest.json").unlink()
    with pytest.raises(
        ValueError, match=r"narrow/train: the manifest \(manifest\.json\) of the packed shards is mis"
    ):
        stream(Path(narrow.shards) / "train", narrow, tokenizer=tokenizer)


@pytest.mark.parametrize("next_sentence", ["nsp", "none"])
def test_foreign_packed_rows_need_sequence_keys(
    place: Path, both: Any, tmp_path: Path, next_sentence: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    source = Path(both[1].shards) / "eval"
    rows = [
        decode_example(record)
        for entry in shards.read_index(source).entries
        for record in shards.read_records(source / entry.name)
    ]
    features = {name: np.stack([row[name] for row in rows]) for name in rows[0]}

    def write(name: str, lacking: str) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        records = encode_examples({name: values for name, values in features.items() if name != lacking})
        shards.write_index(folder, [shards.write_records(folder / "a.tfrecord", records)])
        return folder

    data = dataclasses.replace(both[1], next_sentence=next_sentence)
    with pytest.raises(ValueError, match="the packed rows lack the feature sequence_keys"):
        next(eval_batches(data, folder=write("keys", "sequence_keys"), batch_size=4))
    inspect(
        write("labels", "next_sentence_labels"), examples=1, most_records=9, vocab=Path(data.vocab), lower_case=True
    )
    assert "packed instances" in capsys.readouterr().out
    features["sequence_ids"] = features["sequence_ids"] * 99
    with pytest.raises(ValueError, match=r"sequence_ids from 0 to \d+ instead of 0 to \d+; build the shards again"):
        next(eval_batches(data, folder=write("ids", ""), batch_size=4))


def test_options_that_do_not_fit_are_refused(place: Path, both: Any) -> None:
    with pytest.raises(ValueError, match=r"data\.sequences_per_row: 43 is not allowed; allowed: 0 to 42"):
        data_of(place, "any", packing="best_fit", sequences_per_row=43)
    with pytest.raises(
        ValueError, match=r"data\.sequences_per_row: 2 is not allowed; allowed: 0 with data\.packing"
    ):
        data_of(place, "any", sequences_per_row=2)
    tokenizer = load_tokenizer(Path(both[1].vocab))

    def batches(size: int, lanes: int = 1) -> Any:
        run = tiny_config(f"--training.global_batch_size {size} --model.vocab_size 500")
        data = dataclasses.replace(both[1], lanes=lanes)
        source = ShardSource(dataclasses.replace(run, data=data, model=MODEL.model), tokenizer)
        return source.train(list(range(source.row_shape.rows(size))))

    with pytest.raises(ValueError, match=r"data\.lanes: 64 is not allowed; use 0, or a .* \d+ packed rows"):
        batches(16, lanes=64)
    state = batches(16).state()
    with pytest.raises(ValueError, match=r"training\.global_batch_size \(in packed rows\) was \d+, now \d+"):
        batches(32).restore(state)


def test_a_batch_of_rows_has_so_many_rows(both: Any) -> None:
    run = tiny_config("--training.global_batch_size 6 --training.batch_ramp 1 3 --model.vocab_size 500")
    training = dataclasses.replace(run.training, batch_unit="rows")
    data = dataclasses.replace(both[1], lanes=3)
    run = dataclasses.replace(run, data=data, model=MODEL.model, training=training)
    source = ShardSource(run, load_tokenizer(Path(data.vocab)))
    batches = source.train(list(range(6)))
    sizes = [(len(batch["input_ids"]), info.sequences) for batch, info in itertools.islice(batches, 3)]
    assert [rows for rows, _ in sizes] == [3, 6, 6]
    assert sum(sequences for _, sequences in sizes) == round(15 * source.row_shape.sequences) > 15
    with pytest.raises(ValueError, match=r"data\.lanes: 4 is not allowed"):
        dataclasses.replace(run, data=dataclasses.replace(data, lanes=4))


# ------------------------------------------------------------------ models

MODEL = tiny_config(
    "--model.vocab_size 500 --model.num_layers 2 --data.seq_length 256 --model.max_position_embeddings 256"
)


@pytest.fixture(scope="module")
def batches(both: tuple[DataConfig, DataConfig]) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Held-out sequences, unpacked and packed, with blank rows up to a multiple of 16."""

    def padded(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        more = -len(batch["input_ids"]) % 16
        return {name: np.pad(values, ((0, more), (0, 0))) for name, values in batch.items()}

    unpacked, packed = (padded(batch_of(data, "eval")) for data in both)
    return unpacked, packed


def make_model(**execution: Any) -> Any:
    return BertForPretraining(MODEL.model, ExecutionConfig(prng="hash", **execution), True, None)


def loss_and_grads(batch: dict[str, np.ndarray], accumulation: int = 1, **execution: Any) -> tuple[float, Any]:
    model = make_model(**execution)
    run = jax.jit(lambda p, b: loss_and_gradients(masked_lm(model), p, b, jax.random.key(5), accumulation))
    loss, grads, *_ = run(random_params(model, 3), batch)
    return float(loss), to_canonical(jax.device_get(grads), MODEL.model.vocab_size)


@pytest.mark.slow
def test_loss_and_gradients_are_those_of_unpacked_rows(batches: Any) -> None:
    unpacked, packed = batches
    expected = loss_and_grads(unpacked)
    loss, grads = loss_and_grads(packed, 4, scan_layers=True, remat="full")
    assert abs(loss - expected[0]) <= 1e-6 * abs(expected[0])
    assert relative_difference(grads, expected[1]) <= 2e-6


@pytest.mark.slow
def test_vectors_and_pair_logits_are_those_of_unpacked_rows(batches: Any) -> None:
    model = make_model()
    params = random_params(model, 3)
    found = []
    for batch in batches:
        key = TokenKey.of(jax.random.key(5), *(jnp.asarray(batch[name]) for name in TOKEN_FEATURES))
        output = jax.jit(model.apply)({"params": params}, batch, key)
        is_there = batch["nsp_weights"] > 0
        order = np.argsort(batch["sequence_keys"][is_there])
        found.append([np.asarray(x)[is_there][order] for x in (output.pooled_output, output.nsp_logits)])
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-6)


@pytest.mark.slow
def test_no_gradient_crosses_from_one_sequence_to_another(batches: Any) -> None:
    model, packed = make_model(), {name: jnp.asarray(values) for name, values in batches[1].items()}
    params = random_params(model, 3)
    key = TokenKey.of(jax.random.key(5), *(packed[name] for name in TOKEN_FEATURES))
    shape, rng = (*packed["input_ids"].shape, MODEL.model.hidden_size), np.random.default_rng(1)
    x = jnp.asarray(rng.normal(size=shape), jnp.float32)

    def vectors(x: jax.Array) -> jax.Array:
        tokens = {name: packed[name] for name in ("sequence_ids", "position_ids")}
        encode = lambda model: model.encoder(x, tokens, key)[0]  # noqa: E731
        return model.apply({"params": params}, method=encode)

    backwards = jax.jit(lambda x, cotangent: jax.vjp(vectors, x)[1](cotangent)[0])
    for slot in (1, 2):
        own = np.asarray(packed["sequence_ids"] == slot)[..., None]
        cotangent = np.where(own, rng.normal(size=shape), 0).astype(np.float32)
        gradient = backwards(x, cotangent)
        used = np.asarray(packed["sequence_ids"] > 0)[..., None]
        assert not np.any(np.where(own | ~used, 0, gradient))
        assert np.any(np.where(own, gradient, 0))


# ------------------------------------------------------------------ runs


@pytest.mark.slow
def test_a_packed_run_evaluates_reports_and_resumes_bitwise(both: Any, tmp_path: Path) -> None:
    run = tiny_config(
        "--model.vocab_size 500 --model.max_position_embeddings 128 --training.global_batch_size 16",
        "--training.num_steps 6 --training.eval_interval 6 --training.checkpoint_interval 2",
        "--training.batch_ramp 2 8 --training.log_interval 1",
    )
    run = dataclasses.replace(run, data=both[1])
    vocabulary = Path(both[1].vocab)
    source = ShardSource(run, load_tokenizer(vocabulary))
    rows = source.row_shape.rows(16)
    assert 4 <= rows < 12
    for workdir, stop in ((tmp_path / "whole", None), (tmp_path / "cut", StopAt(3)), (tmp_path / "cut", None)):
        options = {"source": ShardSource(run, load_tokenizer(vocabulary)), "devices": jax.devices()[:1]}
        if stop is None:
            pretrain_on(run, workdir, vocabulary, **options)
        else:
            with pytest.raises(Stop):
                pretrain_on(run, workdir, vocabulary, **options, stop=stop)
    tokenizer = load_tokenizer(vocabulary)
    job = PretrainJob(
        run, objective_class(run.objective), tokenizer, vocabulary, ShardSource(run, tokenizer), Inputs()
    )
    mesh = make_mesh(run.mesh, jax.devices()[:1])
    job.programs(mesh)
    compiled = [job.batch_shapes(mesh, step)["input_ids"].shape[0] for step in (0, 1, 2)]
    assert compiled == [source.row_shape.rows(8)] * 2 + [rows], "compiled for the rows of the batches"
    lines = read_metrics(tmp_path / "whole")
    assert untimed(read_metrics(tmp_path / "cut")) == untimed(lines)
    seen = [line["examples_seen"] for line in lines if "examples_seen" in line]
    mean = source.row_shape.sequences
    assert seen[0] == round(mean * source.row_shape.rows(8))
    assert seen[-1] == round(mean * (2 * source.row_shape.rows(8) + 4 * rows))
    assert (tmp_path / "whole" / "report.html").exists()
