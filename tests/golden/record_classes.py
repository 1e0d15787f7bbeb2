"""Records the loss curve of masked tokens, sentence pairs and classes of documents together: transformers' BERT in
torch with one more linear layer on the pooled output, on the batches of ``cases.py``.

    pip install -r tests/golden/requirements.lock      (an environment of its own)
    python tests/golden/record_classes.py              writes tests/golden/fixtures/masked_lm_classes.npz
    python tests/golden/record_classes.py --check      compares with what is there instead

``loss``, ``class_loss`` and ``grad_norm`` (before clipping at 1) of 50 optimizer steps in float32. The class loss
is the mean over the rows that have a class; its weight in the loss is CURVE_CLASS_WEIGHT.
"""

import argparse
import sys
from pathlib import Path

import numpy as np
import torch
from cases import (
    CURVE_CLASS_WEIGHT,
    CURVE_MODEL,
    CURVE_STEPS,
    class_batch,
    class_weights,
    is_decayed,
    learning_rate,
    parameter_shapes,
)
from record import AdamW, check
from reference import build, forward, reference_name
from torch import nn

FIXTURE = Path(__file__).parent / "fixtures" / "masked_lm_classes.npz"


def record() -> dict[str, np.ndarray]:
    network, given = build(CURVE_MODEL, torch.float32), class_weights()
    head = nn.Linear(*given["sequence_head/kernel"].shape)
    with torch.no_grad():
        head.weight.copy_(torch.from_numpy(given["sequence_head/kernel"].T))
        head.bias.copy_(torch.from_numpy(given["sequence_head/bias"]))
    by_name = dict(network.named_parameters())
    names = list(parameter_shapes(CURVE_MODEL))
    decayed = [by_name[reference_name(name)] for name in names if is_decayed(name)] + [head.weight]
    others = [by_name[reference_name(name)] for name in names if not is_decayed(name)] + [head.bias]
    optimizer = AdamW(decayed, others)
    curves: dict[str, list[float]] = {"loss": [], "class_loss": [], "grad_norm": []}
    for step in range(CURVE_STEPS):
        features = class_batch(step)
        classes = torch.from_numpy(features.pop("document_classes"))[:, 0].long()
        outputs = forward(network, features)
        logits = head(outputs["pooled_output"][:, 0])
        class_loss = nn.functional.cross_entropy(logits, classes - 1, ignore_index=-1)
        loss = outputs["loss"] + CURVE_CLASS_WEIGHT * class_loss
        network.zero_grad()
        head.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_([*network.parameters(), *head.parameters()], 1.0)
        optimizer.step(learning_rate(step, bert2018=False))
        for name, value in (("loss", loss), ("class_loss", class_loss), ("grad_norm", norm)):
            curves[name].append(value.item())
    return {name: np.asarray(values) for name, values in curves.items()}


def main() -> int:
    """Record, or compare with ``--check`` (exit code 3 on a difference above 1e-5)."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare with the stored fixture")
    arguments = parser.parse_args()
    torch.use_deterministic_algorithms(True)
    arrays = record()
    if not arguments.check:
        np.savez_compressed(FIXTURE, **arrays)
        print(f"{FIXTURE.name}: {FIXTURE.stat().st_size:,} bytes")
        return 0
    worst = check(FIXTURE, arrays)
    print(f"{FIXTURE.name}: {worst:.1e}")
    return 3 if worst > 1e-5 else 0


if __name__ == "__main__":
    sys.exit(main())
