"""Inputs of strangers: is each one read as its author means it, or refused in one line that names the cause?

    python benchmarks/cases.py FOLDER [--only WORD]

``FOLDER`` has the parts ``text/scripts`` (one file per script, beside ``english.txt``), ``text/formats`` (one
text in many formats), ``text/mixed`` (a folder of them), ``text``, ``tasks`` and ``files``. Every file of the first
three is a case, the others are named below. A case is *right* (the expected value), *named* (another value or code
2, with a line that names the cause), *silent* (neither), or a *traceback*. Exit code 3 if a case is silent or a
traceback.
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from harness import ROOT, environment, json_lines, write_json_lines

SECONDS = 300
MEMORY = 16 << 30  # bytes of address space of a command; a file that states huge sizes must not fill it
SHARDS = (
    "--vocab_size 300 --seq_length 64 --max_predictions 10 --dupe_factor 1 --num_shards 1 --workers 1 --output out"
)
# Documents of the text in ``formats`` and of each file in ``mixed``, sentences of a document of ``scripts``.
DOCUMENTS, SENTENCES = 40, 32
RANDOM_NEXT_WITHIN = 0.05


@dataclass
class Ran:
    """Exit code and output of a command."""

    code: int
    output: str


# What a case yields: the value to judge ("" for none), and the command that ended last.
Result = tuple[str, Ran]


@dataclass
class Case:
    """One input: ``run`` executes the commands in an empty folder."""

    name: str
    expected: str
    run: Callable[[Path], Result]
    # The right value, or a function that returns True for it; None: no value is right.
    right: str | Callable[[str], bool] | None
    cause: str  # regular expression of a line that names the cause

    def judge(self, folder: Path) -> tuple[str, str]:
        """Return the verdict and the value."""
        value, ran = self.run(folder)
        if "Traceback (most recent call last)" in ran.output:
            return "TRACEBACK", ran.output.strip().splitlines()[-1][:100]
        if ran.code == 0 and (self.right(value) if callable(self.right) else value == self.right):
            return "right", value
        named = next((line for line in ran.output.splitlines() if re.search(self.cause, line, re.IGNORECASE)), "")
        if named and ran.code in (0, 2):
            verdict = "right" if ran.code == 2 and self.expected == "refused" else "named"
            return verdict, f"{value[:60]} | {named[:140]}"
        return "SILENT", f"code {ran.code}: {value[:120] or ran.output.strip()[-160:]}"


def existing(root: Path, named: Mapping[str, tuple[str, Callable[..., Result], Any, str]]) -> Iterator[Case]:
    """Yield the cases of the files in ``root`` that exist, by name: (expected, run(folder, file), right, cause)."""
    for name, (expected, run, right, cause) in named.items():
        if (root / name).exists():
            yield Case(f"{root.name}/{name}", expected, partial(run, file=root / name), right, cause)


def command(folder: Path, *words: object) -> Ran:
    """Run a command of the checkout in ``folder``, below a limit of memory and time."""
    programs = {"bert-jax": "bert_jax.commands.main", "bert-data": "bert_jax.commands.data"}
    start = (
        [sys.executable, "-c", f"import sys; from {programs[words[0]]} import main; sys.exit(main())"]
        if words[0] in programs
        else [sys.executable, ROOT / words[0]]
    )
    shell = ["bash", "-c", f'ulimit -v {MEMORY >> 10}; exec "$@"', "bash"]
    try:
        done = subprocess.run(
            [*shell, *map(str, (*start, *words[1:]))], cwd=folder, env=environment(), capture_output=True,
            text=True, errors="replace", timeout=SECONDS, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return Ran(124, f"no end after {SECONDS} s")
    return Ran(done.returncode, done.stdout + done.stderr)


def built(folder: Path, file: Path, *more: object) -> tuple[dict[str, float], Ran]:
    """Build shards of ``file``; return documents, sentences, records and the share of random-next pairs."""
    ran = command(folder, "bert-data", "shards", "--corpus", file, *SHARDS.split(), *more)
    if ran.code:
        return {}, ran
    store = json.loads((folder / "out" / "store" / "store.json").read_text(encoding="utf-8"))
    shown = command(folder, "bert-data", "inspect", "out/train", "--records", "100000").output

    def number(pattern: str, otherwise: float = 0.0) -> float:
        found = re.search(pattern, shown, re.MULTILINE)
        return float(found[1].replace(",", "")) if found else otherwise

    return {
        "documents": store["documents"],
        "sentences": store["sentences"] / store["documents"],
        "records": number(r"^records\s+([\d,]+)"),
        "random": number(r"random next share\s+([\d.]+) of", -1.0),
        "predictions": number(r"^predictions\s+([\d,]+)"),
    }, ran


def reads(*words: str) -> Callable[[Path, Path], Result]:
    """Return the run of a case whose command ends with the file."""
    return lambda folder, file: ("read", command(folder, *words, file))


def shards(folder: Path, file: Path, *more: object, shown: str) -> Result:
    """Build shards; return the text ``shown`` with their figures."""
    result, ran = built(folder, file, *more)
    some = "some" if result.get("predictions") else "no"
    return (shown.format(**result, some=some) if result else ""), ran


documents = partial(shards, shown="{documents:.0f} documents")
predictions = partial(shards, shown="built, {some} predictions")


@dataclass
class Texts:
    """Cases of text for pretraining."""

    root: Path
    reference: dict[str, float] = field(default_factory=dict)

    def cases(self) -> Iterator[Case]:
        """Yield the cases of every file."""
        for file in sorted((self.root / "scripts").glob("*")):
            yield Case(
                f"text/scripts/{file.name}", f"{SENTENCES} sentences, random-next as English",
                partial(self._script, file=file), lambda value: value.endswith("as English"),
                r"random.next|sentence",
            )  # fmt: skip
        for file in sorted((self.root / "formats").glob("*")):
            has_suffix, count = file.suffix.strip("."), f"{DOCUMENTS} documents"
            cause = rf"{re.escape(file.name)}.*(not|convert|read|left out)" if has_suffix else r"left out|<doc"
            yield Case(f"text/formats/{file.name}", count, partial(documents, file=file), count, cause)
        if (mixed := self.root / "mixed").is_dir():
            count = f"{DOCUMENTS * len(list(mixed.iterdir()))} documents"
            yield Case("text/mixed", count, partial(documents, file=mixed), count, r"left out")
        english, dna = self.root / "scripts/english.txt", self.root / "dna.txt"
        built_some = "built, some predictions"
        yield from existing(self.root, {
            "toc_then_paragraphs.txt": (
                "random-next at most 0.66", partial(shards, shown="random-next {random:.2f}, {records:.0f} rows"),
                lambda value: bool(value) and float(value.split()[1].strip(",")) <= 0.66, r"data.line",
            ),
            "dna_long.txt": ("refused", predictions, None, r"\[UNK\]|unknown"),
            "dna_vocab.txt": (
                "refused, or some predictions",
                lambda folder, file: predictions(folder, dna, "--vocab", file, "--mask_unit", "whole_word"),
                built_some, r"no token is predicted",
            ),
            "bert_tokenizer.json": (
                "built", lambda folder, file: predictions(folder, english, "--vocab", file), built_some, r"^$",
            ),
        })  # fmt: skip

    def _script(self, folder: Path, file: Path) -> Result:
        if not self.reference:
            self.reference, ran = built(folder / "reference", self.root / "scripts" / "english.txt")
        result, ran = built(folder, file)
        if not result:
            return "", ran
        near = abs(result["random"] - self.reference["random"]) <= RANDOM_NEXT_WITHIN
        close = abs(result["sentences"] - SENTENCES) <= 0.1 * SENTENCES
        text = f"{result['sentences']:.1f} sentences, random-next {result['random']:.2f}"
        return f"{text}{', as English' if near and close else ''}", ran


@dataclass
class Tasks:
    """Cases of task files: a run of two steps from a tiny model, whose labels or lines are judged."""

    root: Path
    model: Path

    def cases(self) -> Iterator[Case]:
        """Yield the cases of every file."""
        classes, several, tags = (
            partial(self._labels, kind=kind) for kind in ("classification", "multi_label", "tagging")
        )
        with_dev = partial(classes, dev=0.2)
        yield from existing(self.root, {
            "multihot.jsonl": (
                "3 classes", partial(several, dev=0.2), lambda value: len(set(value.split(","))) == 3,
                r"multi-hot|0/1|repeat",
            ),
            "pandas_list.csv": (
                "wet, windy", several,
                lambda value: {"wet", "windy", "dry"} <= set(value.split(",")) and "[" not in value, r"list",
            ),
            "pandas_words.csv": ("B-ORG, O", tags, lambda value: set(value.split(",")) == {"B-ORG", "O"}, r"list"),
            "nan.jsonl": ("NaN is missing", self._nan, "missing", r"NaN.*(missing|no label)"),
            "semi.csv": ("0,1", classes, "0,1", r"delimiter"),
            "cr.csv": ("0,1", classes, "0,1", r"carriage|CR"),
            "backslash.csv": ("0,1", classes, "0,1", r"backslash"),
            "swap.csv": ("warned", with_dev, None, r"(as many|6\d|48) (classes|records)|one record|columns"),
            "zwsp.csv": ("warned", with_dev, None, r"equal|invisible|format"),
            "nfd.csv": ("warned", with_dev, None, r"equal|normali"),
            "int12.jsonl": ("0 to 11 in order", classes, ",".join(map(str, range(12))), r"^$"),
            "reg_test_minus1.jsonl": ("not scored", self._hidden, "not scored", r"hidden"),
            "squad_utf16_offsets.json": (
                "counted and named", partial(self._run, kind="qa"), None,
                r"answer.*(offset|answer_start|stand|left out)",
            ),
            "p2.jsonl": ("chance", self._equal_vectors, "chance", r"vectors.*equal|collapsed"),
            "train2.jsonl": ("said before training", self._one_class, None, r"auroc.*(undefined|one class)"),
            "sq_train.json": ("predict as the run", self._answers, "equal", r"^$"),
            "ctx_train.conll": ("as the run", self._tags, "equal", "documents of the words"),
        })  # fmt: skip

    def _run(self, folder: Path, file: Path, *more: object, kind: str, dev: float = 0.0) -> Result:
        share = ("--data.dev_fraction", dev) if dev else ()
        return "trained", command(
            folder, "run_finetune.py", "--task.kind", kind, "--data.train", file, *share, "--init_from", self.model,
            "--task.max_length", 32, "--training.num_steps", 2, "--workdir", "run", *more,
        )  # fmt: skip

    def _labels(self, folder: Path, file: Path, kind: str, dev: float = 0.0) -> Result:
        is_table = kind == "classification" and file.suffix == ".csv"
        columns = ("--data.columns", "text=text", "label=label") if is_table else ()
        _, ran = self._run(folder, file, *columns, kind=kind, dev=dev)
        if ran.code:
            return "", ran
        from bert_jax.config.loader import read_settings

        keys = ("data.labels", "data.tags")
        settings = read_settings(["--config", str(folder / "run" / "config.yaml")]).all
        values = [str(setting.value) for setting in settings if setting.key in keys]
        found = next((value for value in values if value.strip("[]() ")), "")
        return ",".join(part.strip(" '\"") for part in found.strip("[]").split(",")), ran

    def _nan(self, folder: Path, file: Path) -> Result:
        options = ("--kind", "classification", "--columns", "text=text", "label=label")
        ran = command(folder, "bert-data", "records", file, *options)
        return ("class NaN" if '"NaN"' in ran.output else "missing"), ran

    def _hidden(self, folder: Path, file: Path) -> Result:
        _, ran = self._run(folder, self.root / "reg.jsonl", "--data.test", file, kind="regression")
        metrics = folder / "run" / "metrics.json"
        scored = metrics.exists() and '"mse"' in metrics.read_text(encoding="utf-8")
        return ("scored" if scored else "not scored"), ran

    def _one_class(self, folder: Path, file: Path) -> Result:
        dev = ("--data.dev", self.root / "dev_single.jsonl", "--task.metric", "auroc")
        return self._run(folder, file, *dev, kind="classification")

    def _equal_vectors(self, folder: Path, file: Path) -> Result:
        import numpy as np
        from safetensors.numpy import load_file, save_file

        model = folder / "flat"
        shutil.copytree(self.model, model)
        tensors = load_file(model / "model.safetensors")
        name = next(name for name in tensors if name.endswith("layer.0.output.LayerNorm.weight"))
        tensors[name] = np.zeros_like(tensors[name])
        save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
        dev = ("--data.dev", self.root / "p2_dev.jsonl", "--sentence.loss", "negatives")
        columns = ("--data.columns", "text=text", "text_pair=text_pair")
        still = ("--optimizer.learning_rate", "1e-12", "--init_from", model)
        _, ran = self._run(folder, file, *dev, *columns, *still, kind="sentence")
        scores = re.findall(r"\bmrr[\"':= ]+([\d.]+)", ran.output)
        return ("chance" if scores and float(scores[-1]) < 0.03 else f"mrr {scores[-1:]}"), ran

    def _answers(self, folder: Path, file: Path) -> Result:
        dev = self.root / "sq_dev.json"
        lines = [
            {"id": question["id"], "text": question["question"], "text_pair": paragraph["context"]}
            for article in json.loads(dev.read_text(encoding="utf-8"))["data"]
            for paragraph in article["paragraphs"]
            for question in paragraph["qas"]
        ]
        options = ("--data.dev", dev, "--qa.no_answer", "true", "--qa.null_threshold", "-1000")
        _, ran = self._run(folder, file, *options, kind="qa")
        return self._compared(folder, ran, lines, lambda line: line["answer"])

    def _tags(self, folder: Path, file: Path) -> Result:
        options = ("--data.dev", self.root / "ctx_dev.conll", "--tagging.document_context", "true")
        options += ("--training.num_steps", "400", "--optimizer.learning_rate", "1e-2")
        _, ran = self._run(folder, file, *options, kind="tagging")
        lines = json_lines(self.root / "ctx_dev_words.jsonl")
        return self._compared(folder, ran, lines, lambda line: [token["label"] for token in line["tokens"]])

    def _compared(
        self, folder: Path, ran: Ran, lines: list[dict[str, Any]], value: Callable[[dict[str, Any]], object]
    ) -> Result:
        if ran.code:
            return "", ran
        write_json_lines(folder / "inputs.jsonl", lines)
        files = ("--input", "inputs.jsonl", "--output", "out.jsonl")
        more = command(folder, "bert-jax", "predict", "--model", "run", *files)
        if more.code:
            return "", more
        run, predicted = json_lines(folder / "run" / "predictions_dev.jsonl"), json_lines(folder / "out.jsonl")
        differ = sum(value(a) != value(b) for a, b in zip(run, predicted, strict=True))
        return (f"{differ} of {len(run)} differ" if differ else "equal"), more


def vector(folder: Path, file: Path) -> Result:
    ran = command(folder, "bert-jax", "embed", "--model", file, "中国")
    answer = next((line for line in ran.output.splitlines() if "embedding" in line), "")
    numbers = re.findall(r"-?\d+\.\d+(?:e-?\d+)?", answer)
    return str([round(float(number), 4) for number in numbers]), ran


def of_files(root: Path) -> Iterator[Case]:
    """Yield the cases of models and configs."""
    embed, config = ("bert-jax", "embed", "the cat", "--model"), ("run_pretrain.py", "--print_config", "--config")
    yield from existing(root, {
        "chinese_word_vectors.txt": ("[0.1, 0.2, 0.3]", vector, "[0.1, 0.2, 0.3]", r"中国"),
        "layers_bomb": ("refused", reads(*embed), None, r"num_hidden_layers|num_layers"),
        "y4.yaml": ("refused", reads(*config), None, r"y4\.yaml"),
        "y11.yaml": ("refused", reads(*config), None, r"y11.*num_layers"),
        "xlnet_config": ("refused", reads("bert-jax", "import", "--to", "out", "--from"), "read", r"xlnet"),
    })  # fmt: skip


def sound_model(files: Path, folder: Path) -> Path:
    """Copy the tiny BERT of ``layers_bomb`` with the number of layers that its tensors have."""
    model = folder / "model"
    shutil.copytree(files / "layers_bomb", model)
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    (model / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1}), encoding="utf-8")
    return model


def main() -> int:
    """Judge every case; print the table; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", default="", help="only the cases whose name contains this")
    arguments = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    root = arguments.folder.resolve()
    counts: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as scratch:
        model = sound_model(root / "files", Path(scratch))
        groups = (Texts(root / "text").cases(), Tasks(root / "tasks", model).cases(), of_files(root / "files"))
        cases = [case for group in groups for case in group if arguments.only in case.name]
        for number, case in enumerate(cases):
            folder = Path(scratch) / str(number)
            (folder / "reference").mkdir(parents=True)
            verdict, value = case.judge(folder)
            counts[verdict] = counts.get(verdict, 0) + 1
            print(f"{verdict:9} {case.name:40} expected {case.expected}; got {value}", flush=True)
    print(json.dumps(counts))
    return 3 if counts.get("SILENT") or counts.get("TRACEBACK") else 0


if __name__ == "__main__":
    sys.exit(main())
