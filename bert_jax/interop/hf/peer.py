"""Outputs of a model folder in transformers or sentence-transformers, computed in a separate process.

That process runs the source of this file. It needs torch, transformers and numpy, but no module of this library.
"""

import inspect
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:  # the other Python need not have this library
    from bert_jax.json_values import Json

_MISSING = 7  # exit code: torch or the library is not installed
_NO_CLASS = 8  # exit code: the release of transformers has no such family
_TIMEOUT = 1800


# Version of the library; outputs of each batch by name; missing, unexpected and mismatched names that the library
# reports.
PeerOutputs = tuple[str, list[dict[str, np.ndarray]], tuple[str, ...]]


def peer_outputs(
    folder: Path, inputs: list[dict[str, np.ndarray]], peer_python: str | None = None, *, sentences: bool = False
) -> PeerOutputs | None:
    """Load ``folder`` with transformers or sentence-transformers and run every batch in float32 on the CPU.

    The folder is loaded with the class that config.json names or, if ``sentences`` is True, as a
    SentenceTransformer. ``peer_python`` is a Python executable with torch and that library; None: the running
    Python. Returns None if torch or the library is not installed. Raises ``LookupError`` if that
    release of transformers does not have the family, and ``ValueError`` if the library cannot load the folder.
    """
    python = shutil.which(peer_python) if peer_python is not None else sys.executable
    if python is None:
        raise ValueError(f"{peer_python}: not a Python executable; set --peer_python to the path of one")
    with tempfile.TemporaryDirectory() as scratch:
        for i, batch in enumerate(inputs):
            np.savez(Path(scratch) / f"in_{i}.npz", **batch)  # type: ignore[arg-type]
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
        if peer_python is not None:
            environment.pop("PYTHONPATH", None)  # it is meant for the running Python
        # With -c, because Python puts the folder of a script first on sys.path.
        source = Path(__file__).read_text(encoding="utf-8")
        command = [str(Path(python).absolute()), "-c", source, str(folder.absolute()), scratch]
        command += ["sentences"] * sentences
        try:
            done = subprocess.run(
                command, env=environment, cwd=scratch, capture_output=True, text=True, timeout=_TIMEOUT, check=False
            )
        except OSError as error:
            raise ValueError(f"{command[0]}: not a Python executable ({error.strerror})") from None
        except subprocess.TimeoutExpired:
            raise ValueError(f"{folder}: transformers took more than {_TIMEOUT} s") from None
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        # Without numpy the process fails before it can return _MISSING.
        if done.returncode == _MISSING or (done.returncode and last.startswith("ModuleNotFoundError:")):
            return None
        if done.returncode == _NO_CLASS:
            raise LookupError(last)
        if done.returncode:
            raise ValueError(f"{folder}: transformers or sentence-transformers cannot load the model: {last[:300]}")
        answer = json.loads((Path(scratch) / "report.json").read_text(encoding="utf-8"))
        return answer["version"], _batches(Path(scratch), "out"), tuple(answer["problems"])


def _batches(folder: Path, name: str) -> list[dict[str, np.ndarray]]:
    count = len(list(folder.glob(f"{name}_*.npz")))
    return [dict(np.load(folder / f"{name}_{i}.npz", allow_pickle=False)) for i in range(count)]


def main(folder: str, scratch: Path, sentences: bool) -> int:
    """Run the batches in the process that :func:`peer_outputs` starts; return the exit code."""
    try:
        if lacking := _lacking(folder):
            print(lacking, file=sys.stderr)
            return _NO_CLASS
        answer = _sentences(folder, scratch) if sentences else run_transformers(folder, scratch)
    except ImportError:
        return _MISSING
    (scratch / "report.json").write_text(json.dumps(answer), encoding="utf-8")
    return 0


def _lacking(folder: str) -> str:
    """Return a line if the installed release of transformers does not have the family of ``folder``; empty: it has
    the family. The code that a folder names is not run."""
    import transformers

    file = Path(folder) / "config.json"
    family = json.loads(file.read_text(encoding="utf-8")).get("model_type") if file.is_file() else None
    if family is None or family in transformers.CONFIG_MAPPING:
        return ""
    return f"transformers {transformers.__version__} has no family {family}"


def run_transformers(folder: str, scratch: Path) -> "dict[str, Json]":
    """Run the batches in ``scratch`` with the class that the config.json in ``folder`` names, and write the outputs
    to the same folder; return the version of transformers and the problems that it reports."""
    import torch
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    name = (config.architectures or ["AutoModel"])[0]
    kind = getattr(transformers, name)
    options: dict[str, Any] = {"local_files_only": True, "dtype": torch.float32, "output_loading_info": True}
    model, info = kind.from_pretrained(folder, **options)
    if name.endswith("Model") and any("pooler" in key for key in info["missing_keys"]):
        model, info = kind.from_pretrained(folder, add_pooling_layer=False, **options)
    model.eval()
    problems = [f"{what}: {key}" for what, keys in info.items() for key in sorted(map(str, keys or []))]
    # Buffers are not weights.
    problems = [text for text in problems if not text.endswith(("position_ids", "token_type_ids"))]
    # Some families have no token_type_ids.
    accepted = set(inspect.signature(model.forward).parameters)
    if not hasattr(config, "type_vocab_size"):
        accepted -= {"token_type_ids"}  # GPT adds word embeddings for them
    for i, batch in enumerate(_batches(scratch, "in")):
        tensors = {key: torch.from_numpy(values) for key, values in batch.items() if key in accepted}
        if "MultipleChoice" in name:  # [B, choices, S]: each row is one choice
            tensors = {key: values[:, None] for key, values in tensors.items()}
        with torch.no_grad():
            output = model(**tensors)
        arrays = {key: values.numpy() for key, values in output.items() if isinstance(values, torch.Tensor)}
        np.savez(scratch / f"out_{i}.npz", **arrays)
    return {"version": transformers.__version__, "problems": problems}


def _sentences(folder: str, scratch: Path) -> "dict[str, Json]":
    import sentence_transformers
    import torch

    model = sentence_transformers.SentenceTransformer(folder, device="cpu", local_files_only=True).float().eval()
    for i, batch in enumerate(_batches(scratch, "in")):
        with torch.no_grad():
            output = model.forward({key: torch.from_numpy(values) for key, values in batch.items()})
        np.savez(scratch / f"out_{i}.npz", sentence_embedding=output["sentence_embedding"].numpy())
    return {"version": sentence_transformers.__version__, "problems": []}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2]), "sentences" in sys.argv[3:]))
