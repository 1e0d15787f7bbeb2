"""Faults that were chosen by people who did not know the checks (the first and the third set of the study), and a
run without a fault.

    python studies/doctor/stranger_faults.py --folder DIR --text FILE [--only NAME ...]

FILE: English text, a sentence per line, blank lines between documents; its first 3 million characters are read. Each run
has two layers of width 128 and 2,000 steps, of which 400 are trained before the doctor examines it; faults of a resume
act at step 150. A run takes about a minute of a core. Prints the first two remarks of each run; exit code 3 if one of
them is not the check that names the fault, or if the run without a fault has a FAIL.
"""

import argparse
import contextlib
import random
import re
import shutil
import sys
import textwrap
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp

import bert_jax
from bert_jax.commands.data import main as data_command
from bert_jax.contrib.doctor.examine import examine_step
from bert_jax.contrib.doctor.findings import summary
from bert_jax.model import attention, embeddings
from bert_jax.model.embeddings import Embeddings
from bert_jax.objectives import masked_lm
from bert_jax.objectives import objective as objectives
from bert_jax.start import state as start_state
from bert_jax.tokenization import load_tokenizer
from bert_jax.training import step as training_step
from data_pipeline.build import instances
from data_pipeline.read.pretrain_input import PretrainBatches
from data_pipeline.shards.shard_files import index_folder

STEPS, STOP, RESUME = 2000, 400, 150
BASE = {
    "model.vocab_size": 8192, "model.hidden_size": 128, "model.num_layers": 2, "model.num_attention_heads": 2,
    "model.intermediate_size": 512, "model.max_position_embeddings": 256, "data.seq_length": 64,
    "data.max_predictions": 10, "data.dupe_factor": 2, "data.num_shards": 4, "data.eval_fraction": 0.04,
    "optimizer.learning_rate": 1e-3, "optimizer.warmup_steps": 100, "optimizer.decay_steps": STEPS,
    "training.num_steps": STEPS, "training.global_batch_size": 32, "training.log_interval": 20,
    "training.eval_interval": 100, "training.eval_batches": 16, "training.checkpoint_interval": 50,
}  # fmt: skip
# Words that a list of stop words has.
STOP_WORDS = frozenset(
    "a an and are as at be been but by can could did do for from had has have he her him his i if in is it its may me "
    "my no not of on or our she should so that the their them they this to was we were will with would you your".split()
)


# ------------------------------------------------------------------ text


def write_texts(text, folder):
    """Write the texts of the runs to ``folder``; return their files by name."""
    folder.mkdir(parents=True, exist_ok=True)
    whole = text.read_text(encoding="utf-8")[:3_000_000].rpartition("\n\n")[0]
    documents = whole.split("\n\n")
    lines = [line for line in whole.split("\n") if line.strip()]
    random.Random(3).shuffle(lines)

    def typographic(line):
        return re.sub(r'(^|[\s(\-])"', r"\1“", line).replace('"', "”").replace("'", "’").replace("--", "—")

    def marked_up(line):
        line = line.replace("&", "&amp;").replace('"', "&quot;").replace("'", "&#39;")
        return f'<p class="calibre3">{line}</p>'

    def stripped(line):
        return " ".join(word for word in re.findall(r"\w+", line) if word.lower() not in STOP_WORDS)

    windows = [lines[i : i + 40] for lines in (one.split("\n") for one in documents) for i in range(0, len(lines), 20)]
    texts = {
        "plain": whole,
        "stripped": "\n".join(map(stripped, whole.split("\n"))),
        "windows": "\n\n".join(map("\n".join, windows)),
        "small": "\n\n".join(documents[:8]),
        "wrapped": "\n\n".join("\n".join(textwrap.wrap(one.replace("\n", " "), 70)) for one in documents),
        "typographic": "\n".join(map(typographic, whole.split("\n"))),
        "some documents": "\n\n".join(documents[7::25]),
        "shuffled": "\n\n".join("\n".join(lines[i : i + 30]) for i in range(0, len(lines), 30)),
        "markup": "\n\n".join("\n".join(map(marked_up, one.split("\n"))) for one in documents),
    }
    for name, content in texts.items():
        (folder / f"{name}.txt").write_text(content + "\n", encoding="utf-8")
    return {name: folder / f"{name}.txt" for name in texts}


def write_pieces(text, folder):
    """Write ``text`` as pieces of a vocabulary of 1,500 pieces, separated by blanks; return the file."""
    vocabulary, file = folder / "vocab1500.txt", folder / "texts" / "pieces.txt"
    data_command(["vocab", "--corpus", str(text), "--vocab_size", "1500", "--output", str(vocabulary)])
    tokenizer = load_tokenizer(vocabulary)
    lines = text.read_text(encoding="utf-8").split("\n")
    file.write_text("\n".join(" ".join(tokenizer.tokenize(line)) for line in lines), encoding="utf-8")
    return file


# ------------------------------------------------------------------ faults of the code


@contextlib.contextmanager
def no_positions():
    call = Embeddings.__call__
    with mock.patch.object(
        Embeddings, "__call__", lambda self, ids, types, places, key: call(self, ids, types, 0 * places, key)
    ):
        yield


@contextlib.contextmanager
def all_slots():
    entropy, divisors = masked_lm.weighted_cross_entropy, masked_lm.MaskedLm.denominators

    def of_all(name, logits, labels, weights):
        return entropy(name, logits, labels, jnp.ones_like(weights) if name == "mlm" else weights)

    def denominators(self, batch):
        return divisors(self, {**batch, "mlm_weights": jnp.ones_like(batch["mlm_weights"])})

    with (
        mock.patch.object(masked_lm, "weighted_cross_entropy", of_all),
        mock.patch.object(masked_lm.MaskedLm, "denominators", denominators),
    ):
        yield


@contextlib.contextmanager
def last_microbatch():
    """Gradients of the last microbatch instead of their sum; the losses are those of the batch."""
    accumulate = objectives.accumulate

    def of_last(loss, params, rows, replica):
        value, grads, *sums = accumulate(loss, params, rows, replica)
        if replica.count > 1:
            split = objectives.split_microbatches(rows, replica.count)
            own = {name: x[-1] for name, x in split.items()}
            grads = jax.grad(loss, has_aux=True)(params, own, replica.count - 1)[0]
        return value, grads, *sums

    with mock.patch.object(objectives, "accumulate", of_last):
        yield


@contextlib.contextmanager
def no_moments():
    resumed = start_state._resumed

    def without(restored, *more):
        zeros = jax.tree.map(jnp.zeros_like, restored.state.opt_state)
        return resumed(start_state.replace(restored, state=restored.state.replace(opt_state=zeros)), *more)

    with mock.patch.object(start_state, "_resumed", without):
        yield


@contextlib.contextmanager
def data_from_the_start():
    restore = PretrainBatches.restore
    with mock.patch.object(PretrainBatches, "restore", lambda self, state: restore(self, state | {"data_step": 0})):
        yield


@contextlib.contextmanager
def other_mask_id():
    mask_batch = instances.mask_batch
    with mock.patch.object(
        instances, "mask_batch", lambda *rows, **options: mask_batch(*rows, **options | {"mask_id": 103})
    ):
        yield


@contextlib.contextmanager
def softmax_over_queries():
    def probabilities(query, key, visible, relative=None):
        scores = jnp.einsum("BSAD,BTAD->BAST", query * query.shape[-1] ** -0.5, key)
        return jax.nn.softmax(jnp.where(visible, scores, attention.MASKED_SCORE), axis=-2)

    with mock.patch.object(attention, "attention_probabilities", probabilities):
        yield


@contextlib.contextmanager
def detached_embeddings():
    constrain = embeddings.constrain

    def detached(x, axes, mesh):
        x = constrain(x, axes, mesh)
        return jax.lax.stop_gradient(x) if axes == embeddings.ACT else x

    with mock.patch.object(embeddings, "constrain", detached):
        yield


@contextlib.contextmanager
def schedule_from_the_start():
    make = training_step.make_schedule

    def again(*options):
        schedule = make(*options)
        return lambda step: schedule(jnp.where(step >= RESUME, step - RESUME, step))

    with mock.patch.object(training_step, "make_schedule", again):
        yield


@contextlib.contextmanager
def rounded_parameters():
    apply = training_step._if_finite

    def rounded(*arguments):
        params, *others = apply(*arguments)
        return jax.tree.map(lambda p: p.astype(jnp.bfloat16).astype(p.dtype), params), *others

    with mock.patch.object(training_step, "_if_finite", rounded):
        yield


# Name -> (check that names the fault, text, options, patch, whether the run is resumed).
NONE = contextlib.nullcontext
RUNS = {
    "no fault": ("", "plain", {}, NONE, False),
    "UTF-8 read as Latin-1": ("text encoding", "typographic", {"data.encoding": "latin-1"}, NONE, False),
    "held-out documents in the training text": ("held-out text", "plain", {}, NONE, False),
    "shuffled lines, pairs": ("sentence order", "shuffled", {}, NONE, False),
    "HTML in the text": ("markup", "markup", {}, NONE, False),
    "rate of fine-tuning": ("updates", "plain", {"optimizer.learning_rate": 2e-5}, NONE, False),
    "decay of a shorter run": ("schedule", "plain", {"optimizer.decay_steps": 250}, NONE, False),
    "max_predictions of shorter rows": (
        "masks", "plain", {"data.seq_length": 256, "training.global_batch_size": 16}, NONE, False,
    ),
    "no positions": ("word order", "plain", {}, no_positions, False),
    "loss of unused slots": ("loss weights", "plain", {}, all_slots, False),
    "gradient of the last microbatch": (
        "accumulation", "plain", {"training.accumulation_steps": 4}, last_microbatch, False,
    ),
    "moments lost at a resume": ("optimizer state", "plain", {}, no_moments, True),
    "data from the start at a resume": ("data position", "plain", {}, data_from_the_start, True),
    # Of the second set.
    "wrapped lines": ("wrapped lines", "wrapped", {"data.line": "sentence"}, NONE, False),
    "parameters rounded to bfloat16": ("rounded weights", "plain", {}, rounded_parameters, False),
    # The third set; a batch of 2 sequences has no check.
    "stop words and punctuation removed": ("punctuation", "stripped", {}, NONE, False),
    "pieces of another vocabulary": ("tokenized text", "pieces", {}, NONE, False),
    "overlapping documents": ("passages", "windows", {}, NONE, False),
    "copies of one shard": ("copied rows", "plain", {}, NONE, False),
    "many passes over static masks": ("passes", "small", {"data.dupe_factor": 1}, NONE, False),
    "slow moving average": ("moving average", "plain", {"optimizer.ema_decay": 0.9999}, NONE, False),
    "initial values of 1": ("first loss", "plain", {"model.initializer_range": 1.0}, NONE, False),
    "id of the mask of another vocabulary": ("masks", "plain", {"data.workers": 1}, other_mask_id, False),
    "softmax over the queries": ("attention sums", "plain", {}, softmax_over_queries, False),
    "embeddings without the gradient of the encoder": ("gradients", "plain", {}, detached_embeddings, False),
    "schedule from the start at a resume": ("learning rate", "plain", {}, schedule_from_the_start, True),
}  # fmt: skip


# ------------------------------------------------------------------ runs


def train(folder, corpus, options, last):
    """Train up to step ``last`` in ``folder``."""
    recipe = folder / "empty.yaml"
    recipe.write_text("training: {}\n")
    return bert_jax.pretrain(
        recipe, corpus=str(corpus), workdir=folder / "run", report=lambda line: None, options=BASE | options,
        callbacks=[lambda row: "split" not in row and row["step"] >= last],
    )  # fmt: skip


def run_of(name, folder, texts):
    """Train and examine one run; return its remarks, at most two, and the summary."""
    _, text, options, patch, is_resumed = RUNS[name]
    own = folder / "work"
    shutil.rmtree(own, ignore_errors=True)
    own.mkdir(parents=True)
    options = {"data.shards": str(own / "shards")} | options
    if name == "held-out documents in the training text":
        # Training builds the shards of the whole text; evaluation reads those of some of its documents.
        train(own, texts[text], options | {"training.num_steps": 1, "optimizer.warmup_steps": 0}, 1)
        vocabulary = str(own / "vocab.txt")
        shutil.copy(own / "shards" / "vocab.txt", vocabulary)
        shutil.rmtree(own / "run")
        dev = {"data.shards": str(own / "dev"), "data.vocab": vocabulary, "data.dupe_factor": 1, "data.num_shards": 1}
        train(own, texts["some documents"], options | dev | {"training.num_steps": 1, "optimizer.warmup_steps": 0}, 1)
        shutil.rmtree(own / "run")
        (own / "dev" / "train" / "manifest.json").unlink()  # as shards that were built elsewhere and indexed
        options |= {"data.eval_shards": str(own / "dev" / "train")}
    if name == "copies of one shard":
        train(own, texts[text], options | {"training.num_steps": 1, "optimizer.warmup_steps": 0}, 1)
        shutil.rmtree(own / "run")
        options["data.vocab"] = str(own / "shards" / "vocab.txt")
        first, *others = sorted((own / "shards" / "train").glob("*.tfrecord"))
        for other in others:
            shutil.copy(first, other)
        for record in ("manifest.json", "records.index"):
            (own / "shards" / "train" / record).unlink()
        index_folder(own / "shards" / "train")
    with patch():
        if is_resumed:
            train(own, texts[text], options | {"training.num_steps": RESUME}, RESUME)
        run = train(own, texts[text], options, STOP)
        _, found = examine_step(run.workdir)
    return [one for one in found if one.status != "OK"][:2], summary(found)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--only", nargs="*", default=[], metavar="NAME")
    arguments = parser.parse_args()
    texts, wrong = write_texts(arguments.text, arguments.folder / "texts"), 0
    texts["pieces"] = write_pieces(texts["plain"], arguments.folder)
    for name in arguments.only or RUNS:
        remarks, statuses = run_of(name, arguments.folder, texts)
        check = RUNS[name][0]
        is_right = check in [one.check for one in remarks] if check else not any(one.status == "FAIL" for one in remarks)
        wrong += not is_right
        print(f"{name}: {'right' if is_right else 'WRONG'}, {statuses}", *(f"    {one}" for one in remarks), sep="\n")
        sys.stdout.flush()
    return 3 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
