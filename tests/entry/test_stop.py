"""SIGTERM while run_pretrain.py prepares its data: at once, not when the vocabulary is trained."""

import random
import signal
import time

import command
import pytest

pytestmark = pytest.mark.entry


@pytest.mark.slow
def test_a_signal_while_data_are_prepared(tmp_path):
    draws = random.Random(1)
    words = ["".join(draws.choices("abcdefghijklmnopqrstuvwxyz", k=60)) for _ in range(60_000)]
    (tmp_path / "words.txt").write_text("\n\n".join(f"{word} {word} ." for word in words))
    recipe = command.recipe(
        tmp_path, data={"corpus": [str(tmp_path / "words.txt")]}, model={"vocab_size": 30_000}
    )  # fmt: skip
    process = command.start("--config", recipe, "--workdir", tmp_path / "run")
    while "training a wordpiece vocabulary" not in (line := process.stdout.readline()):
        assert line, process.communicate()
    time.sleep(1)
    process.send_signal(signal.SIGTERM)
    began = time.monotonic()
    _, err = process.communicate(timeout=60)
    assert time.monotonic() - began < 3
    assert process.returncode == 42
    assert err == "stopped while preparing data; finished parts are kept: run the same command to continue\n"
    assert not (tmp_path / "shards" / "vocab.txt").exists()
