"""Records the loss curves of masked language models and of fine-tuning of a causal model, by functions of torch.

    pip install -r tests/golden/requirements.lock      (an environment of its own; torch and numpy suffice)
    python tests/golden/record_masked.py               writes tests/golden/fixtures/masked_lm.npz
    python tests/golden/record_masked.py --check       compares with what is there instead

For each entry of ``MASKINGS``, and for ``gpt``: the losses and ``grad_norm`` (before clipping at 1) of 50 optimizer
steps in float32. The masks of the batches are those of this library, in ``masked_batches.npz``
(``test_masked_curves.py``); all else is made by ``cases.py``.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from cases import (
    CURVE_MODEL,
    CURVE_STEPS,
    GPT_WEIGHT,
    MASKINGS,
    gpt_batch,
    gpt_weights,
    is_decayed,
    learning_rate,
    masked_batch,
    masked_weights,
)
from record_rtd import dense, embed, encode, norm
from torch import nn

FIXTURE = Path(__file__).parent / "fixtures" / "masked_lm.npz"


def masked_losses(p: dict, name: str, features: dict) -> dict:
    """The loss of the masked tokens, and that of the sentence pairs."""
    whole = {f"x/{key}": value for key, value in p.items()}
    x, words = embed(whole, "x", "none", features, features["input_ids"])
    x = encode(whole, "x", CURVE_MODEL, x, features["sequence_ids"])
    rows = torch.arange(len(x))[:, None]
    inner = nn.functional.gelu(dense(x[rows, features["mlm_positions"]], p, "mlm_head/transform"))
    logits = norm(inner, p, "mlm_head/layer_norm") @ words.T + p["mlm_head/output_bias"]
    nll = torch.logsumexp(logits, -1) - logits.gather(-1, features["mlm_labels"][..., None])[..., 0]
    chosen = features["mlm_weights"]
    losses = {"mlm_loss": (nll * chosen).sum() / (chosen.sum() + 1e-5)}
    if MASKINGS[name]["next_sentence"] != "none":
        scores = dense(torch.tanh(dense(x[:, 0], p, "pooler")), p, "nsp_head")
        losses["nsp_loss"] = nn.functional.cross_entropy(scores, features["nsp_labels"][:, 0])
    return losses


def gpt_losses(p: dict, features: dict) -> dict:
    """The loss of the class of each pair, read at its last token, and the weighted loss of the next tokens."""
    whole = {f"x/{key}": value for key, value in p.items()}
    x, words = embed(whole, "x", "none", features, features["input_ids"])
    x = encode(whole, "x", CURVE_MODEL, x, features["sequence_ids"], causal=True)
    is_last = features["input_ids"] == 3
    classes = features["labels"][features["weights"] > 0]  # pairs in the order of their last tokens
    task = nn.functional.cross_entropy(x[is_last] @ p["sequence_head/kernel"], classes)
    sequences = features["sequence_ids"]
    is_next = (sequences[:, 1:] == sequences[:, :-1]) & (sequences[:, 1:] > 0)
    logits = (x @ words.T)[:, :-1][is_next]
    lm = nn.functional.cross_entropy(logits, features["input_ids"][:, 1:][is_next])
    return {"loss": task, "lm_loss": GPT_WEIGHT * lm}


def curve(given: dict[str, np.ndarray], losses_of: Callable, batch_of: Callable) -> dict[str, np.ndarray]:
    """Losses and gradient norms of 50 steps of AdamW."""
    p = {name: torch.nn.Parameter(torch.from_numpy(value.copy())) for name, value in given.items()}
    groups = [
        {"params": [value for name, value in p.items() if is_decayed(name) is decayed], "weight_decay": decay}
        for decayed, decay in ((True, 0.01), (False, 0.0))
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.999), eps=1e-6)
    found: dict[str, list[float]] = {}
    for step in range(CURVE_STEPS):
        features = {
            name: torch.from_numpy(np.array(array, np.float32 if array.dtype == np.float32 else np.int64))
            for name, array in batch_of(step).items()
        }
        losses = losses_of(p, features)
        optimizer.zero_grad()
        sum(losses.values()).backward()
        values = {name: loss.item() for name, loss in losses.items()}
        norm = torch.nn.utils.clip_grad_norm_(p.values(), 1.0).item()
        values |= {"total": sum(values.values()), "grad_norm": norm}
        for name, value in values.items():
            found.setdefault(name, []).append(value)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, bert2018=False)
        optimizer.step()
    return {name: np.asarray(values) for name, values in found.items()}


def main() -> int:
    """Record, or compare with ``--check`` (exit code 3 on a difference above 1e-4)."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare with the stored fixture")
    arguments = parser.parse_args()
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)  # the matrices are small
    curves = {
        name: curve(
            masked_weights(name),
            lambda p, features, name=name: masked_losses(p, name, features),
            lambda step, name=name: masked_batch(name, step),
        )
        for name in MASKINGS
    }
    curves["gpt"] = curve(gpt_weights(), gpt_losses, gpt_batch)
    arrays = {f"{name}/{key}": values for name, found in curves.items() for key, values in found.items()}
    if not arguments.check:
        np.savez_compressed(FIXTURE, **arrays)
        print(f"{FIXTURE.name}: {FIXTURE.stat().st_size:,} bytes")
        return 0
    with np.load(FIXTURE) as stored:
        worst = {name: float(np.abs(stored[name] / value - 1).max()) for name, value in arrays.items()}
    for name, difference in worst.items():
        print(f"{name}: {difference:.1e}")
    return 3 if max(worst.values()) > 1e-4 else 0


if __name__ == "__main__":
    sys.exit(main())
