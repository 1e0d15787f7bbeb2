"""Translation of image captions from random weights and from warm parts, on one CPU core.

    python studies/translation/translation.py --data DIR --folder DIR [--minutes N] [--parts programs whole]
    python studies/translation/translation.py --table

Parts, in this order:

* programs: 300 steps of 128 pairs of German and English, or 600 of 64, with several optimizers and rates; the line
  has the loss on 200 dev pairs and the seconds of a step.
* whole: all 29,000 pairs German to English, three seeds; greedy search and 5 hypotheses on test 2016.
* few: 1,000 pairs, three seeds, which draw pairs, parameters and order for all arms: random weights; the encoder of
  a masked language model of the German and the English training captions; encoder and
  decoder of this model; and the same three with another network.
* other: English to German, three seeds, and Chinese to English, once.

--data holds multi30k_de_en and captions3am_zh_en. The command may be stopped and started again: a finished run is a
line of translation.jsonl, and an unfinished one continues at its checkpoint. --minutes: start no run after this
time. Exit code 3 if lines are missing.
"""

import argparse
import dataclasses
import gzip
import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "shared"), str(Path(__file__).resolve().parents[2])]
from arms import PLAIN, verdicts
from small_runs import Lines, Options, cells, command, forget, pretrain, report, report_missing

from bert_jax.commands.data import main as data_main
from bert_jax.contrib.translation.metrics import corpus_score
from bert_jax.hashing import permutation
from bert_jax.inference.loaded import load, prepare
from bert_jax.metrics.score import value
from bert_jax.process.accelerators import keep_to_cpu_without_accelerator

LINES = Path(__file__).with_name("translation.jsonl")
SOME = 10**6  # steps between evaluations and checkpoints: none before the end of a run
FEW, SEEDS, BOUND = 1000, range(3), 1.0
EXAMPLES = 20


@dataclass(frozen=True)
class Direction:
    """Files of a direction: NAME.LANGUAGE.gz in a folder of the data."""

    folder: str
    names: tuple[str, str, str]  # train, dev, test
    source: str
    target: str
    pieces: int
    max_length: int

    def pair(self, place: int) -> str:
        name = self.names[place]
        return f"{name}.{self.source}.gz+{name}.{self.target}.gz"

    def texts(self, data: Path, place: int) -> tuple[list[str], list[str]]:
        name = self.names[place]
        source, target = (data / self.folder / f"{name}.{language}.gz" for language in (self.source, self.target))
        return unpacked(source).splitlines(), unpacked(target).splitlines()


def unpacked(path: Path) -> str:
    return gzip.decompress(path.read_bytes()).decode()


FLICKR = ("train", "val", "test_2016_flickr")
DIRECTIONS = {
    "de-en": Direction("multi30k_de_en", FLICKR, "de", "en", 4000, 64),
    "en-de": Direction("multi30k_de_en", FLICKR, "en", "de", 4000, 64),
    "zh-en": Direction("captions3am_zh_en", ("train", "dev", "test"), "zh", "en", 8000, 64),
}
NETWORK: Options = {
    "model.hidden_size": 128, "model.num_layers": 4, "model.num_attention_heads": 4, "model.intermediate_size": 512,
    "model.max_position_embeddings": 64, "model.type_vocab_size": 1,
}  # fmt: skip
BASE: Options = {
    "task.kind": "translation", "model.hidden_dropout": 0.3, "model.attention_dropout": 0.1,
    "optimizer.schedule": "linear", "training.num_epochs": 0, "training.log_interval": 20,
    "training.checkpoint_interval": SOME, "training.eval_interval": SOME,
}  # fmt: skip
RANDOM: Options = {"model.encoder": "encoder_decoder", **NETWORK}


def program(rate: float, size: int = 128, **others: Any) -> Options:
    steps = 300 * 128 // size
    return {
        "optimizer.name": "muon", "optimizer.learning_rate": rate, "optimizer.warmup_steps": 60,
        "training.global_batch_size": size, "training.num_steps": steps, **others,
    }  # fmt: skip


PROGRAMS: dict[str, Options] = {
    "AdamW 2e-3": program(2e-3, **{"optimizer.name": "adamw", "optimizer.beta2": 0.98}),
    "AdamW 5e-3": program(5e-3, **{"optimizer.name": "adamw", "optimizer.beta2": 0.98}),
    "Muon 2e-3": program(2e-3, **{"optimizer.beta2": 0.98}),
    "Muon 5e-3": program(5e-3, **{"optimizer.beta2": 0.98}),
    "Muon 1e-2": program(1e-2, **{"optimizer.beta2": 0.98}),
    "Muon 1e-2, pre-norm": program(1e-2, **{"optimizer.beta2": 0.98, "model.norm_position": "pre"}),
    "Muon 2e-3, 64 pairs": program(2e-3, 64, **{"optimizer.beta2": 0.98}),
    "Muon 5e-3, 64 pairs": program(5e-3, 64, **{"optimizer.beta2": 0.98}),
}
# The long runs.
WHOLE: Options = {
    "optimizer.name": "muon", "optimizer.learning_rate": 1e-2, "optimizer.beta2": 0.98,
    "optimizer.warmup_steps": 200, "training.global_batch_size": 128, "model.hidden_dropout": 0.2,
    "training.eval_interval": 1500, "training.checkpoint_interval": 300,
}  # fmt: skip
STEPS = {"de-en": 3000, "en-de": 1500, "zh-en": 1500}
LONG_SEEDS = {"de-en": SEEDS, "en-de": SEEDS, "zh-en": range(1)}
# Runs with 1,000 pairs, and the pretraining.
SMALL: Options = {
    "optimizer.name": "muon", "optimizer.learning_rate": 5e-3, "optimizer.beta2": 0.98,
    "optimizer.warmup_steps": 30, "training.global_batch_size": 64, "training.num_steps": 320,
    "data.dev_limit": 200,
}  # fmt: skip
PRETRAINED: Options = {
    "data.seq_length": 64, "data.next_sentence": "none", "data.masking": "dynamic",
    "data.dupe_factor": 1, "data.num_shards": 1, "data.eval_fraction": 0, "data.lower_case": "false",
    "data.max_predictions": 10,
    "optimizer.name": "muon", "optimizer.learning_rate": 5e-3, "optimizer.warmup_steps": 100,
    "training.num_steps": 1000, "training.global_batch_size": 64, "training.log_interval": 100,
    "training.eval_interval": SOME, "training.checkpoint_interval": 600,
}  # fmt: skip
# Networks of the runs with 1,000 pairs, by the end of the name of an arm, with options of their pretraining. The
# first one is that of the other parts. The second one has what lets small networks leave the unigram distribution
# early (studies/quickstart), as far as a decoder has it.
ROTARY: Options = {
    **NETWORK, "model.position_embeddings": "rotary", "model.rotary_base": 100, "model.initializer_range": 0.06,
    "model.norm_position": "pre", "model.norm_epsilon": 1e-5,
}  # fmt: skip
NETWORKS: dict[str, tuple[Options, Options]] = {
    "": (NETWORK, {}),
    ", rotary": (
        ROTARY,
        {
            "optimizer.learning_rate": 3e-3, "optimizer.schedule": "wsd", "optimizer.wsd_decay_fraction": 0.5,
            "training.num_steps": 900, "data.mask_fraction": 0.2, "data.max_predictions": 13,
        },
    ),
}  # fmt: skip
ARMS = (PLAIN, "warm encoder", "both warm")
PARTS = ("programs", "whole", "few", "other")


def long_runs(part: str) -> list[tuple[str, str, int]]:
    """Return the key, the direction and the seed of each run of the part whole or other."""
    names = ("de-en",) if part == "whole" else ("en-de", "zh-en")
    return [
        (f"{part}/{name}/{seed}" if seed else f"{part}/{name}", name, seed)
        for name in names
        for seed in LONG_SEEDS[name]
    ]


class Study:
    """All runs; ``until``: no run starts after this time."""

    def __init__(self, data: Path, folder: Path, lines: Lines, until: float) -> None:
        self.data, self.folder, self.lines, self.until = data, folder, lines, until

    def make(self, part: str) -> None:
        """Make the missing runs of a part."""
        if part == "programs":
            for name, options in PROGRAMS.items():
                self.run(f"programs/{name}", "de-en", {**RANDOM, **options, "data.dev_limit": 200})
        elif part == "few":
            for network in NETWORKS:
                for seed in SEEDS:
                    for arm in ARMS:
                        self.few(arm, network, seed)
        else:
            for key, name, seed in long_runs(part):
                options = {**RANDOM, **WHOLE, "training.num_steps": STEPS[name], "training.seed": seed}
                self.run(key, name, options, is_last=True)

    def vocabulary(self, direction: Direction) -> Path:
        """Return the joint vocabulary of the training texts, which is trained if it is missing."""
        path = self.folder / f"{direction.folder}-{direction.pieces}.model"
        if not path.exists():
            name, languages = direction.names[0], sorted((direction.source, direction.target))
            texts = [str(self.data / direction.folder / f"{name}.{language}.gz") for language in languages]
            words = ["--kind", "bpe", "--vocab_size", str(direction.pieces), "--lower_case", "false"]
            # Each file is a document: with held-out documents, the vocabulary would lack a language.
            words += ["--eval_fraction", "0", "--output", str(path)]
            if code := data_main(["vocab", "--corpus", *texts, *words]):
                raise RuntimeError(f"bert-data vocab: exit code {code}")
        return path

    def run(
        self, key: str, name: str, options: Options, train: Path | None = None, *, is_last: bool = False
    ) -> None:
        """Make the run ``key`` of the direction ``name`` if it has no line. ``train``: file of records in place of
        all training pairs; ``is_last``: search with 5 hypotheses too, and keep the run."""
        if key in self.lines.found:
            return
        if time.time() > self.until:
            raise Stopped
        report(f"run {key}")
        direction, workdir = DIRECTIONS[name], self.folder / "runs" / key.replace("/", "-").replace(" ", "_")
        files: dict[str, Any] = {"data.dir": self.data / direction.folder}
        if train is None:
            files |= {"data.train": direction.pair(0), "data.dev": direction.pair(1)}
            files |= {"data.test": direction.pair(2)} if is_last else {}
        else:
            files = {"data.dir": train.parent, "data.train": train.name}
            files |= {"data.dev": "dev.jsonl", "data.test": "test.jsonl"}
        given = {
            **BASE, **files, "data.vocab": self.vocabulary(direction), "task.max_length": direction.max_length,
            "training.compilation_cache": self.folder / "compiled", **options,
        }  # fmt: skip
        if "init_from" in given:
            del given["data.vocab"]
        line = {"key": key, "options": {k: str(v) for k, v in options.items() if not isinstance(v, Path)}}
        line |= {"seconds": command("run_finetune.py", given, workdir), **scores(workdir)}
        if is_last:
            line |= self.searched(direction, workdir)
        self.lines.add(line)
        if not is_last:
            forget(workdir)

    def searched(self, direction: Direction, workdir: Path) -> dict[str, Any]:
        """Return BLEU and chrF of the test texts with 5 hypotheses, and the first translations."""
        sources, references = direction.texts(self.data, 2)
        bundle = load(workdir).bundle()
        assert bundle.spec.task is not None
        task = dataclasses.replace(bundle.spec.task, beams=5)
        model = prepare(dataclasses.replace(bundle, spec=dataclasses.replace(bundle.spec, task=task)))
        found = [one["label"] for one in model.predict(sources)]
        metrics = {
            f"beam5_{name}": round(value(corpus_score(name, found, references), len(found)), 2)
            for name in ("bleu", "chrf")
        }
        return {**metrics, "examples": [*zip(sources, references, found, strict=True)][:EXAMPLES]}

    def few(self, arm: str, network: str, seed: int) -> None:
        """Make the run of an arm with 1,000 pairs if it has no line. ``network``: a key of ``NETWORKS``."""
        direction, key = DIRECTIONS["de-en"], f"few/{arm}{network}/{seed}"
        if key in self.lines.found:
            return
        folder = self.folder / "few"
        folder.mkdir(parents=True, exist_ok=True)
        pairs = [[*zip(*direction.texts(self.data, place), strict=True)] for place in range(3)]
        order = permutation(len(pairs[0]), seed)[:FEW]
        parts = {f"train{seed}": [pairs[0][place] for place in order], "dev": pairs[1], "test": pairs[2]}
        for name, own in parts.items():
            rows = (json.dumps({"text": text, "label": label}) for text, label in own)
            (folder / f"{name}.jsonl").write_text("\n".join(rows) + "\n")
        start: Options = {**RANDOM, **NETWORKS[network][0]}
        if arm != PLAIN:
            start = {
                "init_from": self.pretrained(network),
                "decoder_from": "same" if arm == "both warm" else "random",
            }
        options = {**start, **SMALL, "training.seed": seed}
        self.run(key, "de-en", options, folder / f"train{seed}.jsonl")

    def pretrained(self, network: str) -> Path:
        """Return a masked language model of the training captions in both languages; it is trained if missing."""
        key = f"pretrained{network}"
        workdir = self.folder / "runs" / key.replace(", ", "-")
        if key not in self.lines.found or not workdir.exists():
            if time.time() > self.until:
                raise Stopped
            report(f"run {key}")
            direction, texts = DIRECTIONS["de-en"], self.folder / "texts"
            texts.mkdir(parents=True, exist_ok=True)
            for language in (direction.source, direction.target):
                path = self.data / direction.folder / f"{direction.names[0]}.{language}.gz"
                (texts / f"{language}.txt").write_text(unpacked(path))
            given = {
                **PRETRAINED, **NETWORKS[network][0], **NETWORKS[network][1],
                "data.corpus": texts, "data.shards": self.folder / f"shards{network}".replace(", ", "-"),
                "data.vocab": self.vocabulary(direction), "model.vocab_size": direction.pieces,
                "training.compilation_cache": self.folder / "compiled",
            }  # fmt: skip
            line = {"key": key, **pretrain(given, workdir)}
            rows = [json.loads(one) for one in (workdir / "metrics.jsonl").read_text().splitlines()]
            self.lines.add(line | {name: rows[-1][name] for name in ("step", "loss") if name in rows[-1]})
        return workdir


class Stopped(Exception):
    """The time for further runs is over."""


def scores(workdir: Path) -> dict[str, Any]:
    """Return the metrics of dev and test of a finished run by name, the step of the parameters, the seconds of its
    fastest step and of its median step."""
    found: dict[str, Any] = {}
    for entry in json.loads((workdir / "metrics.json").read_text()):
        found |= {f"{entry['split']}_{name}": round(one["value"], 4) for name, one in entry["metrics"].items()}
        found["best_step"] = entry["step"]
    rows = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    steps = sorted(row["seconds_per_step"] for row in rows if row.get("seconds_per_step"))
    curve = [[row["step"], round(row["bleu"], 2), round(row["nll"], 4)] for row in rows if "bleu" in row]
    return {
        **found, "step_seconds": round(steps[0], 4), "median_step_seconds": round(steps[len(steps) // 2], 4),
        "evaluations": curve,
    }  # fmt: skip


def print_table(lines: Lines) -> int:
    """Print the tables; return the number of missing lines."""
    wanted = [f"programs/{name}" for name in PROGRAMS]
    wanted += [key for part in ("whole", "other") for key, _, _ in long_runs(part)]
    wanted += [f"few/{arm}{network}/{seed}" for network in NETWORKS for arm in ARMS for seed in SEEDS]
    print(cells(("run", "steps", "s/step", "dev nll", "dev BLEU", "test BLEU, greedy", "test BLEU, 5", "test nll")))
    print(cells(["---"] * 8))
    names = ("step_seconds", "dev_nll", "dev_bleu", "test_bleu", "beam5_bleu", "test_nll")
    for key in wanted:
        line = lines.found.get(key)
        own = line or {}
        steps = own.get("options", {}).get("training.num_steps", "")
        print(cells([key, steps, *(own.get(one, "") for one in names)]))
    differences: dict[str, Sequence[float] | None] = {}
    for arm, network in ((f"{arm}{network}", network) for network in NETWORKS for arm in ARMS[1:]):
        plain = f"{PLAIN}{network}"
        both = [[lines.found.get(f"few/{one}/{seed}") for one in (arm, plain)] for seed in SEEDS]
        known = [(one["test_bleu"], other["test_bleu"]) for one, other in both if one and other]
        differences[arm] = [one - other for one, other in known] if len(known) == len(SEEDS) else None
    print(cells(("arm", "difference in test BLEU", "verdict")))
    print(cells(["---"] * 3))
    for arm, pair in verdicts(differences, BOUND).items():
        print(cells((arm, *pair)))
    return sum(key not in lines.found for key in wanted)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder of multi30k_de_en and captions3am_zh_en")
    parser.add_argument("--folder", type=Path, help="vocabularies, compiled programs and runs")
    parser.add_argument("--lines", type=Path, default=LINES, help="JSON lines of finished runs")
    parser.add_argument("--minutes", type=float, default=math.inf, help="start no run after this time")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=[*PARTS])
    parser.add_argument("--table", action="store_true", help="train nothing")
    options = parser.parse_args()
    lines = Lines(options.lines)
    if not options.table:
        if not (options.data and options.folder):
            parser.error("--data, --folder: name the data and a folder, or give --table")
        keep_to_cpu_without_accelerator()
        study = Study(options.data.resolve(), options.folder.resolve(), lines, time.time() + 60 * options.minutes)
        try:
            for part in options.parts:
                study.make(part)
        except Stopped:
            report("stopped: run the same command to continue")
    return report_missing(print_table(lines))


if __name__ == "__main__":
    sys.exit(main())
