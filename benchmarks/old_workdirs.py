"""Resume workdirs of another version of this code, pretraining and one of each task kind.

    python benchmarks/old_workdirs.py --base OTHER_CHECKOUT [--kinds classification qa ...]

The other version trains every run halfway. Then each version continues a copy of it to the end, on one device.
Last, this version is called on the run that the other one finished. The row of a run holds the exit codes and the
largest relative difference of any logged loss after the resume. Exit code 3 if a run does not resume, if a loss
differs by more than 1e-6, or if the call on the finished run fails or trains.
"""

import argparse
import json
import random
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from harness import ROOT, environment, json_lines, write_json_lines

WORDS = [f"w{i}" for i in range(50)]
KINDS = ("classification", "regression", "multi_label", "choice", "qa", "tagging", "joint", "sentence")


def pretraining_recipe(folder: Path) -> Path:
    draw = random.Random(0)
    documents = ["\n".join(sentence(draw) + " ." for _ in range(draw.randint(4, 9))) for _ in range(60)]
    (folder / "corpus.txt").write_text("\n\n".join(documents) + "\n")
    recipe = {
        "data": {
            "corpus": [str(folder / "corpus.txt")], "shards": str(folder / "shards"), "seq_length": 32,
            "max_predictions": 5, "dupe_factor": 2, "num_shards": 2, "eval_fraction": 0.1, "workers": 1,
        },
        "model": {
            "vocab_size": 90, "hidden_size": 32, "num_layers": 2, "num_attention_heads": 2,
            "intermediate_size": 64, "max_position_embeddings": 64,
        },
        "optimizer": {"learning_rate": 1e-3, "warmup_steps": 10},
        "training": {"global_batch_size": 8, "log_interval": 2, "checkpoint_interval": 10, "eval_interval": 20},
    }  # fmt: skip
    (folder / "recipe.yaml").write_text(json.dumps(recipe))  # JSON is YAML
    return folder / "recipe.yaml"


def sentence(draw: random.Random, most: int = 9) -> str:
    return " ".join(draw.choice(WORDS) for _ in range(draw.randint(3, most)))


def example(kind: str, draw: random.Random) -> dict:
    """Return one record of a task as a JSON line."""
    text, words = sentence(draw), sentence(draw).split()
    label = str(int("w1" in text))
    answers = [{"text": words[0], "answer_start": 0}]
    tags = ["B-X" if word.endswith("1") else "O" for word in words]
    return {
        "classification": {"text": text, "label": label},
        "regression": {"text": text, "label": len(text.split()) / 3},
        "multi_label": {"text": text, "labels": [word for word in ("w1", "w2", "w3") if word in text.split()]},
        "choice": {"text": text, "choice": [sentence(draw), text], "label": "1"},
        "qa": {"text": "which", "text_pair": " ".join(words), "answers": answers},
        "tagging": {"words": words, "tags": tags},
        "joint": {"words": words, "tags": tags, "label": label},
        "sentence": {"text": text, "text_pair": sentence(draw), "label": draw.random()},
    }[kind]


def task_arguments(kind: str, folder: Path, model: Path) -> list[str]:
    draw = random.Random(1)
    for split, count in (("train", 64), ("dev", 16)):
        write_json_lines(folder / f"{kind}_{split}.jsonl", [example(kind, draw) for _ in range(count)])
    arguments = f"--task.kind {kind} --task.max_length 32 --optimizer.learning_rate 1e-3 --optimizer.warmup_steps 2"
    arguments += " --training.global_batch_size 8 --training.log_interval 2"
    arguments += " --sentence.loss cosine" if kind == "sentence" else ""
    files = ["--data.train", str(folder / f"{kind}_train.jsonl"), "--data.dev", str(folder / f"{kind}_dev.jsonl")]
    return ["--init_from", str(model), *files, *arguments.split()]


def call(checkout: Path, arguments: list[str]) -> tuple[int, str]:
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=checkout, env=environment(checkout), capture_output=True, text=True)
    return done.returncode, (done.stderr or done.stdout).strip().splitlines()[-1:][0] if done.returncode else ""


def losses(workdir: Path) -> list[float]:
    return [line["loss"] for line in json_lines(workdir / "metrics.jsonl") if line.get("loss") is not None]


def compare(base: Path, folder: Path, name: str, program: str, arguments: list[str], steps: str) -> dict:
    """Train halfway with ``base``, continue with both versions, and return the row of the run."""
    half_steps, all_steps = ("30", "60") if program == "run_pretrain.py" else ("1", "2")
    half, of_base, of_own = (folder / f"{name}_{part}" for part in ("half", "base", "own"))

    def run(checkout: Path, workdir: Path, count: str = all_steps) -> tuple[int, str, list[float]]:
        code, line = call(checkout, [program, *arguments, "--workdir", str(workdir), steps, count])
        return code, line, losses(workdir) if not code else []

    code, line, _ = run(base, half, half_steps)
    if code:
        return {"run": name, "base_code": code, "line": line, "ok": False}
    for workdir in (of_base, of_own):  # both continue a run that was not finished
        shutil.copytree(half, workdir)
    (base_code, _, theirs), (own_code, line, ours) = run(base, of_base), run(ROOT, of_own)
    finished_code, finished_line, again = run(ROOT, of_base)
    pairs = list(zip(theirs, ours, strict=False))
    worst = max((abs(a - b) / max(abs(a), 1e-12) for a, b in pairs), default=None)
    ok = own_code == 0 and len(theirs) == len(ours) and worst <= 1e-6 and finished_code == 0 and again == theirs
    return {
        "run": name, "base_code": base_code, "own_code": own_code, "finished_code": finished_code,
        "line": line or finished_line, "losses": len(pairs), "largest_relative_difference": worst, "ok": bool(ok),
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--base", type=Path, required=True, help="checkout of the other version")
    parser.add_argument("--kinds", nargs="*", default=KINDS, choices=KINDS)
    options = parser.parse_args()
    base, rows = options.base.resolve(), []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        recipe = ["--config", str(pretraining_recipe(folder))]
        rows.append(compare(base, folder, "pretraining", "run_pretrain.py", recipe, "--training.num_steps"))
        print(json.dumps(rows[-1]), flush=True)
        for kind in options.kinds:
            arguments = task_arguments(kind, folder, folder / "pretraining_base")
            rows.append(compare(base, folder, kind, "run_finetune.py", arguments, "--training.num_epochs"))
            print(json.dumps(rows[-1]), flush=True)
    return 0 if all(row["ok"] for row in rows) else 3


if __name__ == "__main__":
    sys.exit(main())
