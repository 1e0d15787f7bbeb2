"""Small pretraining runs that are compared: their text, their held-out rows, the processes that train, the lines of
finished runs, and differences paired over seeds."""

import contextlib
import json
import math
import shutil
import statistics
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from scipy import stats

from bert_jax.config import PretrainConfig, load_config
from bert_jax.interop.readers import read_weights
from bert_jax.model import from_canonical
from bert_jax.objectives.registry import objective_class
from bert_jax.tokenization import load_tokenizer
from bert_jax.training.state import initial_params
from bert_jax.training.step import make_eval_step
from data_pipeline.build.ensure import ensure_data
from data_pipeline.read.pretrain_input import ShardSource
from data_pipeline.text.corpus import list_sources
from data_pipeline.text.documents import read_documents

REPOSITORY = Path(__file__).resolve().parents[2]
# Shares of the documents, in thousandths, on which rates are chosen and results are measured.
RATES_SHARE, RESULTS_SHARE = 20, 40
MOST = 1_000_000  # bytes of each, so that small networks are not evaluated for longer than they train
EVALUATED_SHARE = 0.15  # of the tokens of held-out rows is masked, whatever a run masks
ROWS = 64  # of a held-out batch
TRAINED = 1.0  # nats under the unigram distribution, from which a run counts as trained

Options = Mapping[str, Any]


def report(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def report_missing(count: int) -> int:
    """Return the exit code of a table without the results of ``count`` runs: 3, and a line, if there are any."""
    if count:
        report(f"{count} results are missing")
    return 3 if count else 0


def words_of(options: Options) -> list[str]:
    """Return the options as words of a command line; a tuple or list is several words."""
    words = []
    for name, value in options.items():
        several = value if isinstance(value, tuple | list) else (value,)
        words += [f"--{name}", *map(str, several)]
    return words


# ------------------------------------------------------------------ text and rows


@dataclass(frozen=True)
class Text:
    """The text of ``corpus`` in ``folder``: documents for training, for the choice of rates and for results (by a
    hash of their content; beyond ``MOST`` bytes the rest is left out), and a vocabulary of the training
    documents."""

    corpus: tuple[str, ...]
    folder: Path
    vocab_size: int

    @property
    def vocabulary(self) -> Path:
        return self.folder / "vocab.txt"

    def part(self, name: str) -> Path:
        return self.folder / f"{name}.txt"

    def prepare(self) -> None:
        """Write the files if they are missing. Raises ``ValueError`` if the folder holds another text."""
        note, given = self.folder / "text.json", json.dumps([*self.corpus, self.vocab_size])
        if note.exists():
            if note.read_text() != given:
                raise ValueError(f"{self.folder}: made from {note.read_text()}, not {given}; use another --folder")
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as stack:
            names = ("train", "rates", "results")
            files = {name: stack.enter_context(self.part(name).open("w", encoding="utf-8")) for name in names}
            for source in list_sources(self.corpus):
                for document in read_documents(source, line="auto", json_field="text"):
                    text = "\n".join(document)
                    place = zlib.crc32(text.encode()) % 1000
                    results = RATES_SHARE <= place < RATES_SHARE + RESULTS_SHARE
                    name = "rates" if place < RATES_SHARE else "results" if results else "train"
                    if name == "train" or files[name].tell() < MOST:
                        files[name].write(f"{text}\n\n")
        self.vocabulary.unlink(missing_ok=True)  # of a command that was killed before it wrote its note
        data = self._config("train", {}, self.folder / "vocabulary").data
        partial = self.vocabulary.with_suffix(".partial")
        shutil.copy(ensure_data(data, vocab_size=self.vocab_size, report=report), partial)
        partial.replace(self.vocabulary)
        note.write_text(given)

    def _config(self, part: str, options: Options, shards: Path) -> PretrainConfig:
        known = {"data.vocab": self.vocabulary} if self.vocabulary.exists() else {}
        fixed = {
            "data.corpus": self.part(part), "data.shards": shards, "data.masking": "dynamic", "data.dupe_factor": 1,
            "data.num_shards": 1, "data.eval_fraction": 0, "data.next_sentence": "none",
            "model.vocab_size": self.vocab_size,
        }  # fmt: skip
        return load_config(PretrainConfig, words_of({**fixed, **known, **options}))

    def rows(self, part: str, seq_length: int, next_sentence: str = "none") -> "Rows":
        """Return held-out rows of ``seq_length`` tokens from the documents of ``part`` (rates or results)."""
        options = {
            "data.seq_length": seq_length, "model.max_position_embeddings": seq_length,
            "data.mask_fraction": EVALUATED_SHARE, "data.max_predictions": math.ceil(EVALUATED_SHARE * seq_length),
            "data.next_sentence": next_sentence,
        }  # fmt: skip
        name = f"{next_sentence}-{seq_length}"
        folders = {each: self.folder / f"rows-{each}-{name}" for each in ("train", part)}
        for each, folder in folders.items():
            config = self._config(each, options, folder)
            ensure_data(config.data, vocab_size=self.vocab_size, report=report)
        held_out = {"data.eval_shards": folders[part] / "train"}
        return Rows(self._config("train", options | held_out, folders["train"]), self.vocabulary)


class Rows:
    """Held-out rows, the same for every run. ``unigram``: loss of the distribution of the training targets."""

    def __init__(self, config: PretrainConfig, vocabulary: Path) -> None:
        self.config = config
        self.tokenizer = load_tokenizer(vocabulary, lower_case=config.data.lower_case)
        self._source = ShardSource(config, self.tokenizer)
        self.unigram = self._source.unigram_cross_entropy() or 0.0

    def batches(self) -> Iterator[dict[str, np.ndarray]]:
        return iter(self._source.held_out(ROWS, list(range(ROWS)), 0) or ())

    def of_input(self, batch: dict[str, np.ndarray], name: str) -> dict[str, np.ndarray]:
        """Return the batch with those predictions alone in whose place the row has [MASK] (``name`` mask), the
        token itself (unchanged) or another token (random)."""
        there = np.take_along_axis(batch["input_ids"], batch["mlm_positions"], axis=1)
        mask, unchanged = there == self.tokenizer.mask_id, there == batch["mlm_labels"]
        kept = {"mask": mask, "unchanged": unchanged, "random": ~mask & ~unchanged}[name]
        return batch | {"mlm_weights": batch["mlm_weights"] * kept}

    def evaluate(self, workdir: Path, of_input: str | None = None) -> dict[str, float]:
        """Return loss and accuracy of the newest parameters in ``workdir``: of masked tokens (all, or those of
        ``of_input``), or of every next token with the objective causal_lm."""
        config = load_config(PretrainConfig, ["--config", str(workdir / "config.yaml")])
        objective = objective_class(config.objective)(config, None)
        weights = dict(read_weights(workdir).params)
        params = from_canonical(weights, initial_params(objective.model, 0), config.model.vocab_size)
        eval_step = jax.jit(make_eval_step(objective))
        totals: dict[str, np.ndarray] = {}
        for batch in self.batches():
            chosen = batch if of_input is None else self.of_input(batch, of_input)
            for name, pair in eval_step(params, chosen, objective.fixed).items():
                totals[name] = totals.get(name, np.zeros(2)) + np.asarray(pair, np.float64)
        values = objective.evaluation(totals)
        names = ("mlm_loss", "mlm_accuracy", "lm_loss", "lm_accuracy", "targets")
        return {name: values[name] for name in names if name in values}


# ------------------------------------------------------------------ runs


class Lines:
    """JSON lines of finished runs in a file, found by their ``key``."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.found: dict[str, dict[str, Any]] = {}
        if path.exists():
            for text in path.read_text().splitlines():
                with contextlib.suppress(json.JSONDecodeError):  # the last line of a killed process
                    line = json.loads(text)
                    self.found[line["key"]] = line

    def add(self, line: dict[str, Any]) -> None:
        self.found[line["key"]] = line
        self.path.parent.mkdir(parents=True, exist_ok=True)
        is_cut = self.path.exists() and not self.path.read_bytes().endswith(b"\n")
        with self.path.open("a") as file:
            file.write("\n" * is_cut + json.dumps(line) + "\n")
        print(json.dumps(line), flush=True)


def command(script: str, options: Options, workdir: Path) -> float:
    """Make or continue the run of ``script`` in ``workdir``; return the seconds of this command.

    Raises ``RuntimeError`` if the run fails, and ``FloatingPointError`` if its loss is not finite.
    """
    words = [sys.executable, str(REPOSITORY / script), *words_of(options), "--workdir", str(workdir)]
    workdir.parent.mkdir(parents=True, exist_ok=True)
    log_file = workdir.with_name(f"{workdir.name}.log")
    began = time.perf_counter()
    with log_file.open("w") as log:
        code = subprocess.run(words, stdout=log, stderr=subprocess.STDOUT).returncode
    if code == 44:
        raise FloatingPointError(f"{workdir}: the loss is not finite")
    if code:
        raise RuntimeError(f"exit code {code}: {' '.join(words)}\n{log_file.read_text()[-2000:]}")
    return round(time.perf_counter() - began, 1)


def pretrain(options: Options, workdir: Path) -> dict[str, float]:
    """Make or continue the run in ``workdir`` with ``command``; return the seconds of this command and of a step.

    The seconds of a step are those of the fastest interval between log lines, which other work on the machine
    disturbs least.
    """
    seconds = command("run_pretrain.py", options, workdir)
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    steps = [line["seconds_per_step"] for line in lines if line.get("seconds_per_step")]
    return {"seconds": seconds, "step_seconds": round(min(steps), 5) if steps else math.nan}


def forget(workdir: Path) -> None:
    """Delete a finished run, whose results are stored."""
    shutil.rmtree(workdir, ignore_errors=True)
    workdir.with_name(f"{workdir.name}.log").unlink(missing_ok=True)


def best_rate(
    lines: Lines, runs: Path, keys: Mapping[float, str], loss: str, run: Callable[[float, Path], Mapping[str, Any]]
) -> float:
    """Return the rate with the lowest ``loss``. ``keys``: the key of the line of each rate; a line that is missing
    is made by ``run`` from the rate and a workdir in the folder ``runs``, which is deleted. A loss that is not
    finite counts as infinite."""
    for rate, key in keys.items():
        if key not in lines.found:
            report(f"run {key}")
            workdir, line = runs / key.replace("/", "-"), {"key": key, loss: math.inf}
            try:
                line |= run(rate, workdir)
            except FloatingPointError:
                report(f"{key}: the loss is not finite")
            forget(workdir)
            lines.add(line)
    return min(keys, key=lambda rate: lines.found[keys[rate]][loss])


# ------------------------------------------------------------------ differences


@dataclass(frozen=True)
class Paired:
    """Mean of paired differences, half the width of its 95% interval (Student's t), and its standard error; the
    last two are not a number for one difference."""

    mean: float
    half: float
    error: float = math.nan

    @property
    def is_clear(self) -> bool:
        return abs(self.mean) > self.half

    def __str__(self) -> str:
        return f"{self.mean:+.3f} ± {self.half:.3f}" if self.half == self.half else f"{self.mean:+.3f}"


def paired(differences: Sequence[float]) -> Paired:
    n = len(differences)
    if n < 2:
        return Paired(statistics.mean(differences), math.nan)
    error = statistics.stdev(differences) / math.sqrt(n)
    return Paired(statistics.mean(differences), float(stats.t.ppf(0.975, n - 1)) * error, error)


def cells(values: Sequence[Any]) -> str:
    return f"| {' | '.join(map(str, values))} |"
