"""Records what transformers computes with every family beyond BERT, and how it names the tensors.

    pip install -r tests/golden/requirements.lock      (an environment of its own)
    python tests/golden/record_families.py [CASE ...]  writes tests/golden/fixtures/families/CASE.{json,npz}

The weights are made from the tensors' names (``family_cases.values``), so no fixture holds them. Outputs and
gradients are float64 arithmetic, stored as float32; a gradient is stored as two numbers: its norm, and its product
with values drawn from the tensor's name.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from family_cases import CASES, LABELS, classes, gradient_inputs, inputs, values
from safetensors.numpy import load_file
from safetensors.torch import save_file

FIXTURES = Path(__file__).parent / "fixtures" / "families"


def outputs_of(model: Any, batch: dict[str, np.ndarray], choice: bool) -> dict[str, torch.Tensor]:
    tensors = {key: torch.from_numpy(array) for key, array in batch.items()}
    if choice:
        tensors = {key: array[:, None] for key, array in tensors.items()}
    output = model(**tensors)
    return {key: value for key, value in output.items() if isinstance(value, torch.Tensor)}


def record(case: str, name: str) -> tuple[dict, dict[str, np.ndarray]]:
    """What the class stores (config.json and tensor shapes), and its outputs and gradients by name."""
    kind = getattr(transformers, name)
    more = LABELS if "SequenceClassification" in name or "TokenClassification" in name else {}
    config = kind.config_class(**CASES[case]["config"], **more)
    model = kind(config).eval()
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        stored = json.loads((Path(folder) / "config.json").read_text())
        shapes = {key: list(array.shape) for key, array in load_file(Path(folder) / "model.safetensors").items()}
    state = {key: torch.from_numpy(values(key, tuple(shape))) for key, shape in shapes.items()}
    is_renamed = not set(state) <= set(model.state_dict())
    if not is_renamed:
        model.load_state_dict(state, strict=False)
    else:
        model = loaded(kind, config, state)
    model.tie_weights()
    model.to(torch.float64)
    arrays = {}
    trained: list[str] = []
    for side in ("right", "left") if name.endswith("Model") else ("right",):
        batch = inputs(case, side == "left")
        found = outputs_of(model, batch, "MultipleChoice" in name)
        arrays |= {f"{side}/{key}": value.detach().numpy() for key, value in found.items()}
        if side == "right":
            batch = gradient_inputs(case)
            found = outputs_of(model, batch, "MultipleChoice" in name)
            trained, arrays["gradients"] = gradients(model, found, batch, is_renamed)
    return {"config": stored, "tensors": shapes, "gradients": trained}, {
        key: np.float32(array) for key, array in arrays.items()
    }


def loaded(kind: Any, config: Any, state: dict[str, torch.Tensor]) -> Any:
    """The model of class ``kind`` with ``state``, whose names are those of files, not those of the class."""
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        save_file(state, Path(folder) / "model.safetensors", {"format": "pt"})
        model, report = kind.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values()), report
    return model.eval()


def in_files(model: Any, arrays: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    """Values for the parameters of ``model`` under the names that files have."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder, state_dict=arrays)
        return load_file(Path(folder) / "model.safetensors")


def gradients(
    model: Any, outputs: dict[str, torch.Tensor], batch: dict[str, np.ndarray], is_renamed: bool
) -> tuple[list[str], np.ndarray]:
    """Return the names of the parameters (in files if ``is_renamed``), and two numbers for the gradient of each:
    that of the mean square of the outputs at real tokens."""
    mask = torch.from_numpy(batch["attention_mask"]).to(torch.float64)
    loss = 0
    for value in outputs.values():
        weight = mask.reshape(*mask.shape, *[1] * (value.ndim - 2)) if value.shape[:2] == mask.shape else 1
        loss = loss + ((value * weight) ** 2).mean()
    loss.backward()
    found = {key: parameter.grad for key, parameter in model.named_parameters() if parameter.grad is not None}
    arrays = in_files(model, found) if is_renamed else {key: array.numpy() for key, array in found.items()}
    names, numbers = [], []
    for key, gradient in arrays.items():
        probe = np.float64(values(f"probe {key}", gradient.shape))
        names.append(key)
        numbers.append([np.linalg.norm(gradient), (gradient * probe).sum()])
    return names, np.array(numbers)


def main() -> None:
    FIXTURES.mkdir(exist_ok=True)
    for case in sys.argv[1:] or CASES:
        told, arrays = {}, {}
        for name in classes(case):
            told[name], found = record(case, name)
            arrays |= {f"{name}/{key}": array for key, array in found.items()}
        (FIXTURES / f"{case}.json").write_text(json.dumps(told, indent=0, sort_keys=True) + "\n")
        np.savez_compressed(FIXTURES / f"{case}.npz", **arrays)
        print(case, len(told))


if __name__ == "__main__":
    main()
