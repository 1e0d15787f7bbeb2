"""``run_pretrain.py --init_from`` through the real command line: added words, a resumed run, shards in the way."""

import json

import command
import numpy as np
import pytest
import yaml

from bert_jax.interop.readers import read_weights
from bert_jax.tokenization import load_tokenizer
from bert_jax.training.checkpoint.folder import saved_steps

pytestmark = pytest.mark.entry
WORDS = "embeddings/word_embeddings/embedding"


@pytest.mark.slow
def test_words_are_added_trained_and_there_after_a_resume(pretrain, tmp_path):
    settings = {"num_steps": 2, "log_interval": 1, "eval_interval": 0}
    # Too few pieces for words to be whole.
    recipe = command.recipe(tmp_path, model={"vocab_size": 31}, training=settings, mesh={"data": 1})
    source = tmp_path / "source"
    code, _, err = pretrain("--config", recipe, "--workdir", source)
    assert code == 0, err
    before = read_weights(source)
    vocabulary = (tmp_path / "shards" / "vocab.txt").read_text().split()
    candidates = "follows friend likes hears music river house bird zebra quartz syrup walnut yeast vigour"
    words = [word for word in candidates.split() if word not in vocabulary]
    (tmp_path / "words.txt").write_text("\n".join([words[0].upper(), *words[1:], "a"]))

    run, shards = tmp_path / "run", tmp_path / "grown"
    flags = ["--config", recipe, "--data.shards", shards, "--workdir", run]
    start = ["--init_from", source, "--add_words", tmp_path / "words.txt", "--optimizer.learning_rate", "0"]

    # The shards of the other vocabulary are neither used nor overwritten.
    code, _, err = pretrain("--config", recipe, "--workdir", run, *start)
    assert code == 2 and "vocab.txt: the file is not the vocabulary of this run; set data.shards" in err
    assert (tmp_path / "shards" / "vocab.txt").read_text().split() == vocabulary

    code, out, err = pretrain(*flags, *start)
    assert code == 0, err
    assert (
        f"starts from {source}" in out
        and f"{len(words)} word(s) added, each initialized with the mean of its pieces" in out
    )
    assert (shards / "vocab.txt").read_text().split() == [*vocabulary, *words]
    assert (run / "vocab.txt").read_bytes() == (shards / "vocab.txt").read_bytes()
    after = read_weights(run)
    size = len(vocabulary)
    assert after.spec.model.vocab_size == size + len(words) > 31
    # At learning rate 0 what was loaded is what is saved, bit for bit; rows that no piece had went to words first.
    for name, values in before.params.items():
        rows = size if len(values) == 31 else len(values)
        np.testing.assert_array_equal(after.params[name][:rows], values[:rows], err_msg=name)
    old = load_tokenizer(source / "vocab.txt")
    for row, word in enumerate(words, start=size):
        mean = before.params[WORDS][old.encode(word)].mean(axis=0)
        np.testing.assert_allclose(after.params[WORDS][row], mean, rtol=1e-6, err_msg=word)

    # Goes on without any of the flags, also where the recipe names the size of the source.
    code, out, err = pretrain(*flags, "--training.num_steps", "3")
    assert code == 0, err
    assert "continuing at step 2" in out and saved_steps(run)[-1] == 3
    # With them, too; nothing is left to train.
    code, out, err = pretrain(*flags, *start, "--training.num_steps", "3")
    assert code == 0, err
    assert "--init_from, --add_words: ignored, " in out
    assert not np.array_equal(read_weights(run).params[WORDS], after.params[WORDS])


@pytest.mark.slow
def test_print_config_shows_what_a_start_fixes_and_writes_nothing(pretrain, tmp_path):
    recipe = command.recipe(tmp_path, training={"num_steps": 1, "eval_interval": 0}, mesh={"data": 1})
    source = tmp_path / "source"
    assert pretrain("--config", recipe, "--workdir", source)[0] == 0
    bare = tmp_path / "bare.yaml"
    bare.write_text(f"data: {{shards: {tmp_path / 'new'}, seq_length: 48}}\n")
    words = ["--config", bare, "--init_from", source, "--workdir", tmp_path / "run", "--print_config"]
    code, out, err = pretrain(*words)
    assert code == 2 and "data.seq_length: 48" in err and "32 positions" in err and "--extend_positions" in err
    code, out, err = pretrain(*words, "--extend_positions", "tile")
    assert code == 0, err
    assert "  max_position_embeddings: 48\n" in out and f"  vocab: {tmp_path / 'new' / 'vocab.txt'}\n" in out
    assert not (tmp_path / "new").exists() and not (tmp_path / "run").exists()
    code, out, err = pretrain(*words, "--init_from", tmp_path / "nothing")
    assert code == 2 and err == f"error: {tmp_path / 'nothing'}: does not exist\n"


def test_help_explains_the_options(pretrain):
    code, shown, _ = pretrain("--help_all")
    assert code == 0
    for option in ("--init_from", "--add_words", "--vocab_slots", "--extend_positions"):
        assert option in shown


@pytest.mark.slow
def test_without_a_length_it_follows_from_the_text_or_is_asked_for(pretrain, tmp_path):
    training = {"num_steps": 1, "eval_interval": 0}
    recipe = command.recipe(tmp_path, training=training, mesh={"data": 1})
    source = tmp_path / "source"
    code, out, _ = pretrain("--config", recipe, "--workdir", source)
    exports = f"exports: bert-jax export --model {source} names the formats that hold this model"
    assert code == 0 and out.splitlines()[-1] == exports
    sections = yaml.safe_load(recipe.read_text())
    data = {name: value for name, value in sections["data"].items() if name != "shards"}
    bare = tmp_path / "bare.yaml"
    bare.write_text(yaml.safe_dump({"data": data, "training": {"log_interval": 50}, "mesh": {"data": 1}}))
    words = ["--config", bare, "--data.shards", tmp_path / "new", "--workdir", tmp_path / "run"]

    for more in ((), ("--continue_from", source)):
        code, _, err = pretrain(*words, *more)
        assert code == 2 and err.startswith("error: training.num_steps: not set; ") and err.count("\n") == 1
    assert not (tmp_path / "new").exists() and not (tmp_path / "run").exists()

    code, out, err = pretrain(*words, "--init_from", source)
    assert code == 0, err
    stored = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    steps, batch = stored["training"]["num_steps"], stored["training"]["global_batch_size"]
    # Each of the two copies of the text is a pass.
    examples = json.loads((tmp_path / "new" / "train" / "manifest.json").read_text())["counts"]["instances"] // 2
    assert batch == 32 and steps == max(200, 20 * round(examples / 32)) == saved_steps(tmp_path / "run")[-1]
    assert f"from the size of the text ({examples:,} examples, " in out and f"training.num_steps {steps:,}" in out
    assert stored["optimizer"]["warmup_steps"] == stored["training"]["eval_interval"] == steps // 10
    code, out, err = pretrain(*words)
    assert code == 0 and "is complete" in out, err
