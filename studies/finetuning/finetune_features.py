"""Features of a frozen encoder against fine-tuning, as in the BERT paper's table 7 (Devlin et al. 2018, 5.3).

    python studies/finetuning/finetune_features.py --model MODEL --data wnut17 --workdir runs/features [--recipe RECIPE]

Each cell is a run of run_finetune.py in a separate folder below ``--workdir``; finished runs are not repeated.
Prints a table with the first metric on dev (of a tagging recipe entity F1) and seconds per step. Fine-tuning: rate
1e-4, 5 epochs. On frozen features only the head is trained, from drawn weights: 6 epochs at rate 1e-3 with a
BiLSTM, 1e-2 without. ``--bilstm_size`` is the width of each direction: 384 gives the 768 numbers per token of the
paper's two-layer BiLSTM.
"""

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
LAYERS = {
    "embeddings": "embeddings",
    "second-to-last hidden": "second_to_last",
    "last hidden": "last",
    "weighted sum of the last four": "weighted_last_four",
    "last four side by side": "concat_last_four",
    "weighted sum of all layers": "weighted_all",
}
HEADS = ("fine-tuning", "linear", "bilstm")
RATES = {"fine-tuning": 1e-4, "linear": 1e-2, "bilstm": 1e-3}
EPOCHS = {"fine-tuning": 5, "linear": 6, "bilstm": 6}


def run_cell(options: argparse.Namespace, head: str, layers: str) -> Path:
    """Train one cell unless it is finished, and return its folder."""
    folder: Path = options.workdir / (head if head == "fine-tuning" else f"{layers}-{head}")
    if head not in options.heads or (folder / "metrics.json").exists():
        return folder
    command = [
        sys.executable, str(REPOSITORY / "run_finetune.py"), "--config", options.recipe,
        "--init_from", options.model, "--data.dir", options.data, "--workdir", str(folder),
        "--features.layers", layers,
        "--optimizer.learning_rate", str(RATES[head]), "--training.num_epochs", str(EPOCHS[head]),
        "--training.seed", str(options.seed), "--training.log_interval", "20",
    ]  # fmt: skip
    if head != "fine-tuning":
        command += ["--features.frozen_encoder", "true"]
    if head == "bilstm":
        command += ["--features.bilstm_size", str(options.bilstm_size)]
    print(" ".join(command), file=sys.stderr, flush=True)
    subprocess.run(command, check=True, stdout=sys.stderr)
    return folder


def shown(folder: Path) -> str:
    """Return the first metric on dev and the seconds per step of a finished cell."""
    if not (folder / "metrics.json").exists():
        return "not run"
    (dev,) = (entry for entry in json.loads((folder / "metrics.json").read_text()) if entry["split"] == "dev")
    name, found = next(iter(dev["metrics"].items()))
    logged = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    seconds = [line["seconds_per_step"] for line in logged if line.get("seconds_per_step")]
    return f"{name} {100 * found['value']:.1f}, {statistics.median(seconds[1:] or seconds):.2f} s"


def main() -> int:
    """Run the missing cells and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="model for --init_from, of 4 layers or more")
    parser.add_argument("--data", required=True, help="folder of the recipe's files")
    parser.add_argument("--workdir", required=True, type=Path, help="folder of all cells")
    parser.add_argument("--recipe", default=str(REPOSITORY / "configs" / "finetune" / "wnut17.yaml"))
    parser.add_argument("--bilstm_size", type=int, default=384, help="width of each direction (default: 384)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--heads", nargs="*", choices=HEADS, default=HEADS, help="heads to run; the table shows all finished ones"
    )
    options = parser.parse_args()
    print("| dev score, seconds per step | linear head | two-layer BiLSTM and linear head |\n|---|---|---|")
    print(f"| fine-tuning | {shown(run_cell(options, 'fine-tuning', 'last'))} | |", flush=True)
    for title, layers in LAYERS.items():
        cells = [shown(run_cell(options, head, layers)) for head in ("linear", "bilstm")]
        print(f"| {title} | {cells[0]} | {cells[1]} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
