"""Damage to checkpoints: every file, three ways; fall back, never silently, never to a fresh start."""

import asyncio
import errno
import gc
import json
import shutil
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from support import objective_of, tiny_config

from bert_jax.config import ExecutionConfig, MeshConfig
from bert_jax.model import to_canonical
from bert_jax.model.canonical import clear_padding
from bert_jax.optim import make_optimizer
from bert_jax.parallel import make_mesh
from bert_jax.training.checkpoint.digest import check_files, json_digest, tree_digest, write_checksums
from bert_jax.training.checkpoint.folder import checkpoint_folder, saved_steps
from bert_jax.training.checkpoint.restore import NoCheckpoint, restore_newest
from bert_jax.training.checkpoint.writer import CheckpointWriter
from bert_jax.training.state import TrainState, abstract_state

CONFIG = tiny_config("--model.num_layers 2 --optimizer.ema_decay 0.9 --training.num_steps 6")


def one_device():
    return make_mesh(MeshConfig(), jax.devices()[:1])


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A workdir with checkpoints of steps 2, 4 and 6, whose values are drawn."""
    workdir, rng = tmp_path_factory.mktemp("run") / "w", np.random.default_rng(0)
    workdir.mkdir()
    model, mesh = objective_of(CONFIG).model, one_device()
    abstract = abstract_state(CONFIG, model, make_optimizer(CONFIG.optimizer), mesh)
    writer = CheckpointWriter(workdir, CONFIG)
    for step in (2, 4, 6):
        state = jax.tree.map(
            lambda like: jax.device_put(rng.normal(0, 9, like.shape).astype(like.dtype), like.sharding), abstract
        )
        writer.save(clear_padding(state.replace(step=jax.device_put(np.int32(step))), 211), {"data": {}})
    writer.close()
    assert saved_steps(workdir) == [2, 4, 6]
    return workdir


def copy(run, tmp_path):
    shutil.copytree(run, tmp_path / "w")
    return tmp_path / "w"


def restore(workdir, config=CONFIG, mesh=None, **options):
    reports = []
    options = {"read_only": False, "may_change": set(), "report": reports.append} | options
    return restore_newest(workdir, config, mesh or one_device(), objective_of(config).model, **options), reports


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x10
    path.write_bytes(content)


def truncate(path):
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


def files_of(workdir, step):
    return sorted(path for path in (checkpoint_folder(workdir) / str(step)).rglob("*") if path.is_file())


DAMAGES = {"flip": flip, "truncate": truncate, "remove": lambda path: path.unlink()}


@pytest.mark.slow
def test_every_file_damaged_in_every_way_is_noticed(run, tmp_path):
    workdir = copy(run, tmp_path)
    folder = checkpoint_folder(workdir) / "6"
    assert len(files_of(workdir, 6)) > 10
    for file in files_of(workdir, 6):
        content = file.read_bytes()
        for name, damage in DAMAGES.items():
            damage(file)
            # A kill between the commit and the listing leaves none: the digest decides.
            unlisted = file.name == "checksums.json" and name == "remove"
            assert (check_files(folder) is None) == unlisted, (file, name)
            file.write_bytes(content)
    assert check_files(folder) is None


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_damaged_file_makes_the_run_continue_from_the_checkpoint_before(run, tmp_path, every):
    sound = restore(run)[0]
    assert sound.step == 6
    names = [path.relative_to(checkpoint_folder(run)) for path in files_of(run, 6)]
    if not every:
        largest = max(names, key=lambda name: (checkpoint_folder(run) / name).stat().st_size)
        names = [largest, *(name for name in names if name.name == "checksums.json")]
    outcomes = []
    for name in names:
        for kind, damage in DAMAGES.items():
            workdir = tmp_path / "w"
            shutil.rmtree(workdir, ignore_errors=True)
            shutil.copytree(run, workdir)
            damage(checkpoint_folder(workdir) / name)
            restored, reports = restore(workdir)
            if name.name == "checksums.json" and kind == "remove":
                jax.tree.map(np.testing.assert_array_equal, restored.state, sound.state)
                assert restored.step == 6
                continue
            assert restored.step == 4, (name, kind)
            assert len(reports) == 1 and "checkpoint 6 is damaged" in reports[0]
            assert (workdir / "damaged_checkpoints" / "6").is_dir()
            assert saved_steps(workdir) == [2, 4]
            outcomes.append(name)
    assert len(outcomes) == 3 * len(names) - 1


@pytest.mark.slow
@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_payload_damage_is_noticed_without_the_checksum_file(run, tmp_path, every):
    """A killed run may lack the file list: the digest of the values must still find what it changes."""
    sound = restore(run, read_only=True)[0]
    noticed = 0
    payloads = sorted((p for p in files_of(run, 6) if "/d/" in p.as_posix()), key=lambda p: p.stat().st_size)
    for number, payload in enumerate(payloads if every else payloads[-1:]):
        workdir = tmp_path / str(number)
        shutil.copytree(run, workdir)
        (checkpoint_folder(workdir) / "6" / "checksums.json").unlink()
        flip(checkpoint_folder(workdir) / payload.relative_to(checkpoint_folder(run)))
        restored, reports = restore(workdir)
        if restored.step == 6:  # bytes that hold no value, such as the index of one process
            jax.tree.map(np.testing.assert_array_equal, restored.state, sound.state)
        else:
            assert restored.step == 4 and len(reports) == 1
            noticed += 1
    assert noticed >= 1


@pytest.mark.slow
def test_damage_in_padded_rows_is_cleared(run, tmp_path):
    """The digest is of canonical values, so it cannot see it."""
    sound = restore(run, read_only=True)[0]
    rows = CONFIG.model.vocab_size

    def spoil(tree):
        table = tree["embeddings"]["word_embeddings"]["embedding"]
        assert table.shape[0] > rows and not table[rows:].any()
        words = {"embedding": table.at[rows:].set(1.0)}
        return {**tree, "embeddings": {**tree["embeddings"], "word_embeddings": words}}

    (tmp_path / "w").mkdir()
    writer = CheckpointWriter(tmp_path / "w", CONFIG)
    writer.save(sound.state.replace(params=spoil(sound.state.params), ema=spoil(sound.state.ema)), {"data": {}})
    writer.close()
    restored, reports = restore(tmp_path / "w", read_only=True)
    assert not reports
    jax.tree.map(np.testing.assert_array_equal, restored.state, sound.state)


def test_two_damaged_the_third_is_used_all_damaged_is_an_error(run, tmp_path):
    workdir = copy(run, tmp_path)
    for step in (6, 4):
        flip(max(files_of(workdir, step), key=lambda p: p.stat().st_size))
    restored, reports = restore(workdir)
    assert restored.step == 2 and len(reports) == 2
    flip(max(files_of(workdir, 2), key=lambda p: p.stat().st_size))
    with pytest.raises(NoCheckpoint, match="all checkpoints are damaged"):
        restore(workdir)
    # The damaged ones lie aside now: that must not look like a run that never began.
    with pytest.raises(NoCheckpoint, match="all checkpoints are damaged"):
        restore(workdir)


def test_a_second_bad_checkpoint_of_the_same_step_keeps_the_first(run, tmp_path):
    workdir = copy(run, tmp_path)
    (workdir / "damaged_checkpoints" / "6").mkdir(parents=True)
    flip(files_of(workdir, 6)[0])
    assert restore(workdir)[0].step == 4
    assert (workdir / "damaged_checkpoints" / "6.2").is_dir()


def test_read_only_moves_nothing(run, tmp_path):
    workdir = copy(run, tmp_path)
    flip(files_of(workdir, 6)[0])
    assert restore(workdir, read_only=True)[0].step == 4
    assert saved_steps(workdir) == [2, 4, 6] and not (workdir / "damaged_checkpoints").exists()


LAYOUTS = {
    "unrolled": {},
    "scanned": {"scan_layers": True},
    "fused, unpadded": {"fused_qkv": True, "vocab_multiple": 1},
    "remat, scanned, padded": {"remat": "full", "scan_layers": True, "vocab_multiple": 64},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "saved", [name if name == "fused, unpadded" else pytest.param(name, marks=pytest.mark.slow) for name in LAYOUTS]
)
def test_each_layout_restores_into_each(saved, tmp_path, run):
    import dataclasses

    def with_layout(name):
        return dataclasses.replace(CONFIG, execution=ExecutionConfig(**LAYOUTS[name]))

    source = restore(run, with_layout(saved), read_only=True)[0]
    (tmp_path / "w").mkdir()
    writer = CheckpointWriter(tmp_path / "w", with_layout(saved))
    writer.save(source.state, {"data": {}})
    writer.close()
    reference = restore(run, read_only=True)[0]
    expected = to_canonical(reference.state, CONFIG.model.vocab_size)
    for name in LAYOUTS:
        restored = restore(tmp_path / "w", with_layout(name), read_only=True)[0]
        found = to_canonical(restored.state, CONFIG.model.vocab_size)
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            np.testing.assert_array_equal(found[key], value, err_msg=key)
        assert tree_digest(restored.state, CONFIG.model.vocab_size) == reference.meta["digest"]


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [pytest.param((8, 1, 1), marks=pytest.mark.slow), (1, 2, 2)])
def test_each_mesh_gives_the_same_digest(run, sizes):
    sizes, count = dict(zip(("data", "fsdp", "tensor"), sizes, strict=True)), int(np.prod(sizes))
    mesh = make_mesh(MeshConfig(**sizes), jax.devices()[:count])
    restored = restore(run, mesh=mesh, read_only=True)[0]
    assert tree_digest(restored.state, CONFIG.model.vocab_size) == restored.meta["digest"]


def test_digest_sees_one_bit_one_swap_and_one_name():
    import jax.numpy as jnp

    tree = {"a": jnp.arange(6, dtype=jnp.float32).reshape(2, 3), "b": jnp.ones(4, jnp.bfloat16)}
    base = tree_digest(tree, 10)
    bits = np.asarray(tree["a"]).copy()
    bits.view(np.uint32)[1, 2] ^= 1
    swapped = np.asarray(tree["a"])[:, ::-1].copy()
    assert base == tree_digest(dict(tree), 10)
    assert base != tree_digest(dict(tree, a=jnp.asarray(bits)), 10)
    assert base != tree_digest(dict(tree, a=jnp.asarray(swapped)), 10)
    assert base != tree_digest({"a": tree["a"], "c": tree["b"]}, 10)
    assert base != tree_digest(dict(tree, b=tree["b"].at[3].set(1.0078125)), 10)


def test_moving_average_can_be_added_and_dropped(run):
    without = tiny_config("--model.num_layers 2 --training.num_steps 6")
    assert restore(run, without, read_only=True)[0].state.ema is None
    assert restore(run, read_only=True)[0].state.ema is not None


def test_another_optimizer_is_refused(run):
    other = tiny_config("--model.num_layers 2 --optimizer.name bert_adam --optimizer.ema_decay 0.9")
    with pytest.raises(ValueError, match="does not fit the configured optimizer"):
        restore(run, other, read_only=True)


def test_checksums_list_every_file(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a").write_bytes(b"123")
    write_checksums(tmp_path)
    assert check_files(tmp_path) is None
    (tmp_path / "sub" / "a").write_bytes(b"124")
    assert check_files(tmp_path) == "sub/a differs from its checksum"


@pytest.mark.parametrize(
    "error", [RuntimeError("RESOURCE_EXHAUSTED: out of memory"), OSError(24, "too many files")]
)
def test_a_shortage_of_the_machine_is_not_taken_for_damage(run, tmp_path, monkeypatch, error):
    workdir = copy(run, tmp_path)

    def fail(*arguments):
        raise error

    monkeypatch.setattr("bert_jax.training.checkpoint.restore.tree_digest", fail)
    with pytest.raises(type(error)):
        restore(workdir)
    assert saved_steps(workdir) == [2, 4, 6]


def test_a_checkpoint_of_other_options_is_not_taken_for_damage(run, tmp_path, monkeypatch):
    workdir = copy(run, tmp_path)

    def refuse(*arguments):
        raise ValueError("stored config: model.old_name: unknown option")

    monkeypatch.setattr("bert_jax.training.checkpoint.restore.from_dict", refuse)
    with pytest.raises(ValueError, match="with different options"):
        restore(workdir)
    assert saved_steps(workdir) == [2, 4, 6]


def full_disk():
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_failed_save_is_raised_by_the_next_poll(run, tmp_path):
    """It leaves no folder that the next start would take for a damaged checkpoint."""
    (tmp_path / "w").mkdir()
    writer = CheckpointWriter(tmp_path / "w", CONFIG, before_commit=full_disk)
    writer.save(restore(run, read_only=True)[0].state, {"data": {}})
    while writer.is_writing():
        time.sleep(0.01)
    with pytest.raises(OSError, match="No space left on device"):
        writer.poll()
    assert saved_steps(tmp_path / "w") == []


def test_what_is_saved_is_what_was_given(run, tmp_path):
    """The JSON part is written in the background, after the run has gone on."""
    from bert_jax.training.checkpoint.restore import read_meta

    (tmp_path / "w").mkdir()
    writer = CheckpointWriter(tmp_path / "w", CONFIG)
    meter = {"sums": {}}
    writer.save(restore(run, read_only=True)[0].state, {"meter": meter})
    meter["sums"]["loss"] = [1.0, 1.0]
    writer.close()
    assert read_meta(checkpoint_folder(tmp_path / "w") / "6")["meter"] == {"sums": {}}


def test_checksums_make_no_checkpoint(tmp_path):
    with pytest.raises(FileNotFoundError, match="checkpoints/10"):
        write_checksums(tmp_path / "checkpoints" / "10")
    assert not any(tmp_path.iterdir())


@pytest.mark.slow
def test_only_writes_of_a_save_are_kept_out_of_the_log_of_asyncio(tmp_path, caplog):
    """On a full disk many writes of one save fail, and nobody asks for the error of each."""
    (tmp_path / "w").mkdir()
    CheckpointWriter(tmp_path / "w", CONFIG).close()
    loop = asyncio.new_event_loop()
    for path in ("10.orbax-checkpoint-tmp/state: No space left on device", "another library"):
        loop.create_future().set_exception(ValueError(path))
    gc.collect()
    loop.close()
    records = [record for record in caplog.records if record.name == "asyncio"]
    assert ["another library" in record.getMessage() for record in records] == [True]


def bytes_read():
    """Bytes that this process has read so far."""
    return int(Path("/proc/self/io").read_text().split("rchar: ")[1].split()[0])


@pytest.mark.slow
def test_parameters_are_read_alone(tmp_path):
    """At most 1.1 times their bytes, though the state holds four times as much."""
    from bert_jax.training.checkpoint.parameters import read_parameters

    config = tiny_config("--model.vocab_size 40000 --model.hidden_size 64 --optimizer.ema_decay 0.9")
    table = np.random.default_rng(0).standard_normal((4, 40_000, 64), np.float32)
    params, first, second, ema = ({"word_embeddings": {"embedding": jax.numpy.asarray(part)}} for part in table)
    state = TrainState(jax.numpy.int32(6), params, {"mu": first, "nu": second}, ema)
    (tmp_path / "w").mkdir()
    writer = CheckpointWriter(tmp_path / "w", config)
    writer.save(state, {"data": {}})
    writer.close()
    for average, expected in ((None, table[3]), (False, table[0])):
        before, model = bytes_read(), objective_of(config).model
        found = read_parameters(tmp_path / "w", config, model, average=average, report=pytest.fail)
        assert bytes_read() - before < 1.1 * table[0].nbytes
        assert (found.step, found.averaged) == (6, average is None)
        np.testing.assert_array_equal(found.arrays["word_embeddings/embedding"], expected)


@pytest.mark.parametrize("has_digests", [True, False])
def test_parameters_of_the_newest_sound_checkpoint(run, tmp_path, has_digests):
    """Also from checkpoints of versions that stored no digest of the parameters alone."""
    from bert_jax.training.checkpoint.parameters import read_parameters
    from bert_jax.training.checkpoint.restore import read_meta

    workdir = copy(run, tmp_path)
    if not has_digests:
        for step in saved_steps(workdir):
            folder = checkpoint_folder(workdir) / str(step)
            meta = read_meta(folder)
            del meta["digests"]
            meta["json_digest"] = json_digest(meta)
            (folder / "meta" / "metadata").write_text(json.dumps(meta))
            (folder / "checksums.json").unlink()
    sound = restore(workdir, read_only=True)[0]
    reports = []
    for average, tree in ((None, sound.state.ema), (True, sound.state.ema), (False, sound.state.params)):
        found = read_parameters(workdir, CONFIG, objective_of(CONFIG).model, average=average, report=reports.append)
        expected = to_canonical(tree, CONFIG.model.vocab_size)
        assert found.step == 6 and found.arrays.keys() == expected.keys() and not reports
        jax.tree.map(np.testing.assert_array_equal, found.arrays, {name: expected[name] for name in found.arrays})
    payloads = [path for path in files_of(workdir, 6) if "/d/" in path.as_posix()]
    for payload in payloads:
        flip(payload)
    found = read_parameters(workdir, CONFIG, objective_of(CONFIG).model, average=None, report=reports.append)
    assert found.step == 4
    assert len(reports) == 1 and "checkpoint 6" in reports[0]
    assert saved_steps(workdir) == [2, 4, 6]
