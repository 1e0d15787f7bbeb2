"""A user's mistakes through the command lines: one clear line, exit code 2, nothing lost.

Here: what meets only in a whole run (shards, vocabulary and checkpoints that are there already, the workdir, the
disk) and ``bert-jax fill-mask``. Elsewhere, because it needs no run:

- unknown keys and sections, wrong types and values in YAML and flags, duplicate keys:
  bert_jax/config/test_config.py
- batches and meshes: also bert_jax/training/test_training.py; damaged checkpoints: test_checkpoint.py beside it
- missing, empty and one-document corpora, invalid UTF-8, vocabularies without [MASK], unwritable shard folders:
  data_pipeline/test_data_cli.py, test_build.py, test_corpus.py, bert_jax/tokenization/test_tokenization.py
- fine-tuning: test_finetune_input.py
- shards of somebody else's, damaged records: data_pipeline/test_input.py, test_damage.py, test_shards.py
"""

import io
import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import command
import pytest
import yaml

from bert_jax.commands import main as cli
from bert_jax.config import PretrainConfig, load_config
from bert_jax.training.checkpoint.folder import saved_steps
from bert_jax.training.logging.metrics_file import read_metrics

pytestmark = pytest.mark.entry


@pytest.fixture(scope="module")
def trained(tmp_path_factory, program):
    """A folder with corpus, recipe, shards and the workdir of a finished run of two steps."""
    place = tmp_path_factory.mktemp("trained")
    recipe = command.recipe(place, training={"num_steps": 2, "log_interval": 1, "eval_interval": 0})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["run_pretrain.py", "--config", str(recipe), "--workdir", str(place / "run")])
        assert program.main() == 0
    assert saved_steps(place / "run") == [2]
    return place


def files(folder):
    """Every file but locks, with content."""
    found = (path for path in folder.rglob("*") if path.is_file() and path.name != ".lock")
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in found}


@pytest.fixture
def refused(trained, program, capsys, monkeypatch):
    """Call: the one line on stderr that ``run_pretrain.py`` with these words ends with, and code 2; nothing that
    was there may change."""

    def call(*words, recipe=trained / "recipe.yaml", workdir=trained / "run"):
        before = files(trained)
        arguments = ["--config", recipe, "--workdir", workdir, *words]
        monkeypatch.setattr(sys, "argv", ["run_pretrain.py", *map(str, arguments)])
        capsys.readouterr()
        code = program.main()
        captured = capsys.readouterr()
        assert code == 2, captured
        after = files(trained)
        assert {name: after.get(name) for name in before} == before
        lines = captured.err.splitlines()
        assert len(lines) == 1 and lines[0].startswith("error: "), captured
        return lines[0]

    return call


# ------------------------------------------------------------------ run_pretrain.py


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--model.width 3", "command line: model.width: unknown option"),
        ("--modle.num_layers 3", "modle.num_layers: unknown section; allowed: "),
        ("--training.num_steps two", "command line: training.num_steps: 'two' is not a whole number"),
        ("--workdirr x", "did you mean 'workdir'?"),
        ("--model.num_attention_heads 3", "model.num_attention_heads: 3 is not allowed; allowed: a divisor of "
         "model.hidden_size (16)"),
        ("--model.num_layers 3", "the checkpoint was saved with another model (saved -> now): "
         "model.num_layers: 1 -> 3; use the saved values or another --workdir"),
        ("--optimizer.name bert_adam", "does not fit the configured optimizer"),
        ("--data.seq_length 32", "data.seq_length: shards 16, config 32; set them back"),
        ("--data.masking dynamic", "data.masking: shards static, config dynamic"),
        ("--data.max_predictions 4", "data.max_predictions: shards 3, config 4"),
        ("--data.next_sentence none", "(the sentence-pair head): True -> False; use the saved values"),
        ("--data.mask_unit whole_word", "data.mask_unit: shards token, config whole_word"),
        ("--model.vocab_size 100", "model.vocab_size: vocabulary 64, config 100"),
        ("--training.global_batch_size 12", "training.global_batch_size: 12"),
        ("--training.eval_batch_size 12", "training.eval_batch_size: 12 "),
        ("--training.accumulation_steps 2", "8 in 2 microbatches"),
        ("--mesh.data 3", "mesh: data 3 x fsdp 1 x tensor 1"),
    ],
)  # fmt: skip
def test_a_finished_run_called_with_something_else(refused, words, message):
    assert message in refused(*words.split())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model:\n  width: 3\n", ":2: model.width: unknown option"),
        ("modle:\n  num_layers: 3\n", ":2: modle.num_layers: unknown section; allowed: "),
        ("training:\n  num_steps: nan\n", ":2: training.num_steps: 'nan' is not allowed"),
        ("model:\n  num_layers: 3\n  num_layers: 2\n", ":3: model.num_layers: "),
    ],
)
def test_mistakes_in_a_recipe(refused, tmp_path, text, message):
    (tmp_path / "wrong.yaml").write_text(text)
    assert refused(recipe=tmp_path / "wrong.yaml").startswith(f"error: {tmp_path}/wrong.yaml{message}")


def test_another_vocabulary_than_the_shards(refused, trained, tmp_path):
    pieces = (trained / "shards" / "vocab.txt").read_text().splitlines()
    other = tmp_path / "vocab.txt"
    other.write_text("\n".join([*pieces[:-1], "other"]) + "\n")
    assert "trained with another vocabulary" in refused("--data.vocab", other)
    other.write_text("\n".join(piece for piece in pieces if piece != "[MASK]") + "\n")
    assert "[MASK]" in refused("--data.vocab", other)
    assert "no such" in refused("--data.vocab", tmp_path / "none.txt")


def test_a_position_offset_that_is_not_the_id_of_padding_plus_one(refused, tmp_path):
    words = ("--model.position_offset", 2, "--model.max_position_embeddings", 34)
    assert "model.position_offset: 2, but padding has id 0" in (line := refused(*words, workdir=tmp_path / "new"))
    assert "allowed: 1, the id of padding + 1" in line and not (tmp_path / "new").exists()


def test_no_corpus_and_no_shards(refused, tmp_path):
    assert "none.txt" in refused("--data.shards", tmp_path / "s", "--data.corpus", tmp_path / "none.txt")
    assert not (tmp_path / "s" / "train").exists()


def test_folders_that_cannot_be_written(refused, tmp_path):
    (tmp_path / "file").write_text("kept")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    for workdir in (tmp_path / "file" / "run", tmp_path / "dangling" / "run", Path("/proc/run")):
        assert str(workdir.parent) in refused(workdir=workdir)
    assert (tmp_path / "file").read_text() == "kept"


def test_no_earlier_phase(refused, tmp_path):
    words = ["--continue_from", tmp_path / "none"]
    assert "has no checkpoint" in refused(*words, workdir=tmp_path / "run")


def test_a_phase_with_another_vocabulary_is_refused_before_shards_are_built(refused, trained, tmp_path):
    pieces = (trained / "run" / "vocab.txt").read_text().split()[:-1]
    (tmp_path / "other.txt").write_text("\n".join(sorted(pieces, key=lambda piece: piece[0] != "[")) + "\nmore\n")
    phase = ["--continue_from", trained / "run", "--data.shards", tmp_path / "s", "--training.num_steps", 4]
    for words in (["--data.vocab", tmp_path / "other.txt"], ["--data.lower_case", "false"]):
        line = refused(*phase, *words, workdir=tmp_path / "two")
        assert "another vocabulary" in line and f"--data.vocab {trained / 'run' / 'vocab.txt'}" in line
        assert not (tmp_path / "s").exists()
    # The steps and the model need no data either.
    assert "training.num_steps: 2 is not above 2" in refused(
        *phase[:4], "--training.num_steps", 2, workdir=tmp_path / "two"
    )
    assert "model.num_layers: 1 -> 2" in refused(*phase, "--model.num_layers", 2, workdir=tmp_path / "two")
    assert not (tmp_path / "s").exists() and not (tmp_path / "two").exists()


def test_sizes_beyond_32_bits_and_beyond_the_memory(refused, tmp_path):
    shards = ["--data.shards", tmp_path / "s"]
    for option, value in (
        ("training.num_steps", 10**12), ("training.global_batch_size", 2**31), ("model.hidden_size", 10**15),
        ("training.eval_batch_size", 10**10), ("data.seq_length", 2**40),
    ):  # fmt: skip
        assert f"{option}: {value} is not allowed; allowed: at most 2147483647" in refused(
            *shards, f"--{option}", value
        )
    for option in ("training.global_batch_size", "training.eval_batch_size"):
        line = refused(*shards, f"--{option}", 2**31 - 8, workdir=tmp_path / "new")
        assert f"{option}: batches of 2,147,483,640 need at least" in line and "GiB are free" in line
    line = refused(*shards, "--model.hidden_size", 2_000_000, workdir=tmp_path / "new")
    assert "model.hidden_size" in line and "GiB are free" in line
    assert not (tmp_path / "s").exists()


@pytest.mark.slow
@pytest.mark.parametrize("platform", [pytest.param("cuda", marks=pytest.mark.slow), "no_such"])
def test_a_platform_that_is_not_there(trained, tmp_path, monkeypatch, platform):
    words = ["--config", trained / "recipe.yaml", "--workdir", tmp_path / "w", "--data.shards", tmp_path / "s"]
    monkeypatch.setenv("JAX_PLATFORMS", platform)
    code, out, err = command.run(*map(str, words))
    assert (code, out) == (2, "") and len(err.splitlines()) == 1
    assert err.startswith(f"error: JAX_PLATFORMS: JAX cannot use {platform}: ") and "unset JAX_PLATFORMS" in err
    assert not (tmp_path / "s").exists()


def test_print_config_reads_back(program, trained, monkeypatch, capsys, tmp_path):
    words = ["--config", str(trained / "recipe.yaml"), "--training.mode", "bert2018", "--optimizer.name", "lamb"]
    monkeypatch.setattr(
        sys, "argv", ["run_pretrain.py", *words, "--print_config", "--workdir", str(tmp_path / "w")]
    )
    assert program.main() == 0
    printed = tmp_path / "printed.yaml"
    printed.write_text(capsys.readouterr().out)
    config = load_config(PretrainConfig, words)
    assert load_config(PretrainConfig, ["--config", str(printed)]) == config
    assert (config.optimizer.name, config.optimizer.schedule) == ("lamb", "bert2018")
    assert not (tmp_path / "w").exists()


@pytest.mark.slow
def test_the_process_itself():
    """Exit code and streams of the real program."""
    code, out, err = command.run("--optimizer.learning_rate", "-1")
    assert (code, out) == (2, "")
    assert err == "error: command line: optimizer.learning_rate: -1.0 is not allowed; allowed: 0 or more\n"


# ------------------------------------------------------------------ a full disk

ON_SMALL_DISK = """
mount -t tmpfs -o size={size} none {disk} || exit 99
{command} >{notes}/out1 2>{notes}/err1; echo $? >{notes}/code1
cp -r {disk} {notes}/full
mount -n -i -o remount,size=256m none {disk} || exit 99
{command} >{notes}/out2 2>{notes}/err2; echo $? >{notes}/code2
cp -r {disk} {notes}/whole
"""


def on_small_disk(tmp_path, size, *words):
    """Run the command where ``tmp_path/disk`` is a disk of ``size``, then again after it has grown. Returns the
    exit code, stdout and stderr of both; the disk's content lies in ``notes/full`` and ``notes/whole``."""
    disk, notes = tmp_path / "disk", tmp_path / "notes"
    disk.mkdir()
    notes.mkdir()
    script = ON_SMALL_DISK.format(size=size, disk=disk, notes=notes, command=shlex.join(map(str, words)))
    if shutil.which("unshare") is None:
        pytest.skip("no unshare command (Linux only): a small disk of our own cannot be mounted")
    # A mount of one's own needs no rights where user namespaces are allowed.
    rights = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    done = subprocess.run(
        ["unshare", *rights, "--mount", "sh", "-c", script], cwd=command.REPOSITORY, capture_output=True, text=True,
        timeout=600, check=False,
    )  # fmt: skip
    if done.returncode and not (notes / "code1").exists():
        pytest.skip(f"this machine allows no mounts of one's own: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    return [
        (int((notes / f"code{i}").read_text()), (notes / f"out{i}").read_text(), (notes / f"err{i}").read_text())
        for i in (1, 2)
    ]


def assert_full_disk(result):
    code, _, err = result
    assert code == 2, err
    assert len(err.splitlines()) == 1 and "No space left on device" in err and "free some space" in err


@pytest.mark.slow
def test_disk_full_while_shards_are_built(tmp_path):
    corpus = command.write_text(tmp_path / "corpus.txt", documents=60)
    base = [sys.executable, "-m", "bert_jax.commands.data", "shards", "--corpus", corpus, "--vocab_size", "64",
            "--seq_length", "16", "--max_predictions", "3", "--dupe_factor", "4", "--workers", "1"]  # fmt: skip
    full, whole = on_small_disk(tmp_path, "256k", *base, "--output", tmp_path / "disk" / "shards")
    assert_full_disk(full)
    left = files(tmp_path / "notes" / "full" / "shards")
    assert left and not (tmp_path / "notes" / "full" / "shards" / "train").exists()
    assert whole[0] == 0, whole
    subprocess.run([*base, "--output", tmp_path / "other"], cwd=command.REPOSITORY, check=True, capture_output=True)
    assert files(tmp_path / "notes" / "whole" / "shards") == files(tmp_path / "other")


@pytest.mark.slow
def test_disk_full_while_a_checkpoint_is_saved(tmp_path, trained):
    """Complete checkpoints stay, the half one is not taken for one, and with space the run goes on to its end."""
    words = [
        "--config", trained / "recipe.yaml", "--workdir", tmp_path / "disk" / "run", "--training.num_steps", "24",
        "--training.checkpoint_interval", "2", "--training.keep_checkpoints", "20",
    ]  # fmt: skip
    full, whole = on_small_disk(tmp_path, "2m", sys.executable, command.REPOSITORY / "run_pretrain.py", *words)
    assert_full_disk(full)
    kept = saved_steps(tmp_path / "notes" / "full" / "run")
    assert kept and kept[-1] < 24
    assert whole[0] == 0, whole
    assert f"continuing at step {kept[-1]}" in whole[1]
    assert "damaged" not in whole[1] + whole[2]
    workdir = tmp_path / "notes" / "whole" / "run"
    assert saved_steps(workdir) == list(range(2, 25, 2))
    assert [line["step"] for line in read_metrics(workdir) if "split" not in line] == list(range(1, 25))


# ------------------------------------------------------------------ bert-jax fill-mask


def fill(capsys, *words):
    """Exit code, stdout and stderr of ``bert-jax fill-mask``."""
    capsys.readouterr()
    code = cli.main(["fill-mask", *map(str, words)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def standard_input(text):
    return io.TextIOWrapper(io.BytesIO(text.encode()))


def fill_refused(capsys, *words):
    code, out, err = fill(capsys, *words)
    assert code == 2 and out == "", (code, out, err)
    assert len(err.splitlines()) == 1 and err.startswith("error: "), err
    return err


def test_fill_mask(capsys, trained, monkeypatch):
    run = trained / "run"
    before = files(run)
    text, two = "the cat [MASK] a bird .", "the [MASK] sees a [MASK] ."
    code, out, err = fill(capsys, "--model", run, "--top", 3, text, two)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == text and lines[2] == two and len(lines) == 5
    assert [line.partition(":")[0] for line in lines if line.startswith(" ")] == [
        "  [MASK]", "  [MASK] 1", "  [MASK] 2",
    ]  # fmt: skip
    pieces = set((run / "vocab.txt").read_text().splitlines())
    found = lines[1].partition(": ")[2].split()
    assert len(found) == 6 and set(found[::2]) <= pieces
    # The same as JSON, one object a line, from standard input.
    monkeypatch.setattr(sys, "stdin", standard_input(f"{text}\n\n{two}\n"))
    code, out, err = fill(capsys, "--model", run, "--top", 64, "--json")
    skipped = "standard input: blank lines skipped: 1; results follow the order of the other lines\n"
    assert (code, err) == (0, skipped)
    objects = [json.loads(line) for line in out.splitlines()]
    assert [item["text"] for item in objects] == [text, two]
    assert [len(item["masks"]) for item in objects] == [1, 2]
    predictions = objects[0]["masks"][0]["predictions"]
    probabilities = [probability for _, probability in predictions]
    assert probabilities == sorted(probabilities, reverse=True) and abs(sum(probabilities) - 1) < 1e-5
    assert [piece for piece, _ in predictions[:3]] == found[::2]
    assert files(run) == before


def test_fill_mask_refusals(capsys, trained, monkeypatch, tmp_path):
    run = ("--model", trained / "run")
    assert "does not contain [MASK]" in fill_refused(capsys, *run, "the cat sees a bird .")
    assert "does not contain [MASK]" in fill_refused(capsys, *run, "the [MASK] .", "the [mask] .")
    assert "the maximum is 32" in fill_refused(capsys, *run, "the cat " * 30 + "[MASK]")
    assert "a text on the command line is blank; give it words" in fill_refused(capsys, *run, "the [MASK]", " ")
    assert "top: 0 is not allowed; use 1 or more" in fill_refused(capsys, *run, "--top", 0, "the [MASK]")
    assert "no model" in fill_refused(capsys, "--model", tmp_path, "the [MASK]")
    assert "none: does not exist" in fill_refused(capsys, "--model", tmp_path / "none", "the [MASK]")
    assert "gcloud storage cp -r URL" in fill_refused(capsys, "--model", "gs://bucket/run", "the [MASK]")
    monkeypatch.setattr(sys, "stdin", standard_input(""))
    assert "no text given" in fill_refused(capsys, *run)
    # A workdir before its first checkpoint, and one without its vocabulary.
    for name in ("config.yaml", "vocab.txt"):
        shutil.copy(trained / "run" / name, tmp_path)
    assert "no checkpoint yet" in fill_refused(capsys, "--model", tmp_path, "the [MASK]")
    (tmp_path / "vocab.txt").unlink()
    assert "vocabulary files" in fill_refused(capsys, "--model", tmp_path, "the [MASK]")
    with pytest.raises(SystemExit) as ended:
        cli.main(["fill-mask", "the [MASK]"])
    assert ended.value.code == 2


@pytest.mark.slow
def test_fill_mask_from_a_scanned_padded_checkpoint_with_average(
    capsys, trained, tmp_path, program, one_device, monkeypatch
):
    """What is read back follows the recipe of the run: other layouts, moving average."""
    recipe = yaml.safe_load((trained / "recipe.yaml").read_text())
    recipe["execution"] = {"scan_layers": True, "vocab_multiple": 128}
    recipe["optimizer"]["ema_decay"] = 0.5
    recipe["training"]["num_steps"] = 1
    recipe["mesh"]["data"] = 1
    pieces = (trained / "run" / "vocab.txt").read_text().split()[:-4]
    (tmp_path / "vocab.txt").write_text("\n".join(pieces) + "\n")
    recipe["data"] |= {"vocab": str(tmp_path / "vocab.txt"), "shards": str(tmp_path / "shards")}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    words = ["--config", tmp_path / "recipe.yaml", "--workdir", tmp_path / "run"]
    monkeypatch.setattr(sys, "argv", ["run_pretrain.py", *map(str, words)])
    assert program.main() == 0
    code, out, err = fill(capsys, "--model", tmp_path / "run", "--json", "--top", 500, "the [MASK] sees")
    assert (code, err) == (0, "")
    (mask,) = json.loads(out)["masks"]
    # Every piece once; never a row that is padding or beyond the vocabulary, which is smaller than the model's.
    assert sorted(piece for piece, _ in mask["predictions"]) == sorted(pieces)
    assert len(pieces) < recipe["model"]["vocab_size"]
