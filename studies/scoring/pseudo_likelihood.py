"""Pseudo-log-likelihoods on the CPU against a batched loop in torch: values, texts per second, forward passes.

    python studies/scoring/pseudo_likelihood.py --vocabulary VOCAB.txt --texts FILE --peer_python PYTHON
        [--model FOLDER] [--count 200] [--rounds 3] [--output JSONL]

The model is a BERT of 6 layers of width 256 with drawn weights and the WordPiece vocabulary, or ``--model``, a
Hugging Face folder of a masked BERT. FILE has a text per line, or JSON lines of minimal pairs, of which both
sentences count (also .gz); ``--count`` texts, evenly spaced, are scored. ``--peer_python`` has torch and
transformers and runs ``score_torch.py`` in two forms, the loop as published and one with logits at the masks only.

One process each, two threads, the threads of torch without busy waiting (faster beside other work; OMP_WAIT_POLICY
overrides it); after one pass they take turns, so that a slow minute of the machine hits all of them. Medians are
compared. Prints a table and the JSON lines that ``--output`` adds to a file. Exit code 3 if the score of a text by
either method differs by more than 1e-4 nats, or below 1.5 x the texts per second of the published loop.
"""

import argparse
import gzip
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY))
os.environ.setdefault("JAX_PLATFORMS", "cpu")
METHODS = ("PLL-original", "PLL-word-l2r")
BAR, SPEED = 1e-4, 1.5


class Peer:
    """One form of the loop in torch, in its own process."""

    def __init__(self, python: str, *arguments: str) -> None:
        environment = {"OMP_WAIT_POLICY": "PASSIVE"} | os.environ | {"OMP_NUM_THREADS": "2", "HF_HUB_OFFLINE": "1"}
        environment.pop("PYTHONPATH", None)
        script = Path(__file__).with_name("score_torch.py")
        self._process = subprocess.Popen(
            [python, str(script), *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, text=True, env=environment,
        )  # fmt: skip
        self.about = self._answer()

    def _answer(self) -> dict[str, Any]:
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            raise ValueError(f"score_torch.py stopped with code {code}; run it alone to see the error")
        return json.loads(line)

    def ask(self, command: str) -> dict[str, Any]:
        """Send one command and return its answer."""
        self._process.stdin.write(f"{command}\n")
        self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        """End the process by closing its input."""
        self._process.stdin.close()
        self._process.wait()


class Ours:
    """This library, with the commands of :class:`Peer`."""

    def __init__(self, folder: str, texts: list[str]) -> None:
        import bert_jax

        self._loaded, self._texts = bert_jax.load(folder), texts

    def ask(self, command: str) -> dict[str, Any]:
        """Run one command and return its answer."""
        order, method, *target = command.split()
        passes: list[int] = []
        began, used = time.perf_counter(), time.process_time()
        rows = self._loaded.score(self._texts, method=method, progress=passes.append)
        answer = {"seconds": time.perf_counter() - began, "cpu_seconds": time.process_time() - used}
        if order == "save":
            np.save(target[0], [row.score for row in rows])
        return answer | {"passes": sum(passes)}


def write_drawn(folder: Path, vocabulary: Path) -> None:
    """Write a BERT of 6 layers of width 256 with drawn weights, larger than initial ones, so that texts differ."""
    from bert_jax.config import HeadsConfig, ModelConfig, ModelSpec, TokenizerConfig
    from bert_jax.interop.model_bundle import ModelBundle, parameter_shapes
    from bert_jax.interop.hf.write import write_hf

    content = vocabulary.read_bytes()
    model = ModelConfig(
        vocab_size=content.count(b"\n"), hidden_size=256, num_layers=6, num_attention_heads=4,
        intermediate_size=1024,
    )  # fmt: skip
    spec = ModelSpec(model=model, heads=HeadsConfig(mlm=True), tokenizer=TokenizerConfig(), family="bert")
    rng = np.random.default_rng(0)
    params = {
        name: rng.normal(float(name.endswith("scale")), 0.08, shape).astype(np.float32)
        for name, shape in parameter_shapes(spec).items()
    }
    write_hf(folder, ModelBundle(spec=spec, params=params, tokenizer_content=content))


def read_texts(file: Path, count: int) -> list[str]:
    """Return ``count`` evenly spaced texts of a file of lines or of minimal pairs."""
    with (gzip.open if file.suffix == ".gz" else open)(file, "rt", encoding="utf-8") as stream:
        lines = [line.strip() for line in stream if line.strip()]
    pairs = lines[0].startswith("{")
    lines = lines[:: max(1, len(lines) // (-(-count // 2) if pairs else count))]
    if pairs:
        rows = map(json.loads, lines)
        lines = list(itertools.chain.from_iterable((row["sentence_good"], row["sentence_bad"]) for row in rows))
    return lines[:count]


def measure(workers: dict[str, Any], scratch: Path, rounds: int, texts: int) -> list[dict[str, Any]]:
    """Return a line with the largest differences, and one with the figures of each worker."""
    differences, passes = {}, {}
    for method in METHODS:
        scores = {}
        for name, worker in workers.items():
            target = scratch / f"{name}.npy"
            passes[name, method] = worker.ask(f"save {method} {target}")["passes"]
            scores[name] = np.load(target)
        for name in list(workers)[1:]:
            differences[f"{method} {name}"] = float(np.abs(scores["ours"] - scores[name]).max())
    answers: dict[str, list[dict[str, Any]]] = {name: [] for name in workers}
    for _ in range(rounds):
        for name, worker in workers.items():
            answers[name].append(worker.ask(f"time {METHODS[0]}"))
    lines = [{"row": "values", "largest_difference": differences, "ok": max(differences.values()) <= BAR}]
    ours = 0.0
    for name, turns in answers.items():
        seconds, used = (statistics.median(turn[key] for turn in turns) for key in ("seconds", "cpu_seconds"))
        ours = ours or seconds
        own_used = statistics.median(turn["cpu_seconds"] for turn in answers["ours"])
        line = {
            "row": name, "texts_per_second": round(texts / seconds, 1), "cpu_seconds": round(used, 3),
            "ours_times": round(seconds / ours, 2), "ours_times_cpu": round(used / own_used, 2),
            "all_seconds": [round(turn["seconds"], 3) for turn in turns],
            "passes": {method: passes[name, method] for method in METHODS},
        }  # fmt: skip
        line |= {"batch": workers[name].about["batch"]} if name != "ours" else {}
        lines.append(line | ({"ok": line["ours_times"] >= SPEED} if name == "usual" else {}))
    return lines


def main() -> int:
    """Measure, print and judge; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer_python", required=True, help="a Python with torch and transformers")
    parser.add_argument(
        "--texts", required=True, type=Path, help="lines, or JSON lines of minimal pairs (also .gz)"
    )
    parser.add_argument("--vocabulary", type=Path, help="vocab.txt (WordPiece) of the drawn model")
    parser.add_argument("--model", help="Hugging Face folder of a masked BERT, in place of the drawn one")
    parser.add_argument("--count", type=int, default=200, help="number of texts (default: 200)")
    parser.add_argument("--rounds", type=int, default=3, help="timed passes of each (default: 3)")
    parser.add_argument("--output", type=Path, help="file of JSON lines to add to")
    options = parser.parse_args()
    if (options.model is None) == (options.vocabulary is None):
        parser.error("give one of --vocabulary and --model")
    texts = read_texts(options.texts, options.count)
    with tempfile.TemporaryDirectory() as root:
        scratch = Path(root)
        folder, file = options.model or str(scratch / "model"), scratch / "texts.json"
        if options.vocabulary:
            Path(folder).mkdir()
            write_drawn(Path(folder), options.vocabulary)
        file.write_text(json.dumps(texts), encoding="utf-8")
        peers = {kind: Peer(options.peer_python, folder, str(file), kind) for kind in ("usual", "lean")}
        lines = measure({"ours": Ours(folder, texts), **peers}, scratch, options.rounds, len(texts))
        for peer in peers.values():
            peer.close()
    about = {
        "model": Path(options.model).name if options.model else "drawn, L6 H256",
        "texts": len(texts),
        "file": options.texts.name,
    }
    about |= {name: peers["usual"].about[name] for name in ("torch", "transformers")}
    for line in lines[1:]:
        passes = " and ".join(f"{count:,}" for count in line["passes"].values())
        print(
            f"{line['row']:6} {line['texts_per_second']:7.1f} texts/s, {line['cpu_seconds']:7.2f} processor "
            f"seconds; ours {line['ours_times']:.2f} x (processor {line['ours_times_cpu']:.2f} x); {passes} passes"
        )
    print("largest difference", max(lines[0]["largest_difference"].values()), "nats")
    for line in lines:
        print(json.dumps(about | line))
    if options.output:
        with options.output.open("a") as output:
            output.writelines(json.dumps(about | line) + "\n" for line in lines)
    return 0 if all(line.get("ok", True) for line in lines) else 3


if __name__ == "__main__":
    sys.exit(main())
