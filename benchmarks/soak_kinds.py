"""The jobs of ``soak.py``: their inputs, commands and outcomes."""

import dataclasses
import hashlib
import json
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from harness import ROOT, write_json_lines

WORDS = ["the", "cat", "dog", "friend", "sees", "likes", "hears", "bird", "house", "music", "river", "old", "red"]
PRETRAIN, FINETUNE = ([str(ROOT / name)] for name in ("run_pretrain.py", "run_finetune.py"))
JAX, DATA = ["-m", "bert_jax.commands.main"], ["-m", "bert_jax.commands.data"]
# File names that differ between equal runs, and files that hold times.
_OTHERS = ("events.out.", ".lock", "train.log", "report.html", "config.yaml", "compilation_cache")

# Options of each pretraining job besides those of ``recipe``; together they have every optimizer.
NO_PAIRS, PLAIN = "--data.next_sentence none", "--model.type_vocab_size 0 --model.mlm_layer none"
OF_LSTM = f"{PLAIN} --model.position_embeddings none --model.embedding_norm no --model.final_norm no"
PRETRAINING = {
    "masked": "--training.accumulation_steps 2 --optimizer.ema_decay 0.9",
    "masked_packed_muon": f"{NO_PAIRS} --data.packing best_fit --data.seq_length 64 --optimizer.name muon "
    "--model.max_position_embeddings 64",
    "replaced_bert_adam": f"{NO_PAIRS} --data.masking dynamic --objective.name replaced_tokens "
    "--optimizer.name bert_adam",
    "causal_lamb": f"{NO_PAIRS} --objective.name causal_lm {PLAIN} --model.attention causal --optimizer.name lamb",
    "skip_gram_adagrad": f"{NO_PAIRS} --objective.name skip_gram --optimizer.name adagrad --optimizer.epsilon 10 "
    "--model.encoder none --model.num_layers 0 --model.type_vocab_size 0 --model.position_embeddings none "
    "--model.embedding_norm no --model.pooling mean",
    "elmo_stable_adamw": f"{NO_PAIRS} --objective.name bidirectional_lm {OF_LSTM} --optimizer.name stable_adamw "
    "--optimizer.clip_norm 0 --model.encoder bidirectional_lstm --model.embedding_size 16 --model.lstm_cells 16",
    "lstm_carried_sgd": f"{NO_PAIRS} --data.contiguous true --objective.name causal_lm "
    f"--objective.carry_state true --optimizer.name sgd {OF_LSTM} --model.encoder lstm --model.lstm_cells 32",
    "distillation": f"{NO_PAIRS} --objective.name distillation",
}


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of job."""

    # Words of the command after ``python``, for the folder of its output.
    command: Callable[[Path], Sequence[str]]
    # The outcome in the folder of the output: name -> digest.
    outcome: Callable[[Path], Mapping[str, str]]
    # The output appears only when it is complete, so that a kill leaves none or all of it.
    whole: bool = False


def digest(content: bytes) -> str:
    """Return a short hash of ``content``."""
    return hashlib.sha256(content).hexdigest()[:16]


def files(folder: Path, timed: Sequence[str] = ()) -> dict[str, str]:
    """Return the hash of each file under ``folder``, but for logs; of JSON files, without the keys ``timed``."""
    found = {}
    for path in sorted(folder.rglob("*")) if folder.exists() else []:
        name = path.relative_to(folder).as_posix()
        if not path.is_file() or any(part in name for part in _OTHERS):
            continue
        content = path.read_bytes()
        if timed and path.suffix == ".json":
            content = json.dumps(_without(json.loads(content), timed)).encode()
        found[name] = digest(content)
    return found


def _without(value: Any, keys: Sequence[str]) -> Any:
    if isinstance(value, dict):
        return {key: _without(one, keys) for key, one in value.items() if key not in keys}
    return [_without(one, keys) for one in value] if isinstance(value, list) else value


def run_outcome(workdir: Path) -> dict[str, str]:
    """Return the digests of the newest checkpoint of a run (every array with its padding, the digest of the state,
    the data position), of its lines of metrics without times, and of its predictions."""
    from bert_jax.training.checkpoint.folder import checkpoint_folder, saved_steps
    from bert_jax.training.checkpoint.parameters import read_arrays
    from bert_jax.training.checkpoint.restore import read_meta
    from bert_jax.training.logging.metrics_file import TIMING_KEYS, read_metrics

    found = {}
    if steps := saved_steps(workdir):
        folder = checkpoint_folder(workdir) / str(steps[-1])
        meta = read_meta(folder)
        found = {
            "step": str(steps[-1]),
            "state": meta["digest"][:16],
            "data": digest(json.dumps(meta["data"]).encode()),
        }
        found |= {name: digest(values.tobytes()) for name, values in read_arrays(folder / "state").items()}
    lines = [{key: one for key, one in line.items() if key not in TIMING_KEYS} for line in read_metrics(workdir)]
    found["metrics.jsonl"] = digest(json.dumps(lines).encode())
    for path in sorted(workdir.glob("predictions_*.jsonl")):
        found[path.name] = digest(path.read_bytes())
    if (workdir / "metrics.json").exists():
        results = _without(json.loads((workdir / "metrics.json").read_text()), ("seconds",))
        found["metrics.json"] = digest(json.dumps(results).encode())
    return found


def sweep_outcome(workdir: Path) -> dict[str, str]:
    """Return the digests of the table of a sweep and of the outcomes of its runs."""
    found = {name: digest((workdir / name).read_bytes()) for name in ("sweep.md", "sweep.json", "sweep.png")}
    for run in sorted((workdir / "runs").iterdir()):
        found |= {f"{run.name}/{key}": value for key, value in run_outcome(run).items()}
    return found


def recipe(inputs: Path, name: str, steps: int) -> list[str]:
    """Write the recipe of a pretraining job on the made-up text; return the options of the job."""
    sections = {
        "data": {
            "corpus": [str(inputs / "corpus.txt")], "vocab": str(inputs / "vocab.txt"), "seq_length": 32,
            "shards": str(inputs / f"shards_{name}"), "max_predictions": 5, "dupe_factor": 2, "num_shards": 2,
            "eval_fraction": 0.1, "workers": 1, "reader": "numpy",
        },
        "model": {
            "vocab_size": 5 + len(WORDS) + 1, "hidden_size": 32, "num_layers": 2, "num_attention_heads": 2,
            "intermediate_size": 64, "max_position_embeddings": 32,
        },
        "optimizer": {"learning_rate": 1e-3, "warmup_steps": 10},
        "training": {
            "num_steps": steps, "global_batch_size": 16, "log_interval": 2, "checkpoint_interval": 5,
            "eval_interval": steps // 2, "compilation_cache": str(inputs / "cache"),
        },
    }  # fmt: skip
    path = inputs / f"{name}.yaml"
    path.write_text(json.dumps(sections))  # JSON is YAML
    return ["--config", str(path), *PRETRAINING[name].split()]


def write_inputs(inputs: Path) -> None:
    """Write text, a vocabulary, records and small models with drawn weights, unless they are there."""
    if (inputs / "complete").exists():
        return
    sys.path.insert(0, str(ROOT / "tests"))
    from builders import content, drawn, tiny_model

    from bert_jax.config import HeadsConfig, ModelSpec, TokenizerConfig
    from bert_jax.interop.saved_model import write_saved
    from bert_jax.tokenization import SPECIAL_PIECES

    inputs.mkdir(parents=True, exist_ok=True)
    rng = random.Random(0)

    def text(most: int = 9) -> str:
        return " ".join(rng.choices(WORDS, k=rng.randint(4, most)))

    documents = ["\n".join(f"{text()} ." for _ in range(rng.randint(4, 12))) for _ in range(300)]
    (inputs / "corpus.txt").write_text("\n\n".join(documents) + "\n")
    pieces = [*SPECIAL_PIECES, *WORDS, "."]
    (inputs / "vocab.txt").write_bytes(content(pieces))
    labelled = [text() for _ in range(160)]
    lines = [{"text": one, "label": "red" if "red" in one else "other"} for one in labelled]
    tagged = ["\n".join(f"{word}\t{'B-X' if word == 'red' else 'O'}" for word in one.split()) for one in labelled]
    for split, part in (("train", slice(120)), ("dev", slice(120, None))):
        write_json_lines(inputs / f"{split}.jsonl", lines[part])
        (inputs / f"{split}.conll").write_text("\n\n".join(tagged[part]) + "\n\n")
    (inputs / "texts.txt").write_text("".join(f"{text(24)}\n" for _ in range(6000)))
    for name, heads in {
        "model": HeadsConfig(pooler=True), "teacher": HeadsConfig(mlm=True),
        "classifier": HeadsConfig(pooler=True, sequence_labels=("other", "red")),
    }.items():  # fmt: skip
        spec = ModelSpec(model=tiny_model(len(pieces), hidden_size=32), heads=heads, tokenizer=TokenizerConfig())
        write_saved(inputs / name, drawn(spec, 0.1, pieces))
    (inputs / "complete").touch()


def kinds(inputs: Path, steps: int) -> dict[str, Kind]:
    """Return every kind of job by name."""

    def pretraining(name: str) -> Kind:
        more = ["--teacher", f"{inputs}/teacher"] if name == "distillation" else []
        words = [*PRETRAIN, *recipe(inputs, name, steps), *more]
        return Kind(lambda out: [*words, "--workdir", str(out)], run_outcome)

    def finetuning(kind: str, suffix: str, *more: str) -> Callable[[Path], list[str]]:
        words = ["--init_from", f"{inputs}/model", "--task.kind", kind, "--data.train", f"{inputs}/train.{suffix}"]
        words += ["--data.dev", f"{inputs}/dev.{suffix}", "--task.max_length", "32", "--training.num_epochs", "4"]
        words += ["--optimizer.learning_rate", "1e-3", "--training.global_batch_size", "16"]
        words += ["--training.checkpoint_interval", "5", "--training.log_interval", "2"]
        return lambda out: [*FINETUNE, *words, "--workdir", str(out), *more]

    def job(program: Sequence[str], words: str) -> Callable[[Path], list[str]]:
        """Return the command of a program; OUT in ``words`` is the folder of its output."""
        return lambda out: [*program, *(word.replace("OUT", str(out)) for word in words.split())]

    cache = ("--training.compilation_cache", f"{inputs}/cache")
    grid = ("--sweep", "optimizer.learning_rate=1e-3,5e-4", "--seeds", "2")
    texts, corpus = f"--input {inputs}/texts.txt --output", f"--corpus {inputs}/corpus.txt --workers 2 --output OUT"
    shards = f"shards {corpus} --vocab {inputs}/vocab.txt --seq_length 32 --max_predictions 5"
    export = f"export --from {inputs}/model --to OUT --format hf --force"
    return {name: pretraining(name) for name in PRETRAINING} | {
        "classification": Kind(finetuning("classification", "jsonl", *cache), run_outcome),
        "tagging": Kind(finetuning("tagging", "conll", *cache), run_outcome),
        "sweep": Kind(finetuning("classification", "jsonl", *cache, *grid), sweep_outcome),
        "shards": Kind(job(DATA, shards), files),
        "clean": Kind(job(DATA, f"clean {corpus}"), lambda out: files(out, ("seconds",))),
        "export_hf": Kind(job(JAX, export), files, True),
        "embed": Kind(job(JAX, f"embed --model {inputs}/model {texts} OUT/v.npy"), files, True),
        "predict": Kind(job(JAX, f"predict --model {inputs}/classifier {texts} OUT/p.jsonl"), files, True),
    }
