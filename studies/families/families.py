"""Hugging Face folders that this library writes, loaded by transformers: every family and class.

    python studies/families/families.py --peer_python PYTHON ... [--families NAME ...] [--output JSONL] [--record]

Draws a tiny model of odd sizes for every class of every family, with a tied output layer and, where there is an MLM
head, with one of its own. Exports it, loads the folder with its class in each PYTHON (an environment with torch and
one release of transformers; NeoBERT with the statement of ``tests/golden/record_neobert.py``), and runs it on rows
with padding on the right and on the left. transformers then saves the model again in shards (safetensors and,
before release 5, torch files, with an index) and in float16; this library reads these folders, writes what it read,
and reads that. Prints one JSON line per family and release, with the number of folders of each kind. Exit code 3 if
transformers reports a missing, unexpected or mismatched tensor, if an output differs by more than
2e-5 x max(1, largest), or if a tensor that is read is not bitwise the one that was drawn (rounded to float16).
``--record`` adds the digests of the folders that passed to ``tests/golden/fixtures/families/loaded.json``, with
which the tests compare the folders of later versions.
"""

import argparse
import collections
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from drawn_families import digest, drawn_models

from bert_jax.config.switches import function_of
from bert_jax.interop.model_bundle import ModelBundle, ReadOptions
from bert_jax.interop.hf import peer
from bert_jax.interop.hf.families import FAMILIES
from bert_jax.interop.hf.write import write_hf
from bert_jax.interop.programs.serving import largest_differences, output_names, sample_inputs
from bert_jax.interop.readers import read_weights
from bert_jax.interop.verification import BAR

GOLDEN = ROOT / "tests" / "golden"
RECORDED = GOLDEN / "fixtures" / "families" / "loaded.json"
# Folders that transformers saves again: in several safetensors files, in several torch files (only releases before
# 5 write them), and in float16.
KINDS = ("shards", "bin_shards", "float16")
# Runs in the environment of a release: one report and the outputs for each folder.
RUN = """
import importlib.util, json, sys
from pathlib import Path
import torch, transformers
place = importlib.util.spec_from_file_location("peer", sys.argv[1])
peer = importlib.util.module_from_spec(place)
place.loader.exec_module(peer)
def save_again(kind, folder):
    source = str(folder / "model")
    model = kind.from_pretrained(source, dtype=torch.float32)
    model.save_pretrained(folder / "shards", max_shard_size="4KB")
    if transformers.__version__.startswith("4"):
        model.save_pretrained(folder / "bin_shards", max_shard_size="4KB", safe_serialization=False)
    model.half().save_pretrained(folder / "float16")
for folder in sorted(Path(sys.argv[2]).iterdir()):
    (name,) = json.loads((folder / "model" / "config.json").read_text())["architectures"]
    answer = {"version": transformers.__version__, "problems": []}
    states = name.startswith("NeoBERT")
    if states:
        sys.path.insert(0, sys.argv[3])
        import record_neobert
        answer = record_neobert.run(folder / "model", folder)
    elif hasattr(transformers, name):
        try:
            answer = peer.run_transformers(str(folder / "model"), folder)
            save_again(getattr(transformers, name), folder)
        except Exception as error:
            answer["problems"] = [f"{type(error).__name__}: {error}"[:300]]
    answer["absent"] = not states and not hasattr(transformers, name)
    (folder / "report.json").write_text(json.dumps(answer))
"""


def write_folders(root: Path, names: list[str]) -> dict[str, tuple[str, str, ModelBundle]]:
    """Write the folders of the families ``names`` and the inputs; return family, class and model by folder."""
    written = {}
    for family in names:
        for name, bundle in drawn_models(family):
            folder = root / f"{len(written):04}"
            (folder / "model").mkdir(parents=True)
            write_hf(folder / "model", bundle)
            for i, batch in enumerate(sample_inputs(bundle.spec)):
                np.savez(folder / f"in_{i}.npz", **batch)
            written[folder.name] = family, name, bundle
    return written


def check(folder: Path, bundle: ModelBundle) -> tuple[float, list[str]]:
    """Return the largest difference of an output that transformers computed, divided by max(1, largest), and the
    problems that it reports."""
    problems = list(json.loads((folder / "report.json").read_text())["problems"])
    batches = [dict(np.load(folder / f"in_{i}.npz")) for i in range(len(list(folder.glob("in_*.npz"))))]
    found = [dict(np.load(file)) for file in sorted(folder.glob("out_*.npz"))]
    names = list(output_names(bundle.spec))
    lacking = sorted({name for batch in found for name in names if name not in batch})
    if len(found) != len(batches) or lacking:
        return float("inf"), [*problems, f"{len(found)} of {len(batches)} batches; no output {', '.join(lacking)}"]
    answers = ({name: batch[name] for name in names} for batch in found)
    differences = largest_differences(
        bundle.spec, bundle.params, lambda _: next(answers), batches, names=names
    )
    largest = {name: max(1.0, *(float(np.abs(batch[name]).max()) for batch in found)) for name in names}
    return max(value / largest[name] for name, value in differences.items()), problems


def check_saved(folder: Path, bundle: ModelBundle) -> tuple[dict[str, int], list[str]]:
    """Read the folders that transformers saved again, write what was read and read that; return the number of equal
    folders of each kind, and the problems."""
    counts, problems = dict.fromkeys(KINDS, 0), []
    for kind in (kind for kind in KINDS if (folder / kind).exists()):
        expected = bundle.params
        if kind == "float16":
            expected = {name: np.float32(np.float16(array)) for name, array in expected.items()}
        files = len([*(folder / kind).glob("*.safetensors"), *(folder / kind).glob("*.bin")])
        found = read_weights(folder / kind, ReadOptions())
        again = folder / f"{kind}_again"
        again.mkdir()
        write_hf(again, found)
        wrong = [
            what
            for what, read in (("read", found), ("written", read_weights(again, ReadOptions())))
            if function_of(read.spec.model) != function_of(bundle.spec.model)
            or read.spec.heads.present() != bundle.spec.heads.present()
            or read.params.keys() != expected.keys()
            or not all(np.array_equal(read.params[name], array) for name, array in expected.items())
        ]
        wrong += ["in one file"] if "shards" in kind and files < 2 else []
        problems += [f"{kind} is not the model when {what}" for what in wrong]
        counts[kind] = int(not wrong)
    return counts, problems


def measure(python: str, names: list[str]) -> Iterator[tuple[dict[str, Any], dict[str, str]]]:
    """Yield the figure of each family in the release of ``python``, and the digests of the folders that passed."""
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        written = write_folders(root, names)
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
        environment.pop("PYTHONPATH", None)
        subprocess.run(
            [python, "-c", RUN, peer.__file__, str(root), str(GOLDEN)], env=environment, cwd=root, check=True
        )
        for family in names:
            differences, problems, digests, release = [0.0], list[str](), dict[str, str](), ""
            saved: collections.Counter[str] = collections.Counter()
            for name, (owner, class_, bundle) in written.items():
                report = json.loads((root / name / "report.json").read_text())
                release = ".".join(report["version"].split(".")[:2]) if owner == family else release
                if owner != family or report["absent"]:
                    continue
                difference, told = check(root / name, bundle)
                counts, wrong = check_saved(root / name, bundle)
                told, saved = [*told, *wrong], saved + collections.Counter(counts)
                differences.append(difference)
                problems += [f"{class_}: {problem}" for problem in told]
                if difference <= BAR and not told:
                    digests[class_] = digest(root / name / "model")
            figure = {
                "family": family, "release": release, "folders": len(differences) - 1,
                **{kind: saved[kind] for kind in KINDS},
                "largest_difference": float(f"{max(differences):.3g}"), "problems": problems,
                "ok": max(differences) <= BAR and not problems,
            }  # fmt: skip
            yield figure, digests


def record(family: str, release: str, digests: dict[str, str]) -> None:
    """Add ``digests`` to the fixture of the tests."""
    recorded = json.loads(RECORDED.read_text()) if RECORDED.exists() else {}
    for class_, value in digests.items():
        recorded.setdefault(family, {}).setdefault(class_, {})[release] = value
    RECORDED.write_text(json.dumps(recorded, indent=0, sort_keys=True) + "\n")


def main() -> int:
    """Measure, print and judge; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer_python", nargs="+", required=True, help="Pythons with torch and transformers")
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--output", type=Path, help="file for the JSON lines")
    parser.add_argument("--record", action="store_true", help="add the folders to the fixture of the tests")
    options = parser.parse_args()
    figures = []
    for python in options.peer_python:
        for figure, digests in measure(python, options.families):
            figures.append({"command": "python studies/families/families.py", **figure})
            print(json.dumps(figures[-1]), flush=True)
            if options.record:
                record(figure["family"], figure["release"], digests)
    if options.output:
        options.output.write_text("".join(json.dumps(figure) + "\n" for figure in figures))
    seen = {figure["family"] for figure in figures if figure["folders"]}
    return 0 if all(figure["ok"] for figure in figures) and seen == set(options.families) else 3


if __name__ == "__main__":
    sys.exit(main())
