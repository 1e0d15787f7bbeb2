"""The runs that finetune_quality.py compares: their inputs, and the process of each side."""

import dataclasses
import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bert_jax.config import ModelSpec, RunOptions, load_config
from bert_jax.config.finetune import FinetuneConfig
from bert_jax.config.loader import take_options
from bert_jax.finetuning.finetune import FinetuneJob
from bert_jax.interop.model_bundle import ModelBundle, parameter_shapes
from bert_jax.interop.hf.write import write_hf
from bert_jax.start.plan import plan_start
from bert_jax.start.start import Start
from bert_jax.model import to_canonical
from bert_jax.parallel import to_host
from bert_jax.records import Record
from bert_jax.tasks.sampling import epoch_order
from bert_jax.tasks.task import ModelInput, Task
from bert_jax.training.state import initial_params
from data_pipeline.tasks import read_splits, split_names

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = Path(__file__).with_name("finetune_torch.py")
KINDS = ("classification", "regression", "tagging", "qa")
# Options of the optimizer that both sides have.
SETTINGS = ("learning_rate", "warmup_steps", "weight_decay", "beta1", "beta2", "epsilon", "clip_norm")
# What torch's cross-entropy leaves out.
UNLABELLED = -100


@dataclass(frozen=True)
class Prepared:
    """A run, prepared as by run_finetune.py."""

    job: FinetuneJob
    splits: Mapping[str, Sequence[Record]]
    start: Start

    @property
    def config(self) -> FinetuneConfig:
        return self.job.config

    @property
    def task(self) -> Task:
        return self.job.task

    @property
    def predicted(self) -> list[str]:
        return [split for split in self.splits if split != "train"]

    def units(self, split: str) -> list[ModelInput]:
        return self.task.featurize(self.splits[split], training=split == "train")


def prepare(arguments: list[str], *, compared: bool = True) -> Prepared:
    """The run of such options; ``compared``: with the other side, so it must be one that Trainer can do."""
    options, rest = take_options(RunOptions, arguments)
    start = plan_start(FinetuneConfig, options, Path("no run"), rest.all)
    config = build_config(FinetuneConfig, [*rest.all, *start.settings])
    if compared:
        check(config)
    splits = read_splits(config.data, config.task.kind)
    return Prepared(FinetuneJob(config, splits, split_names(config.data)[1], start), splits, start)


def check(config: FinetuneConfig) -> None:
    """Raise ``ValueError`` for options that the other side does not support."""
    plain = FinetuneConfig()
    if config.task.kind not in KINDS or config.tagging.crf:
        raise ValueError(f"task.kind: {config.task.kind} is not compared; allowed: {', '.join(KINDS)} (no CRF)")
    packing = {"packing": config.input.packing, "max_shapes": config.input.max_shapes}
    rates = {name: getattr(config.optimizer, name) for name in (*SETTINGS, "warmup_fraction")}
    expected = {
        "loss": plain.loss, "regularization": plain.regularization, "features": plain.features,
        "input": dataclasses.replace(plain.input, **packing),
        "optimizer": dataclasses.replace(plain.optimizer, **rates),
    }  # fmt: skip
    for section, default in expected.items():
        if getattr(config, section) != default:
            raise ValueError(
                f"{section}: options that Trainer lacks are not compared; leave them at their defaults"
            )


# ------------------------------------------------------------------ what the other side reads


def write_features(run: Prepared, folder: Path, seeds: Sequence[int], splits: Sequence[str]) -> None:
    """What finetune_torch.py reads; inputs that are there already are not written again, orders are."""
    folder.mkdir(parents=True, exist_ok=True)
    config, heads = run.config, run.task.heads
    units = run.units("train")
    epochs = -(-config.training.num_steps * config.training.global_batch_size // len(units))
    for seed in seeds:
        orders = [epoch_order(len(units), seed, epoch) for epoch in range(epochs + 1)]
        np.save(folder / f"order_{seed}.npy", np.stack(orders))
    if (folder / "settings.json").exists():
        return
    np.savez(folder / "train.npz", **arrays_of(units), **targets_of(units, config.task.kind))
    for split in splits:
        np.savez(folder / f"{split}.npz", **arrays_of(run.units(split)))
    settings = {
        "kind": config.task.kind, "num_labels": len(heads.sequence_labels or heads.token_labels),
        "pad_id": run.task.tokenizer.pad_id, "max_length": config.task.max_length,
        "batch_size": config.training.global_batch_size, "num_steps": config.training.num_steps,
        "splits": list(splits), **{name: getattr(config.optimizer, name) for name in SETTINGS},
    }  # fmt: skip
    (folder / "settings.json").write_text(json.dumps(settings, indent=1) + "\n")


def arrays_of(units: Sequence[ModelInput]) -> dict[str, np.ndarray]:
    sequences = [unit.sequences[0] for unit in units]
    return {
        "lengths": np.array([len(one.ids) for one in sequences], np.int64),
        "input_ids": np.concatenate([np.asarray(one.ids, np.int64) for one in sequences]),
        "token_type_ids": np.concatenate([np.asarray(one.types, np.int64) for one in sequences]),
    }


def targets_of(units: Sequence[ModelInput], kind: str) -> dict[str, np.ndarray]:
    if kind == "tagging":
        labels = [
            np.where(unit.targets["tag_scored"] * unit.weight > 0, unit.targets["tag_labels"], UNLABELLED)
            for unit in units
        ]
        return {"labels": np.concatenate(labels).astype(np.int64)}
    if any(unit.weight != 1 for unit in units):
        raise ValueError(
            "data.train: every text must have a label, and one window; do not use task.truncation windows"
        )
    if kind == "qa":
        return {
            f"{side}_positions": np.array([u.targets[side] for u in units], np.int64) for side in ("start", "end")
        }
    if kind == "regression":
        return {"labels": np.array([unit.targets["values"][0] for unit in units], np.float32)}
    return {"labels": np.array([unit.targets["labels"] for unit in units], np.int64)}


def write_start(run: Prepared, folder: Path) -> None:
    """Write the parameters of step 0, including the new head, as a Hugging Face folder of a model without
    dropout."""
    config, model = run.config, run.job.model
    loaded = run.job.start().params
    flat = to_canonical(to_host(initial_params(model, config.training.seed, loaded)), config.model.vocab_size)
    still = dataclasses.replace(config.model, hidden_dropout=0.0, attention_dropout=0.0)
    spec = ModelSpec(model=still, heads=run.job.heads, tokenizer=run.start.tokenizer_config)
    arrays = {name: np.asarray(flat[name], np.float32) for name in parameter_shapes(spec)}
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    write_hf(
        folder, ModelBundle(spec=spec, params=arrays, tokenizer_content=run.start.tokenizer_content, origin={})
    )


# ------------------------------------------------------------------ running both sides


def timed(command: Sequence[str], log: Path) -> float:
    """Run a process with output to ``log`` and return its seconds; exit if it fails."""
    log.parent.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()
    with log.open("w") as stream:
        code = subprocess.run(command, cwd=ROOT, stdout=stream, stderr=subprocess.STDOUT).returncode
    if code:
        sys.exit(f"{' '.join(command)}\nended with code {code}; see {log}")
    return time.perf_counter() - began


def run_ours(arguments: Sequence[str], folder: Path, seed: int, *more: str) -> None:
    """Run one seed in ``folder`` and write ``seconds.json`` at the end; its checkpoints are deleted."""
    done = folder / "seconds.json"
    if done.exists():
        return
    shutil.rmtree(folder, ignore_errors=True)  # a resumed run would have no seconds of its own
    # The last parameters, as there; so one evaluation does.
    last = ["--training.restore_best", "false", "--training.eval_interval", "1000000000"]
    command = [sys.executable, "run_finetune.py", *arguments, *last, *more]
    whole = timed([*command, "--training.seed", str(seed), "--workdir", str(folder)], folder.with_suffix(".log"))
    compiling = re.findall(r"compiling the training step ([\d.]+) s", (folder / "train.log").read_text())
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    before, steps, places = 0, 0.0, []
    for line in lines:
        if "seconds_per_step" in line:
            steps += line["seconds_per_step"] * (line["step"] - before)
            places.append((line["step"] - before, line["padding_fraction"]))
            before = line["step"]
    padding = sum(count * share for count, share in places) / max(before, 1)
    seconds = {"command": whole, "compiling": float(compiling[0]), "steps": steps, "padding": padding}
    done.write_text(json.dumps(seconds) + "\n")
    for name in ("checkpoints", "compilation_cache", "best", "export"):
        shutil.rmtree(folder / name, ignore_errors=True)


def run_torch(python: str, features: Path, model: str, folder: Path, seed: int, *more: str) -> None:
    """Run one seed in ``folder`` and write ``seconds.json`` at the end."""
    done = folder / "seconds.json"
    if done.exists():
        return
    command = [
        python,
        str(SCRIPT),
        str(features),
        "--model",
        model,
        "--out",
        str(folder),
        "--seed",
        str(seed),
        *more,
    ]
    whole = timed(command, folder.with_suffix(".log"))
    result = json.loads((folder / "result.json").read_text())
    padding = 1 - result["tokens"] / result["places"]
    done.write_text(json.dumps({"command": whole, "steps": result["train_seconds"], "padding": padding}) + "\n")
