"""Outputs of a folder in transformers or sentence-transformers itself, in a process of its own.

The other process runs the text of this file: it needs torch, transformers and numpy, and none of this library.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

_MISSING = 7  # exit code: torch or the library is not installed
_TIMEOUT = 1800


@dataclass(frozen=True)
class PeerOutputs:
    """Outputs of a folder in transformers."""

    version: str
    # Of every batch of inputs: output name -> values.
    outputs: tuple[Mapping[str, np.ndarray], ...]
    # What its load report lists: missing, unexpected and mismatched names.
    problems: tuple[str, ...]


def peer_outputs(
    folder: Path, inputs: list[dict[str, np.ndarray]], peer_python: str | None = None, *, sentences: bool = False
) -> PeerOutputs | None:
    """Load ``folder`` with the class that its config.json names, or with ``sentences`` as a SentenceTransformer,
    and run every batch, in float32 on the CPU.

    ``peer_python`` is a Python that has transformers and torch (default: this one). ``None`` where it has not.
    Raises ``ValueError`` when transformers cannot load the folder.
    """
    python = shutil.which(peer_python) if peer_python is not None else sys.executable
    if python is None:
        raise ValueError(f"{peer_python}: not a Python that can be run")
    with tempfile.TemporaryDirectory() as scratch:
        for i, batch in enumerate(inputs):
            np.savez(Path(scratch) / f"in_{i}.npz", **batch)
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
        if peer_python is not None:
            environment.pop("PYTHONPATH", None)  # it belongs to this Python
        # As -c and not as a script: a script's folder would come first on the other's path.
        source = Path(__file__).read_text(encoding="utf-8")
        command = [str(Path(python).absolute()), "-c", source, str(folder.absolute()), scratch]
        command += ["sentences"] * sentences
        try:
            done = subprocess.run(
                command, env=environment, cwd=scratch, capture_output=True, text=True, timeout=_TIMEOUT, check=False
            )
        except OSError as error:
            raise ValueError(f"{command[0]}: not a Python that can be run ({error.strerror})") from None
        except subprocess.TimeoutExpired:
            raise ValueError(f"{folder}: transformers took more than {_TIMEOUT} s") from None
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        # Without numpy the other side ends before it can say so.
        if done.returncode == _MISSING or (done.returncode and last.startswith("ModuleNotFoundError:")):
            return None
        if done.returncode:
            raise ValueError(f"{folder}: it cannot be loaded there: {last[:300]}")
        said = json.loads((Path(scratch) / "report.json").read_text(encoding="utf-8"))
        outputs = []
        for i in range(len(inputs)):
            with np.load(Path(scratch) / f"out_{i}.npz", allow_pickle=False) as arrays:
                outputs.append(dict(arrays))
    return PeerOutputs(said["version"], tuple(outputs), tuple(said["problems"]))


def _batches(folder: Path) -> list[dict[str, np.ndarray]]:
    count = len(list(folder.glob("in_*.npz")))
    return [dict(np.load(folder / f"in_{i}.npz", allow_pickle=False)) for i in range(count)]


def main(folder: str, scratch: Path, sentences: bool) -> int:
    """Answer :func:`peer_outputs` from the other side."""
    try:
        answer = _sentences(folder, scratch) if sentences else _transformers(folder, scratch)
    except ImportError:
        return _MISSING
    (scratch / "report.json").write_text(json.dumps(answer), encoding="utf-8")
    return 0


def _transformers(folder: str, scratch: Path) -> dict[str, Any]:
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
    # A folder's buffers are no weights.
    problems = [text for text in problems if not text.endswith(("position_ids", "token_type_ids"))]
    for i, batch in enumerate(_batches(scratch)):
        tensors = {key: torch.from_numpy(values) for key, values in batch.items()}
        if "MultipleChoice" in name:  # [B, choices, S]: each row is one choice
            tensors = {key: values[:, None] for key, values in tensors.items()}
        with torch.no_grad():
            output = model(**tensors)
        arrays = {key: values.numpy() for key, values in output.items() if isinstance(values, torch.Tensor)}
        np.savez(scratch / f"out_{i}.npz", **arrays)
    return {"version": transformers.__version__, "problems": problems}


def _sentences(folder: str, scratch: Path) -> dict[str, Any]:
    import sentence_transformers
    import torch

    model = sentence_transformers.SentenceTransformer(folder, device="cpu", local_files_only=True).float().eval()
    for i, batch in enumerate(_batches(scratch)):
        with torch.no_grad():
            output = model.forward({key: torch.from_numpy(values) for key, values in batch.items()})
        np.savez(scratch / f"out_{i}.npz", sentence_embedding=output["sentence_embedding"].numpy())
    return {"version": sentence_transformers.__version__, "problems": []}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2]), "sentences" in sys.argv[3:]))
