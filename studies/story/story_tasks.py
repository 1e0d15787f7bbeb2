"""What the systems of ``story.py`` are measured on: tasks, probes, minimal pairs, similarity, TF-IDF."""

import csv
import dataclasses
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import sys
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "shared"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "finetuning"))
from small_runs import REPOSITORY, Options, words_of
from small_tasks import RATE_TEXTS, SmallTask, write_intents, write_slots, write_table
from text_baselines import regression

from bert_jax.config import load_config
from bert_jax.config.finetune import FinetuneConfig
from bert_jax.contrib.analysis.linear_probe import Classifier
from bert_jax.contrib.analysis.minimal_pairs import accuracies, read_pairs, score_pairs
from bert_jax.contrib.analysis.probe_tasks import ProbeTask, read_examples
from bert_jax.contrib.analysis.probing import probe_layers
from bert_jax.hashing import permutation
from bert_jax.inference.loaded import load
from bert_jax.metrics.correlation import regression_scores
from bert_jax.metrics.score import value
from data_pipeline.tasks import read_splits

TUNED_RATES, FROZEN_RATES = (1e-3, 3e-3, 9e-3), (3e-3, 1e-2, 3e-2)
PAIRS_OF_PARADIGM, SENTENCES, SENTENCES_OF_NOUN = 50, 1500, 100
SST2_TRAIN, SST2_SCORED = 10_000, 10_000
FEW_SLOTS = 200
_FEW_INTENTS = 10


@dataclass(frozen=True)
class StoryTask:
    """A task, the ways in which it is trained, and whether it gives a text one class."""

    task: SmallTask
    ways: Sequence[str] = ("frozen", "tuned")
    is_classes: bool = True

    def of(self, way: str, *, has_layers: bool = False, has_context: bool = True) -> SmallTask:
        """Return the task with the options of ``way``: slots are read by a BiLSTM from a frozen encoder, and from
        word vectors, which have no context, also if they are tuned."""
        is_frozen, options = way == "frozen", dict[str, Any]()
        if self.task.recipe == "snips" and (is_frozen or not has_context):
            options["features.bilstm_size"] = 128
        if is_frozen:
            options["features.frozen_encoder"] = "true"
            if has_layers:
                options["features.layers"] = "weighted_with_embeddings"
        return dataclasses.replace(self.task, options={**self.task.options, **options})


def _sentiment(data: Path, folder: Path, seed: int) -> None:
    """Write SST-2: the scored texts are dev and 10,000 training texts, the same for every seed."""
    source = data / "glue/SST-2"
    head, *lines = (source / "train.tsv").read_text().splitlines(keepends=True)
    _, *dev = (source / "dev.tsv").read_text().splitlines(keepends=True)
    order = permutation(len(lines), 0)
    scored = dev + [lines[place] for place in order[:SST2_SCORED]]
    left = [lines[place] for place in order[SST2_SCORED:]]
    chosen = [left[place] for place in permutation(len(left), seed, 1)]
    parts = {"rates": chosen[:RATE_TEXTS], "train": chosen[RATE_TEXTS:][:SST2_TRAIN], "results": scored}
    for part, own in parts.items():
        (folder / f"{part}.tsv").write_text(head + "".join(own))


def _intents(count: int | None) -> Callable[[Path, Path, int], None]:
    return lambda data, folder, seed: write_intents(data / "clinc150", folder, seed, count)


def _slots(count: int) -> Callable[[Path, Path, int], None]:
    return lambda data, folder, seed: write_slots(data / "intent_slot/snips", folder, seed, count)


def _epochs(epochs: float, batch: int) -> Options:
    return {"training.num_epochs": epochs, "training.global_batch_size": batch}


TASKS: dict[str, StoryTask] = {
    "clinc150-10": StoryTask(
        SmallTask("clinc150", _intents(_FEW_INTENTS), "texts.json:{}", "accuracy", _epochs(20, 32))
    ),
    "clinc150": StoryTask(SmallTask("clinc150", _intents(None), "texts.json:{}", "accuracy", _epochs(4, 64))),
    "snips-200": StoryTask(
        SmallTask("snips", _slots(FEW_SLOTS), "{}", "slot_f1", _epochs(60, 16)), is_classes=False
    ),
    "snips": StoryTask(SmallTask("snips", _slots(12_384), "{}", "slot_f1", _epochs(3, 64)), is_classes=False),
    "sst2": StoryTask(SmallTask("sst2", _sentiment, "{}.tsv", "accuracy", _epochs(3, 64))),
    "stsb": StoryTask(
        SmallTask(
            "stsb", lambda data, folder, seed: write_table(data / "glue/STS-B", folder, seed), "{}.tsv", "spearman",
            _epochs(3, 32),
        ),
        ways=("tuned",), is_classes=False,
    ),
}  # fmt: skip


def few_task(task: str) -> str:
    """Return the task with few texts on which the rates of ``task`` are chosen."""
    return "snips-200" if task.startswith("snips") else "clinc150-10"


# ------------------------------------------------------------------ without training of the network


def minimal_pairs(model: Path, data: Path) -> dict[str, Any]:
    """Return the accuracy on the first pairs of each paradigm of BLiMP, in all and by phenomenon."""
    pairs = read_pairs(data / "blimp/blimp.jsonl.gz", PAIRS_OF_PARADIGM)
    groups = accuracies(list(score_pairs(load(model), pairs)))
    measured = {group.name: round(group.accuracy[0], 5) for group in groups if group.level == "phenomenon"}
    (whole,) = (group for group in groups if group.level == "overall")
    return {"score": round(whole.accuracy[0], 5), "n": whole.pairs, "phenomena": measured}


def _layers(
    task: ProbeTask, model: Path, train: Path, test: Path, limit: int, classifier: Classifier, score: str
) -> dict[str, Any]:
    rows = probe_layers(load(model), *read_examples(task, train, test, limit), classifier=classifier)
    measured = [round(row.scores[score].value, 5) for row in rows]
    return {"score": max(measured), "layers": measured}


def parts_of_speech(model: Path, data: Path) -> dict[str, Any]:
    """Return the accuracy of a linear probe of each layer, and the best of them."""
    train, test = (data / "ud_en_ewt" / f"en_ewt-ud-{part}.conllu.gz" for part in ("train", "test"))
    return _layers("pos", model, train, test, SENTENCES, "linear", "accuracy")


def senses(model: Path, data: Path) -> dict[str, Any]:
    """Return the macro F1 of the nearest centroid at each layer, and the best of them."""
    folder = data / "wsd_coarse20"
    return _layers("sense", model, folder, folder, SENTENCES_OF_NOUN, "centroid", "macro_f1")


def similarity(model: Path, data: Path) -> dict[str, Any]:
    """Return Spearman's correlation of cosines of means with the scores of STS-B's dev set."""
    with (data / "glue/STS-B/dev.tsv").open(encoding="utf-8", newline="") as stream:
        rows = list(csv.DictReader(stream, delimiter="\t", quoting=csv.QUOTE_NONE))
    vectors = load(model).embed(
        [row[name] for name in ("sentence1", "sentence2") for row in rows], pooling="mean", normalize=True
    )
    cosines = np.sum(vectors[: len(rows)] * vectors[len(rows) :], axis=1)
    named = {one.name: one for one in regression_scores(np.array([float(row["score"]) for row in rows]), cosines)}
    return {"score": round(value(named["spearman"], len(rows)), 5), "n": len(rows)}


def tfidf(task: SmallTask, texts: Path, python: str) -> dict[str, Any]:
    """Return the accuracy of logistic regression on TF-IDF, with the scikit-learn of ``python``."""
    options = {
        "config": REPOSITORY / f"configs/finetune/{task.recipe}.yaml", "data.dir": texts,
        "data.train": task.file.format("train"), "data.dev": task.file.format("results"), "data.test": (),
    }  # fmt: skip
    config = load_config(FinetuneConfig, words_of(options))
    (measured,) = regression(python, task.recipe, read_splits(config.data, config.task.kind)).values()
    right = [max(one["probabilities"], key=one["probabilities"].get) == one["gold"] for one in measured]
    return {"score": round(statistics.mean(map(float, right)), 5), "n": len(right)}
