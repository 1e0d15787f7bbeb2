"""Records what transformers computes with every class that can be imported, and how it names the tensors.

    pip install -r tests/golden/requirements.lock      (an environment of its own)
    python tests/golden/record_hf.py                   writes tests/golden/fixtures/hf_classes.{json,npz}

The weights are made from the tensors' names (``hf_cases.values``), so no fixture holds them. Outputs are float64
arithmetic, stored as float32.
"""

import json
import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers
from hf_cases import CLASSES, CONFIG, inputs, values
from safetensors.numpy import load_file

FIXTURES = Path(__file__).parent / "fixtures"


def record(name: str, more: dict) -> tuple[dict, dict[str, np.ndarray]]:
    """What the class stores (config.json and tensor shapes), and its outputs by name."""
    kind = getattr(transformers, name)
    model = kind(kind.config_class(**CONFIG, **more)).to(torch.float64).eval()
    with tempfile.TemporaryDirectory() as folder:
        model.to(torch.float32).save_pretrained(folder)
        config = json.loads((Path(folder) / "config.json").read_text())
        shapes = {key: list(array.shape) for key, array in load_file(Path(folder) / "model.safetensors").items()}
    state = {key: torch.from_numpy(values(key, tuple(shape))) for key, shape in shapes.items()}
    model.load_state_dict(state, strict=False)
    model.tie_weights()
    batch = {key: torch.from_numpy(array) for key, array in inputs(name).items()}
    if "MultipleChoice" in name:
        batch = {key: array[:, None] for key, array in batch.items()}
    with torch.no_grad():
        outputs = model.to(torch.float64)(**batch)
    arrays = {key: array.numpy().astype(np.float32) for key, array in outputs.items()}
    return {"config": config, "tensors": shapes}, arrays


def main() -> None:
    told, arrays = {}, {}
    for name, more in CLASSES.items():
        told[name], outputs = record(name, more)
        arrays |= {f"{name}/{key}": array for key, array in outputs.items()}
    (FIXTURES / "hf_classes.json").write_text(json.dumps(told, indent=0) + "\n")
    np.savez_compressed(FIXTURES / "hf_classes.npz", **arrays)


if __name__ == "__main__":
    main()
