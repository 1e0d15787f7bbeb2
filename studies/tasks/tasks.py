"""One run of all-MiniLM-L6-v2 on every task whose data are at hand, beside the constant answer and a baseline.

    python studies/tasks/tasks.py --model MINILM --data DIR --folder DIR [--minutes N] [--tasks cola rte]
    python studies/tasks/tasks.py --table

A tenth of the training records selects the parameters. The scored texts are those of the official dev or test file,
or are split off where there is no such file. Baselines: for classes and values a linear model on TF-IDF vectors;
for tags the most frequent tag of each word; for questions the sentence of the passage with the highest TF-IDF
cosine; for choices the one with the highest cosine. The zero-shot rows use the model that the row ``sick`` trains;
beside them is the label whose words have the highest cosine with the text, by the vectors of MINILM.

The command may be stopped and started again: a finished row is a line of tasks.jsonl, and a cut run resumes.
--minutes: start no row after this time. Exit code 3 if rows are missing.
"""

import argparse
import collections
import json
import re
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "shared"), str(Path(__file__).resolve().parents[2])]
import numpy as np
from sklearn.feature_extraction.text import TfidfVectorizer
from small_runs import REPOSITORY, Lines, Options, cells, command, report, report_missing
from small_samples import Texts, qnli, sick, tfidf_answers
from small_samples import table as read_table

import bert_jax
from bert_jax.config import load_config
from bert_jax.config.finetune import FinetuneConfig
from bert_jax.config.options import extended
from bert_jax.finetuning.artifacts import read_results
from bert_jax.hashing import permutation
from bert_jax.metrics import Score
from bert_jax.metrics.classification import classification_scores
from bert_jax.metrics.correlation import regression_scores
from bert_jax.metrics.entities import tagging_scores
from bert_jax.metrics.resampling import confidence_intervals
from bert_jax.metrics.retrieval import unit_vectors
from bert_jax.metrics.score import mean_score
from bert_jax.metrics.squad import squad_scores
from bert_jax.process.accelerators import keep_to_cpu_without_accelerator
from bert_jax.records import Record
from data_pipeline.tasks import read_splits

LINES = Path(__file__).with_name("tasks.jsonl")
ALL = 10**6
Values = dict[str, list[float]]  # metric -> value and bounds of its 95% interval


@dataclass(frozen=True)
class Task:
    """A row. ``folder``: folder of its files in the data; ``write``: function from the data and a new folder, which
    then holds the files, instead of ``folder``; ``metrics``: those of the table, of each split; ``options``: beside
    the recipe."""

    recipe: str
    metrics: tuple[str, ...]
    options: Options
    folder: str = ""
    write: Callable[[Path, Path], None] | None = None


@dataclass(frozen=True)
class ZeroShot:
    """A row of zero-shot classification. ``texts``: function from the data to pairs of text and label; ``labels``:
    the words of each label."""

    texts: Callable[[Path], list[tuple[str, str]]]
    labels: Mapping[str, str]
    template: str
    metrics: tuple[str, ...] = field(default=("accuracy", "f1_macro"))


# ------------------------------------------------------------------ files


def write_squad(data: Path, folder: Path) -> None:
    """Write the files of studies/finetuning/squad_split.py, in which ten articles are held out."""
    script = REPOSITORY / "studies/finetuning/squad_split.py"
    files = ["--squad", str(data / "squad"), "--xquad", str(data / "xquad/xquad.en.json"), "--out", str(folder)]
    subprocess.run([sys.executable, str(script), *files], check=True, stdout=subprocess.DEVNULL)


def write_texts(texts: Texts, folder: Path) -> None:
    for name, records in (("train", texts.train), ("test", [*texts.choice, *texts.results])):
        lines = "".join(json.dumps(record) + "\n" for record in records)
        (folder / f"{name}.jsonl").write_text(lines, encoding="utf-8")


def write_absa(data: Path, folder: Path) -> None:
    """Write tables from files that have three lines for an aspect: the sentence with $T$ in its place, the aspect,
    and -1, 0 or 1."""
    for name, source in (("train", "Restaurants_Train"), ("test", "Restaurants_Test_Gold")):
        lines = (data / f"absa_restaurants/{source}.xml.seg").read_text(encoding="utf-8").splitlines()
        rows = zip(*[map(str.strip, lines)] * 3, strict=True)
        table = "".join(f"{text.replace('$T$', aspect)}\t{aspect}\t{label}\n" for text, aspect, label in rows)
        (folder / f"{name}.tsv").write_text(f"sentence\taspect\tsentiment\n{table}", encoding="utf-8")


def write_choices(data: Path, folder: Path) -> None:
    """Write every fifth question as the scored file."""
    head, *rows = (data / "multiple_choice/easy_train.csv").read_text(encoding="utf-8").splitlines(keepends=True)
    order = permutation(len(rows), 0)
    cut = len(rows) // 5
    for name, places in (("val", order[:cut]), ("train", order[cut:])):
        (folder / f"{name}.csv").write_text(head + "".join(rows[i] for i in sorted(places)), encoding="utf-8")


def some(file: Path, labels: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return at most 20 texts of each label."""
    records = read_table(file, text="sentence", label="label")
    left = collections.Counter(dict.fromkeys(labels, 20))
    kept = []
    for place in permutation(len(records), 0):
        text, label = records[place]["text"], records[place]["label"]
        if left[label] > 0:
            left[label] -= 1
            kept.append((text, label))
    return kept


def intents(data: Path) -> list[tuple[str, str]]:
    """Return the texts of SNIPS dev."""
    folder = data / "intent_slot/snips/valid"
    texts, labels = ((folder / name).read_text(encoding="utf-8").splitlines() for name in ("seq.in", "label"))
    return [(text.strip(), label.strip()) for text, label in zip(texts, labels, strict=True)]


# ------------------------------------------------------------------ rows


def settings(rate: float, epochs: float, batch: int = 32, **data: Any) -> Options:
    """Return options: a tenth of the training records as dev, those of ``data``, and the pooling with which MINILM
    was trained, for heads that read the whole text."""
    named = {"dev": (), "dev_fraction": 0.1, **data}
    return {
        **{f"data.{name}": value for name, value in named.items()}, "optimizer.learning_rate": rate,
        "training.num_epochs": epochs, "training.global_batch_size": batch, "training.checkpoint_interval": 100,
        "model.pooling": "mean",
    }  # fmt: skip


PAIR = ("text=sentence1", "text_pair=sentence2")
JSON_LINES = {"train": "train.jsonl", "test": "test.jsonl", "columns": ()}
NEWS = {
    "earn": "company earnings", "acq": "a company takeover", "trade": "foreign trade", "crude": "crude oil",
    "money-fx": "currencies and exchange rates", "interest": "interest rates", "ship": "ships and shipping",
    "grain": "grain",
}  # fmt: skip
INTENTS = {
    "AddToPlaylist": "adding a song to a playlist", "BookRestaurant": "booking a restaurant",
    "GetWeather": "the weather", "PlayMusic": "playing music", "RateBook": "rating a book",
    "SearchCreativeWork": "finding a film, book, song or game", "SearchScreeningEvent": "movie times",
}  # fmt: skip
LANGUAGES = {
    "de": "German", "en": "English", "es": "Spanish", "fr": "French", "it": "Italian", "ja": "Japanese",
    "nl": "Dutch", "pl": "Polish", "pt": "Portuguese", "ru": "Russian", "zh": "Chinese",
}  # fmt: skip

ROWS: dict[str, Task | ZeroShot] = {
    "squad1": Task("squad1", ("f1", "exact"), {**settings(
        3e-4, 3, 16, group_by="article", test=("dev-v1.1.json", "xquad.en.json")), "model.pooling": "first"},
        write=write_squad),
    "cola": Task("cola", ("matthews", "accuracy"), settings(
        2e-4, 4, columns=("text=4", "label=2"), test="dev.tsv"), "glue/CoLA"),
    "rte": Task("rte", ("accuracy",), settings(
        2e-4, 2, 16, columns=(*PAIR, "label=label"), test="dev.tsv"), "glue/RTE"),
    "stsb": Task("stsb", ("spearman", "pearson"), settings(
        1e-4, 1, 16, columns=(*PAIR, "label=score"), test="dev.tsv"), "glue/STS-B"),
    "wnli": Task("wnli", ("accuracy",), settings(
        1e-4, 5, 16, columns=(*PAIR, "label=label"), test="dev.tsv"), "glue/WNLI"),
    "qnli": Task("qnli", ("accuracy",), settings(1e-4, 1, 16, **JSON_LINES),
        write=lambda data, folder: write_texts(qnli(data, 0, ALL), folder)),
    "sick": Task("sick", ("accuracy", "f1_macro"), settings(1e-4, 2, 16, **JSON_LINES),
        write=lambda data, folder: write_texts(sick(data, 0, ALL), folder)),
    "absa": Task("absa", ("accuracy", "f1_macro"), settings(
        2e-4, 3, 16, test="test.tsv", group_by="document"), write=write_absa),
    "sms_spam": Task("csv", ("f1", "accuracy"), settings(
        1e-4, 2, train="train.tsv", columns=("text=sentence", "label=label"), test="test.tsv"), "sms_spam"),
    "zero-shot news": ZeroShot(
        lambda data: some(data / "reuters_r8/test.tsv.gz", NEWS), NEWS, "This text is about {}."),
    "zero-shot languages": ZeroShot(
        lambda data: some(data / "langid/dev.tsv", LANGUAGES), LANGUAGES, "This text is written in {}."),
    "zero-shot intents": ZeroShot(intents, INTENTS, "Someone is asking about {}."),
    "reuters_r8": Task("csv", ("accuracy", "f1_macro"), {**settings(
        2e-4, 2, 16, train="train.tsv.gz", columns=("text=sentence", "label=label"), test="test.tsv.gz",
        train_limit=2000), "task.max_length": 64}, "reuters_r8"),
    "wnut17": Task("wnut17", ("f1",), settings(2e-4, 3, 16, test="dev.txt"), "ner_wnut17"),
    "snips": Task("snips", ("sentence_accuracy", "intent_accuracy", "f1"), settings(
        3e-4, 4, 32, test="valid", train_limit=5000, dev_limit=500), "intent_slot/snips"),
    "sst2": Task("sst2", ("accuracy",), settings(
        1e-4, 1, columns=("text=sentence", "label=label"), test="dev.tsv", train_limit=15000, dev_limit=500), "glue/SST-2"),
    "clinc150": Task("clinc150", ("accuracy",), {**settings(3e-4, 2), "data.dev": "data_full.json:val+oos_val",
        "data.dev_fraction": 0}, "clinc150"),
    "arc_easy": Task("swag", ("accuracy",), settings(1e-4, 1, 16, test="val.csv"), write=write_choices),
}  # fmt: skip


# ------------------------------------------------------------------ baselines


def intervals(scores: Iterable[Score], n: int, metrics: Sequence[str]) -> Values:
    kept = [score for score in scores if score.name in metrics]
    found = confidence_intervals(kept, n, seed=0)
    return {score.name: [round(number, 4) for number in one] for score, one in zip(kept, found, strict=True)}


def class_scores(gold: Sequence[str], predicted: Sequence[str], metrics: Sequence[str]) -> Values:
    names = sorted({*gold, *predicted})
    numbers = [np.array([names.index(label) for label in labels]) for labels in (gold, predicted)]
    return intervals(classification_scores(*numbers, names), len(gold), metrics)


def cosines(texts: Sequence[str], others: Sequence[Sequence[str]]) -> list[np.ndarray]:
    """Return the TF-IDF cosines of each text with each of its ``others``."""
    vectors = TfidfVectorizer(sublinear_tf=True).fit([*texts, *(other for own in others for other in own)])
    pairs = zip(vectors.transform(texts), others, strict=True)
    return [(vectors.transform(own) @ text.T).toarray()[:, 0] for text, own in pairs]


def tfidf(kind: str, train: Sequence[Record], scored: Sequence[Record], metrics: Sequence[str]) -> Values:
    """Return the scores of a linear model on TF-IDF vectors."""
    given = [
        [{"text": one.text or " ".join(one.words), "label": str(one.label)} for one in records]
        for records in (train, scored)
    ]
    for records, own in zip((train, scored), given, strict=True):
        for record, fields in zip(records, own, strict=True):
            fields |= {"text_pair": record.text_pair} if record.text_pair is not None else {}
    _, answers = tfidf_answers("regression" if kind == "regression" else "classification", Texts(
        given[0], given[1][:1], given[1]))  # fmt: skip
    gold = [one["gold"] for one in answers]
    if kind == "regression":
        numbers = [np.array(values, float) for values in (gold, [one["value"] for one in answers])]
        return intervals(regression_scores(*numbers), len(gold), metrics)
    return class_scores(gold, [one["label"] for one in answers], metrics)


def usual_tags(train: Sequence[Record], scored: Sequence[Record], metrics: Sequence[str]) -> Values:
    """Return the scores of the most frequent tag of each word in training, and O for others."""
    counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for record in train:
        for word, tag in zip(record.words, record.tags or (), strict=True):
            counts[word.lower()][tag] += 1
    usual = {word: of.most_common(1)[0][0] for word, of in counts.items()}
    predicted = [[usual.get(word.lower(), "O") for word in record.words] for record in scored]
    return intervals(tagging_scores([record.tags or () for record in scored], predicted), len(scored), metrics)


def likely_sentences(scored: Sequence[Record], metrics: Sequence[str]) -> Values:
    sentences = [re.split(r"(?<=[.!?]) ", record.text_pair or "") for record in scored]
    found = cosines([record.text for record in scored], sentences)
    answers = [own[int(values.argmax())] for own, values in zip(sentences, found, strict=True)]
    gold = [[answer.text for answer in record.answers or ()] for record in scored]
    return intervals(squad_scores(answers, gold), len(scored), metrics)


def likely_choices(scored: Sequence[Record], metrics: Sequence[str]) -> Values:
    found = cosines([record.text for record in scored], [record.choices for record in scored])
    right = np.array([str(values.argmax()) == one.label for values, one in zip(found, scored, strict=True)])
    return intervals([mean_score("accuracy", right)], len(scored), metrics)


def baseline(kind: str, train: Sequence[Record], scored: Sequence[Record], metrics: Sequence[str]) -> Values:
    """Return the scores of the baseline of a kind of task."""
    match kind:
        case "qa":
            return likely_sentences(scored, metrics)
        case "choice":
            return likely_choices(scored, metrics)
        case "tagging":
            return usual_tags(train, scored, metrics)
        case "joint":
            of_intents = tfidf(kind, train, scored, ("accuracy",))["accuracy"]
            return {**usual_tags(train, scored, ("f1",)), "intent_accuracy": of_intents}
    return tfidf(kind, train, scored, metrics)


# ------------------------------------------------------------------ runs


def train(task: Task, name: str, model: Path, data: Path, folder: Path) -> dict[str, Any]:
    """Make or continue the run of a row; return its line."""
    workdir, files = folder / name, data / task.folder
    if task.write:
        files = folder / f"{name}-files"
        if not (files / "done").exists():
            files.mkdir(parents=True, exist_ok=True)
            task.write(data, files)
            (files / "done").touch()
    options = {
        "config": REPOSITORY / f"configs/finetune/{task.recipe}.yaml", "init_from": model, "data.dir": files,
        "training.compilation_cache": folder / "compiled", **task.options,
    }  # fmt: skip
    is_new, before = not workdir.exists(), resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    command("run_finetune.py", options, workdir)
    seconds = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before
    config = load_config(extended(FinetuneConfig), ["--config", str(workdir / "config.yaml")])
    splits = read_splits(config.data, config.task.kind)
    last = json.loads((workdir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[-1])
    line = {"train": len(splits["train"]), "steps": last["step"], "scores": {}}
    if is_new:  # not of a run that was cut
        line["cpu_seconds"] = round(seconds)
    for result in read_results(workdir):
        if result["split"] == "dev":  # selected the parameters
            continue
        constant = result.get("baseline")
        line["scores"][result["split"]] = {
            "n": result["n"],
            "ours": {
                metric: [round(number, 4) for number in (one["value"], *(one["ci95"] or ()))]
                for metric in task.metrics
                if (one := result["metrics"][metric])["value"] is not None
            },
            "constant": {constant["metric"]: constant["value"]} if constant else {},
            "baseline": baseline(config.task.kind, splits["train"], splits[result["split"]], task.metrics),
        }
    return line


def zero_shot(task: ZeroShot, model: Path, data: Path, folder: Path) -> dict[str, Any]:
    """Classify the texts of a row without training; return its line."""
    texts, gold = zip(*task.texts(data), strict=True)
    words = [*task.labels.values()]
    labels = {name: [own] for name, own in task.labels.items()}
    answers = bert_jax.load(folder / "sick/best").zero_shot(texts, labels, template=task.template)
    vectors = bert_jax.load(model)
    both = [unit_vectors(vectors.embed(one)) for one in ([*texts], words)]
    nearest = [[*task.labels][place] for place in (both[0] @ both[1].T).argmax(1)]
    most = collections.Counter(gold).most_common(1)[0][0]
    scores = {
        "n": len(gold), "ours": class_scores(gold, [one["label"] for one in answers], task.metrics),
        "constant": {"accuracy": gold.count(most) / len(gold)},
        "baseline": class_scores(gold, nearest, task.metrics),
    }  # fmt: skip
    return {"train": 0, "scores": {"test": scores}}


# ------------------------------------------------------------------ table


def shown(values: Sequence[float] | None) -> str:
    if not values:
        return "-"
    low_high = f" [{values[1]:.3f}, {values[2]:.3f}]" if len(values) == 3 else ""
    return f"{values[0]:.3f}{low_high}"


def print_table(lines: Lines) -> int:
    """Print a row for each metric; return the number of missing rows."""
    heads = ("task", "training records", "steps", "scored", "metric", "score", "constant answer", "baseline")
    print(cells(heads), cells(["---"] * len(heads)), sep="\n")
    for name in ROWS:
        for split, of in lines.found[name]["scores"].items() if name in lines.found else ():
            for metric, value in of["ours"].items():
                constant = of["constant"].get(metric)
                own = lines.found[name]
                print(cells((
                    name, own["train"], own.get("steps", 0), f"{split}, {of['n']}", metric, shown(value),
                    "-" if constant is None else f"{constant:.3f}", shown(of["baseline"].get(metric)),
                )))  # fmt: skip
    missing = [name for name in ROWS if name not in lines.found]
    if missing:
        print(f"missing: {', '.join(missing)}")
    return len(missing)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="folder of all-MiniLM-L6-v2")
    parser.add_argument("--data", type=Path, help="folder of the task files")
    parser.add_argument("--folder", type=Path, help="files and runs")
    parser.add_argument("--minutes", type=float, help="start no row after this time")
    parser.add_argument("--tasks", nargs="+", choices=ROWS, default=[*ROWS])
    parser.add_argument("--table", action="store_true", help="train nothing")
    options = parser.parse_args()
    lines = Lines(LINES)
    if not options.table:
        if not (options.model and options.data and options.folder):
            parser.error("--model, --data, --folder: name the model, the data and a folder, or give --table")
        keep_to_cpu_without_accelerator()
        began = time.monotonic()
        model, data, folder = (path.resolve() for path in (options.model, options.data, options.folder))
        for name in options.tasks:
            if name in lines.found:
                continue
            if options.minutes is not None and time.monotonic() - began > 60 * options.minutes:
                report("stopped: run the same command to continue")
                break
            report(f"run {name}")
            row = ROWS[name]
            line = (
                train(row, name, model, data, folder)
                if isinstance(row, Task)
                else zero_shot(row, model, data, folder)
            )
            lines.add({"key": name, **line})
    return report_missing(print_table(lines))


if __name__ == "__main__":
    sys.exit(main())
