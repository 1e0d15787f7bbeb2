"""Loss and time of the quickstart, compared with other recipes at the same size and with count models.

    python studies/quickstart/quickstart.py [--seeds 0 1 2] [--folder DIR]    # about 35 minutes on two idle cores
    python studies/quickstart/quickstart.py --earlier [...]                   # also its recipe before, 15 minutes more
    python studies/quickstart/quickstart.py --short                           # about 8 minutes
    python studies/quickstart/quickstart.py --workdir runs/quickstart ...     # only loss and filled masks of existing runs
    python studies/quickstart/quickstart.py --times 3                         # only the time, 3 pairs of 150 steps

configs/quickstart.yaml and configs/quickstart_bert.yaml (the recipe of the paper) take turns, each as a whole
command (vocabulary and shards included) in a separate folder. --earlier: the quickstart also takes turns with its
recipe before (earlier.yaml): two layers with LayerNorm before each sub-layer. All models are evaluated on the same rows: single
segments of the documents that quickstart_bert.yaml holds out, 15% of the tokens masked when the rows are built.
Count models of the training text (count_models.py) predict the same tokens from the same inputs. A JSON line for
each run and each count model, 30 filled masks side by side, then a line for all. Exit code 3 unless

* the mean loss of the quickstart is at most 3.6 nats, at least 2.7 below that of the training targets' unigram
  distribution on these rows, and below that of the left x right count model;
* its median time is at most 1.05 times that of quickstart_bert.yaml;
* with --earlier, its mean loss is at most 0.02 nats above that of the recipe before.

--short: one seed of the quickstart, and one pair of --times. A command of 150 steps still makes vocabulary and
shards, compiles and evaluates.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jax
import numpy as np
from count_models import CountModels, neighbors, training_ids

from bert_jax.config import PretrainConfig, load_config
from bert_jax.hashing import permutation
from bert_jax.interop.readers import read_weights
from bert_jax.model import from_canonical
from bert_jax.objectives.masked_lm import top_pieces
from bert_jax.objectives.registry import objective_class
from bert_jax.process.accelerators import keep_to_cpu_without_accelerator
from bert_jax.tokenization import load_tokenizer
from bert_jax.training.state import initial_params
from bert_jax.training.step import make_eval_step
from data_pipeline.build.ensure import ensure_data
from data_pipeline.read.pretrain_input import ShardSource

REPOSITORY = Path(__file__).resolve().parents[2]
RECIPES = ("quickstart", "quickstart_bert")
# The recipe before, on top of configs/quickstart.yaml.
EARLIER = ("--config", str(Path(__file__).with_name("earlier.yaml")))
LARGEST_LOSS, SMALLEST_GAIN, LARGEST_RATIO, SMALLEST_STEP = 3.6, 2.7, 1.05, -0.02
SHORT_STEPS = 150
FILLED = 30  # masks that are shown, of whole words


class Rows:
    """The rows that every model is evaluated on, built in ``folder``."""

    def __init__(self, folder: Path) -> None:
        arguments = ["--config", str(REPOSITORY / "configs/quickstart_bert.yaml"), "--data.shards", str(folder)]
        config = load_config(PretrainConfig, [*arguments, "--data.next_sentence", "none"])
        self._vocabulary = ensure_data(config.data, vocab_size=config.model.vocab_size, report=report)
        self._tokenizer = load_tokenizer(self._vocabulary, lower_case=config.data.lower_case)
        source = ShardSource(config, self._tokenizer)
        self.unigram = source.unigram_cross_entropy() or 0.0
        size = config.training.global_batch_size
        self._batches = list(source.held_out(size, list(range(size)), 0) or ())
        self._counts = CountModels(training_ids(config.data, self._tokenizer), config.model.vocab_size)
        self._choose_masks()

    def _choose_masks(self) -> None:
        """Choose the masks that are shown: whole words of letters that are [MASK] in the input."""
        rows = {name: np.concatenate([batch[name] for batch in self._batches]) for name in self._batches[0]}
        numbers, slots = np.nonzero(rows["mlm_weights"] > 0)
        _, following, labels = neighbors(rows)
        continuation = self._tokenizer.continuation
        at = rows["input_ids"][numbers, rows["mlm_positions"][numbers, slots]]
        whole = (at == self._tokenizer.mask_id) & ~continuation[labels] & ~continuation[following]
        order = [
            place
            for place in permutation(len(labels), FILLED)
            if whole[place] and self._word(labels[place]).isalpha()
        ]
        places = np.array(order[:FILLED])
        self._rows = {name: values[numbers[places]] for name, values in rows.items()}
        for name in ("mlm_positions", "mlm_labels", "mlm_weights"):  # only the chosen mask of each row
            self._rows[name] = self._rows[name][np.arange(len(places)), slots[places]][:, None]
        self.answers = [self._word(label) for label in self._rows["mlm_labels"][:, 0]]

    def _word(self, piece: int) -> str:
        return self._tokenizer.decode([int(piece)]).strip()

    def texts(self) -> list[str]:
        """Return the pieces beside each chosen mask, which is written as [?]; other masks are [MASK]."""
        texts = []
        for ids, (position,) in zip(self._rows["input_ids"], self._rows["mlm_positions"], strict=True):
            sides = (ids[max(1, position - 8) : position], ids[position + 1 : position + 9])
            left, right = (self._tokenizer.decode(side[side != 0].tolist()).strip() for side in sides)
            texts.append(f"{left} [?] {right}")
        return texts

    def evaluate(self, workdir: Path) -> tuple[dict[str, float], list[str]]:
        """Return loss and accuracy of the newest parameters in ``workdir``, and the words in the chosen masks."""
        config = load_config(PretrainConfig, ["--config", str(workdir / "config.yaml")])
        if (workdir / "vocab.txt").read_bytes() != Path(self._vocabulary).read_bytes():
            raise ValueError(
                f"{workdir}: its vocabulary is not that of configs/quickstart_bert.yaml; give a run of that recipe"
            )
        objective = objective_class(config.objective)(config, None)
        weights = dict(read_weights(workdir).params)
        params = from_canonical(weights, initial_params(objective.model, 0), config.model.vocab_size)
        eval_step = jax.jit(make_eval_step(objective))
        totals: dict[str, np.ndarray] = {}
        for batch in self._batches:
            for name, pair in eval_step(params, batch, objective.fixed).items():
                totals[name] = totals.get(name, np.zeros(2)) + np.asarray(pair, np.float64)
        values = objective.evaluation(totals)
        _, ids = top_pieces(objective.model, params, self._rows, 1, self._tokenizer.vocab_size)
        words = [self._word(piece) for piece in ids[:, 0, 0]]
        found = {name: values[name] for name in ("mlm_loss", "mlm_accuracy", "targets")}
        return found | {"filled": self.hits(words)}, words

    def hits(self, words: list[str]) -> int:
        return sum(word == answer for word, answer in zip(words, self.answers, strict=True))

    def count_models(self) -> dict[str, tuple[dict[str, float], list[str]]]:
        """Return for each count model what ``evaluate`` returns for a run."""
        left, right, _ = neighbors(self._rows)
        values = self._counts.evaluate(self._batches)
        models = {}
        for name, found in self._counts.probabilities(left, right).items():
            words = [self._word(piece) for piece in found.argmax(axis=1)]
            models[name] = (values[name] | {"filled": self.hits(words)}, words)
        return models


def report(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def show(values: dict[str, object]) -> None:
    print(json.dumps(values), flush=True)


def run(recipe: str, seed: int, folder: Path, *options: str) -> tuple[Path, float]:
    """Make a whole run of ``recipe``; return its workdir and the seconds of the command."""
    workdir = folder / f"{recipe}-{seed}{'-short' if options else ''}"
    words = [
        "--config", str(REPOSITORY / f"configs/{recipe}.yaml"), "--workdir", str(workdir / "run"),
        "--data.shards", str(workdir / "shards"), "--training.seed", str(seed), *options,
    ]  # fmt: skip
    began = time.perf_counter()
    command = [sys.executable, str(REPOSITORY / "run_pretrain.py"), *words]
    subprocess.run(command, check=True, stdout=sys.stderr)
    return workdir / "run", time.perf_counter() - began


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--folder", type=Path, help="keep everything here (default: a temporary folder)")
    parser.add_argument("--earlier", action="store_true", help="also train the quickstart's recipe before")
    parser.add_argument("--short", action="store_true", help="one seed, times of a few steps")
    parser.add_argument("--times", type=int, help="measure only times of a few steps, so many pairs")
    parser.add_argument("--workdir", type=Path, nargs="+", help="evaluate these runs and train nothing")
    options = parser.parse_args()
    keep_to_cpu_without_accelerator()
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.folder or Path(scratch)
        if options.times:
            return 0 if time_ratio(options.times, folder) <= LARGEST_RATIO else 3
        rows = Rows(folder / "rows")
        if options.workdir:
            runs = {str(workdir): rows.evaluate(workdir) for workdir in options.workdir}
            for workdir, (values, _) in runs.items():
                show({"workdir": workdir, "unigram": rows.unigram, **values})
            show_counts(rows, {workdir: words for workdir, (_, words) in runs.items()})
            return 0
        return compare(rows, options.seeds, folder, short=options.short, earlier=options.earlier)


def show_counts(rows: Rows, filled: dict[str, list[str]]) -> float:
    """Show the count models, and the chosen masks beside the words ``filled`` in by runs; return the loss of the
    left x right model."""
    models = rows.count_models()
    for name, (values, _) in models.items():
        show({"count_model": name, **values})
    columns = filled | {name: words for name, (_, words) in models.items()}
    for number, (text, answer) in enumerate(zip(rows.texts(), rows.answers, strict=True)):
        words = {name: column[number] for name, column in columns.items()}
        show({"mask": number, "text": text, "answer": answer, **words})
    return models["left_x_right"][0]["mlm_loss"]


def ratio_of(times: dict[str, list[float]]) -> float:
    return statistics.median(times["quickstart"]) / statistics.median(times["quickstart_bert"])


def time_ratio(pairs: int, folder: Path) -> float:
    """Ratio of the median times of ``pairs`` short commands of each recipe."""
    times: dict[str, list[float]] = {recipe: [] for recipe in RECIPES}
    for seed in range(pairs):
        for recipe in RECIPES if seed % 2 else reversed(RECIPES):
            _, seconds = run(recipe, seed, folder, "--training.num_steps", str(SHORT_STEPS))
            times[recipe].append(seconds)
            show({"recipe": recipe, "steps": SHORT_STEPS, "seconds": round(seconds, 1)})
    show({"pairs": pairs, "time_ratio": round(ratio_of(times), 3)})
    return ratio_of(times)


def compare(rows: Rows, seeds: list[int], folder: Path, *, short: bool, earlier: bool) -> int:
    """Train and evaluate; return the exit code."""
    arms: dict[str, tuple[str, tuple[str, ...]]] = {"quickstart": ("quickstart", ())}
    if earlier:
        arms["earlier"] = ("quickstart", EARLIER)
    if not short:
        arms["quickstart_bert"] = ("quickstart_bert", ())
    losses: dict[str, list[float]] = {arm: [] for arm in arms}
    times: dict[str, list[float]] = {arm: [] for arm in arms}
    filled: dict[str, list[str]] = {}
    for seed in seeds[:1] if short else seeds:
        for arm, (recipe, options) in arms.items():
            workdir, seconds = run(recipe, seed, folder / arm, *options)
            values, words = rows.evaluate(workdir)
            losses[arm].append(values["mlm_loss"])
            times[arm].append(seconds)
            filled.setdefault(arm, words)  # those of the first seed
            show({"recipe": arm, "seed": seed, "seconds": round(seconds, 1), **values})
    counts = show_counts(rows, filled)
    loss = statistics.mean(losses["quickstart"])
    ratio = time_ratio(1, folder) if short else ratio_of(times)
    reached = loss <= LARGEST_LOSS and rows.unigram - loss >= SMALLEST_GAIN and ratio <= LARGEST_RATIO
    summary: dict[str, object] = {
        "mean_loss": round(loss, 4),
        "unigram": round(rows.unigram, 4),
        "gain": round(rows.unigram - loss, 4),
        "left_x_right": round(counts, 4),
        "time_ratio": round(ratio, 3),
    }
    reached &= loss < counts
    if earlier:
        step = statistics.mean(losses["earlier"]) - loss
        summary["below_earlier"] = round(step, 4)
        summary["time_ratio_to_earlier"] = round(
            statistics.median(times["quickstart"]) / statistics.median(times["earlier"]), 3
        )
        reached &= step >= SMALLEST_STEP
    show(summary | {"reached": bool(reached)})
    return 0 if reached else 3


if __name__ == "__main__":
    sys.exit(main())
