"""A pretraining run that is killed and continued ends with the same bytes; its model is used and exported."""

import filecmp
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from command import MAIN_OF_A_COPY
from support import objective_of, random_batch, tiny_config, untimed, whole_and_resumed

from bert_jax.commands.main import main
from bert_jax.interop.readers import read_weights
from bert_jax.parallel import make_mesh, to_global
from bert_jax.training.logging.metrics_file import read_metrics
from bert_jax.training.programs import train_programs
from bert_jax.training.state import initial_state

OPTIONS = "--model.encoder xlnet --objective.name permutation_lm --data.next_sentence none"
MEMORY = "--model.memory_length 20 --data.row_order carried"
RUN = (
    f"{OPTIONS} {MEMORY} --model.vocab_size 150 --model.hidden_size 16 --model.num_layers 2 "
    "--model.num_attention_heads 2 --model.intermediate_size 32 --model.max_position_embeddings 32 "
    "--data.seq_length 16 --data.max_predictions 3 --data.masking dynamic --data.mask_fraction 0.2 "
    "--data.tokenizer unigram --data.dupe_factor 1 --data.num_shards 2 --data.workers 1 --data.reader numpy "
    "--optimizer.warmup_steps 4 --optimizer.learning_rate 3e-3 --training.num_steps 40 "
    "--training.global_batch_size 8 --training.log_interval 1 --training.checkpoint_interval 4 "
    "--training.eval_interval 20 --training.eval_batches 2"
)


@pytest.mark.slow
@pytest.mark.parametrize("memory", ["", MEMORY])
def test_a_stopped_run_continues_with_the_same_losses(memory, tmp_path):
    often = "--training.log_interval 1 --training.checkpoint_interval 2 --training.eval_interval 3"
    config = tiny_config(OPTIONS, often, "--training.num_steps 6 --training.eval_batches 1", memory)
    lines = whole_and_resumed(config, tmp_path, 4)
    assert len([line["plm_loss"] for line in lines if line.get("split") == "eval"]) == 2


@pytest.mark.slow
@pytest.mark.skipif(jax.device_count() < 2, reason="needs two devices, which all tests together have")
@pytest.mark.parametrize("mesh", ["--mesh.data 2", "--mesh.fsdp 2", "--mesh.tensor 2"])
def test_a_mesh_computes_what_one_device_computes(mesh):
    def losses(words, devices):
        config = tiny_config(OPTIONS, MEMORY, words)
        programs = train_programs(objective_of(config, make_mesh(config.mesh, jax.devices()[:devices])))
        state = initial_state(programs.model, programs.optimizer, programs.abstract, 0)
        found = []
        for seed in range(3):
            every = random_batch(programs.objective.config, seed)
            batch = to_global({name: every[name] for name in programs.objective.features}, programs.mesh, 8)
            state, metrics = programs.step_for(batch)(state, batch)
            found.append(metrics.unpack()["loss"])
        return np.array(found)

    np.testing.assert_allclose(losses(mesh, 2), losses("", 1), rtol=1e-5)


def corpus(folder):
    rng = np.random.default_rng(0)
    words = ["".join(rng.choice(list("abdeiklmnorstu"), size)) for size in rng.integers(2, 8, 60)]
    documents = [
        "\n".join(" ".join(rng.choice(words, 9)) + "." for _ in range(12)) for _ in range(30)
    ]  # fmt: skip
    (folder / "text.txt").write_text("\n\n".join(documents) + "\n")
    return folder / "text.txt"


def started(folder, workdir):
    command = f"pretrain {RUN} --data.corpus {folder / 'text.txt'} --data.shards {folder / 'shards'}"
    words = [*shlex.split(command), "--workdir", str(workdir)]
    arguments = [sys.executable, "-P", "-c", MAIN_OF_A_COPY, *words]
    log = (folder / f"{workdir.name}.log").open("a")
    return subprocess.Popen(arguments, cwd=folder, env=os.environ | {"XLA_FLAGS": ""}, stdout=log, stderr=log)


def arrays(model):
    return {name: values.tobytes() for name, values in read_weights(Path(model)).params.items()}


@pytest.mark.slow
def test_a_killed_run_continues_bitwise_and_its_model_is_exported(tmp_path, capsys):
    """With dropout, and with the memory of the rows in the checkpoints."""
    corpus(tmp_path)
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert started(tmp_path, whole).wait(300) == 0, (tmp_path / "whole.log").read_text()
    process, deadline = started(tmp_path, cut), time.monotonic() + 300
    metrics = cut / "metrics.jsonl"
    while not metrics.exists() or metrics.read_text().count("\n") < 12:
        assert process.poll() is None and time.monotonic() < deadline, (tmp_path / "cut.log").read_text()
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait(60)
    reached = read_metrics(cut)[-1]["step"]
    assert reached < 40
    assert started(tmp_path, cut).wait(300) == 0, (tmp_path / "cut.log").read_text()
    lines = read_metrics(whole)
    assert [line["plm_loss"] for line in untimed(read_metrics(cut))] == [
        line["plm_loss"] for line in untimed(lines)
    ]
    assert lines[-1]["plm_loss"] < lines[0]["plm_loss"]
    assert arrays(cut) == arrays(whole)

    first, again, second = (str(tmp_path / name) for name in ("first", "again", "second"))
    assert main(["xlnet", "--model", str(whole), "--to", first]) == 0
    assert main(["xlnet", "--model", first, "--to", again]) == 0
    assert main(["xlnet", "--model", again, "--to", second]) == 0
    names = ["config.json", "model.safetensors", "spiece.model"]
    assert filecmp.cmpfiles(first, second, names, shallow=False) == (names, [], [])
    assert arrays(again) == arrays(whole)
    capsys.readouterr()
    for model in (str(whole), again):
        assert main(["embed", "--model", model, "a text", "another one"]) == 0
    output = capsys.readouterr().out.splitlines()
    assert len(output) == 4 and output[:2] == output[2:]
