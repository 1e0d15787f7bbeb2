"""A small encoder from drawn weights: taught by a larger one, or by masked words alone.

    python studies/taught_encoder/taught_encoder.py --model MINILM --corpus TEXT ... --data DIR --folder DIR [--seconds 240]
    python studies/taught_encoder/taught_encoder.py --folder DIR --table

The student has 3 layers of the width of --model (all-MiniLM-L6-v2) and its vocabulary. ``taught`` learns its hidden
states (1 - cosine, last layer) and its relations of queries, keys and values (last layer); ``mlm`` learns masked
words. Both read the same rows of 64 tokens, ``taught`` without [MASK], which its teacher does not know. ``taught``
has as many steps as fit into --seconds with the teacher in the step; ``mlm`` has as many steps, and as many as fit
into the same seconds; ``drawn`` has the weights with which they start. Scores: CLINC150 with the frozen encoder and
the mean of a mix of its layers, and STS-B (Spearman's correlation of cosines of means). The rates of both trainings
are chosen on CLINC150's validation texts with another seed.

The command may be stopped and started again: a finished run is a JSON line in FOLDER/lines.jsonl. Exit code 3
unless ``taught`` is above ``mlm`` by more than two standard errors in both tasks and both budgets.
"""

import argparse
import itertools
import statistics
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "shared"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "story"))
from small_runs import Lines, Options, cells, forget, paired, pretrain, report
from small_tasks import RATE_SEED, SmallTask, score, texts, write_intents
from story_tasks import similarity

from bert_jax.interop.readers import read_weights
from bert_jax.process.accelerators import keep_to_cpu_without_accelerator

BATCH, LENGTH, LAYERS, TIMED_STEPS = 32, 64, 3, 60
RATES, FROZEN_RATES = (1e-4, 3e-4, 1e-3, 3e-3), (1e-3, 3e-3, 1e-2)
DRAWN = 1e-12, 2  # rate and steps that leave the weights as they were drawn
RELATION_HEADS = 12
BUDGETS = ("steps", "seconds")
TASKS = ("clinc150", "stsb")
INTENTS = SmallTask(
    "clinc150", lambda data, folder, seed: write_intents(data / "clinc150", folder, seed), "texts.json:{}",
    "accuracy",
    {
        "training.num_epochs": 4.0, "training.global_batch_size": 64, "features.frozen_encoder": "true",
        "features.layers": "weighted_with_embeddings", "model.pooling": "mean", "task.max_length": LENGTH,
    },
)  # fmt: skip


class Study:
    """The runs of both arms."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.given, self.folder = options, options.folder
        self.lines = Lines(self.folder / "lines.jsonl")

    def pretraining(self, arm: str, rate: float, steps: int, seed: int) -> Options:
        spec = read_weights(self.given.model).spec.model
        options: dict[str, Any] = {
            "data.corpus": tuple(self.given.corpus), "data.vocab": self.given.model / "vocab.txt",
            "data.shards": self.folder / "shards", "data.seq_length": LENGTH, "data.max_predictions": 10,
            "data.dupe_factor": 1, "data.eval_fraction": 0, "data.next_sentence": "none", "data.num_shards": 2,
            "model.vocab_size": spec.vocab_size, "model.hidden_size": spec.hidden_size, "model.num_layers": LAYERS,
            "model.num_attention_heads": spec.num_attention_heads,
            "model.intermediate_size": spec.intermediate_size, "model.max_position_embeddings": LENGTH,
            "model.hidden_dropout": 0.0, "model.attention_dropout": 0.0,
            "optimizer.learning_rate": rate, "optimizer.warmup_steps": max(steps // 20, 1),
            "training.global_batch_size": BATCH, "training.num_steps": steps, "training.seed": seed,
            "training.log_interval": 20, "training.checkpoint_interval": 500, "training.keep_checkpoints": 1,
            "training.compilation_cache": self.folder / "compiled",
        }  # fmt: skip
        if arm == "taught":
            options |= {
                "teacher": self.given.model, "data.shards": self.folder / "shards_without_masks",
                "data.mask_token_share": 0.0, "data.random_token_share": 0.0, "objective.name": "distillation",
                "objective.mlm_weight": 0.0, "objective.soft_weight": 0.0, "objective.hidden_loss": "cosine",
                "objective.attention_loss": "relations", "objective.relation_heads": RELATION_HEADS,
            }  # fmt: skip
        return options

    def once(self, key: str, make: Any) -> dict[str, Any]:
        """Return the line ``key``, which ``make`` measures if it is missing."""
        if key not in self.lines.found:
            report(f"run {key}")
            self.lines.add({"key": key, **make()})
        return self.lines.found[key]

    def steps(self, arm: str) -> int:
        """Return the number of steps of an arm that fit into the seconds."""

        def make() -> dict[str, Any]:
            workdir = self.folder / "runs" / f"timed-{arm}"
            found = pretrain(self.pretraining(arm, 1e-3, TIMED_STEPS, RATE_SEED), workdir)
            forget(workdir)
            return {"step_seconds": found["step_seconds"]}

        line = self.once(f"timed/{arm}", make)
        return max(1, round(self.given.seconds / line["step_seconds"]))

    def encoder(self, arm: str, rate: float, steps: int, seed: int) -> Path:
        workdir = self.folder / "runs" / f"{arm}-{rate:g}-{steps}-{seed}"
        if not (workdir / "report_data.json").exists():
            pretrain(self.pretraining(arm, rate, steps, seed), workdir)
        return workdir

    def intents(self, part: str, model: Path, rate: float, seed: int) -> dict[str, Any]:
        files = texts(INTENTS, self.given.data, self.folder / "texts" / str(seed), seed)
        workdir = self.folder / "runs" / f"intents-{model.name}-{rate:g}"
        return score(INTENTS, part, files, model, rate, seed, workdir)

    def rates(self, arm: str) -> tuple[float, float]:
        """Return the rate of pretraining (half of the steps), and that of CLINC150 with the model that it makes."""
        found, steps = {}, self.steps("taught") // 2

        def make(rate: float, own: float) -> dict[str, Any]:
            return self.intents("rates", self.encoder(arm, rate, steps, RATE_SEED), own, RATE_SEED)

        for rate in RATES:
            for own in FROZEN_RATES:
                line = self.once(f"rates/{arm}/{rate:g}/{own:g}", partial(make, rate, own))
                found[rate, own] = line["score"]
            forget(self.folder / "runs" / f"{arm}-{rate:g}-{steps}-{RATE_SEED}")
        return max(found, key=lambda pair: found[pair])

    def result(self, arm: str, budget: str, seed: int) -> dict[str, Any]:
        """Return the scores of a run. Both budgets of ``taught`` are one run."""
        budget = "steps" if arm == "taught" else budget

        def make() -> dict[str, Any]:
            rate, own = self.rates("taught" if arm == "taught" else "mlm")
            steps = self.steps(arm if budget == "seconds" else "taught")
            rate, steps = DRAWN if arm == "drawn" else (rate, steps)
            model = self.encoder(arm, rate, steps, seed)
            line = {
                "steps": steps, "rate": rate, "clinc150": self.intents("results", model, own, seed)["score"],
                "stsb": similarity(model, self.given.data)["score"],
            }  # fmt: skip
            forget(model)
            return line

        return self.once(f"results/{arm}/{budget}/{seed}", make)


def table(lines: Lines, seeds: Sequence[int]) -> tuple[list[str], bool]:
    """Return the lines of the table, and whether every difference is clear."""
    head = ["equal", "task", "seeds", "drawn", "mlm", "taught", "taught - mlm"]
    rows, good = [cells(head), cells(["---"] * len(head))], True
    for budget, task in itertools.product(BUDGETS, TASKS):
        keys = "drawn/steps", f"mlm/{budget}", "taught/steps"
        found = [[lines.found.get(f"results/{key}/{seed}") for key in keys] for seed in seeds]
        scores = [[one[task] for one in line] for line in found if all(line)]
        good &= len(scores) == len(seeds)
        if not scores:
            rows.append(cells([budget, task, 0, *"----"]))
            continue
        difference = paired([taught - mlm for _, mlm, taught in scores])
        means = [f"{statistics.mean(column):.3f}" for column in zip(*scores, strict=True)]
        rows.append(cells([budget, task, len(scores), *means, difference]))
        good &= difference.mean > 2 * difference.error
    return rows, good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="the teacher, a folder with vocab.txt")
    parser.add_argument("--corpus", nargs="+", default=[], help="as data.corpus")
    parser.add_argument("--data", type=Path, help="folder of the task files")
    parser.add_argument("--folder", type=Path, required=True, help="shards, runs and finished lines")
    parser.add_argument("--seconds", type=float, default=240, help="of training steps")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--table", action="store_true", help="train nothing")
    options = parser.parse_args()
    if not options.table and not (options.model and options.corpus and options.data):
        parser.error("--model, --corpus, --data: name the teacher, the text and the folder of the task files")
    keep_to_cpu_without_accelerator()
    study = Study(options)
    for seed in () if options.table else options.seeds:
        for arm, budget in (("taught", "steps"), ("mlm", "steps"), ("mlm", "seconds"), ("drawn", "steps")):
            study.result(arm, budget, seed)
    rows, good = table(study.lines, options.seeds)
    print("\n".join(rows))
    return 0 if good else 3


if __name__ == "__main__":
    sys.exit(main())
