"""Records the fixtures of the parity tests: transformers' BERT in torch on the cases of ``cases.py``.

    pip install -r tests/golden/requirements.lock      (an environment of its own)
    python tests/golden/record.py                      writes tests/golden/fixtures/*.npz
    python tests/golden/record.py --check              compares with what is there instead

Loss of every fixture: sum(w * nll) / (sum(w) + 1e-5) over the masked positions, plus the mean next-sentence
cross-entropy. Model fixtures: all outputs and, but for the largest case, the gradient of every parameter,
computed in float64 and stored as float32, so that all of the tests' bar is left to the implementation under
test (the gradient of a key bias is 0 in exact arithmetic: in float32 both sides would show noise alone).
Curve fixtures: 50 optimizer steps in float32 with clipping at a global norm of 1.
"""

import argparse
import sys
from pathlib import Path

import numpy as np
import torch
from cases import (
    CURVE_MODEL,
    CURVE_STEPS,
    MODEL_CASES,
    Case,
    batch,
    curve_case,
    is_decayed,
    learning_rate,
    parameter_shapes,
)
from reference import build, forward, gradients, reference_name

FIXTURES = Path(__file__).parent / "fixtures"


def record_case(case: Case, dtype: torch.dtype = torch.float64) -> dict[str, np.ndarray]:
    """Outputs and, where the case asks for them, ``gradient:NAME`` of every parameter, as float32."""
    network = build(case.model, dtype)
    outputs = forward(network, batch(case))
    result = {name: value.detach().numpy() for name, value in outputs.items()}
    if case.gradients:
        outputs["loss"].backward()
        for name, value in gradients(network, case.model).items():
            result[f"gradient:{name}"] = value
    return {name: value.astype(np.float32) for name, value in result.items()}


class BertAdam:
    """google-research/bert's optimizer: no bias correction, decay added to the update, all times the rate."""

    def __init__(self, decayed: list[torch.Tensor], others: list[torch.Tensor]) -> None:
        self.groups = [(p, 0.01) for p in decayed] + [(p, 0.0) for p in others]
        self.moments = [(torch.zeros_like(p), torch.zeros_like(p)) for p, _ in self.groups]

    @torch.no_grad()
    def step(self, rate: float) -> None:
        for (p, decay), (m, v) in zip(self.groups, self.moments, strict=True):
            m.mul_(0.9).add_(p.grad, alpha=0.1)
            v.mul_(0.999).addcmul_(p.grad, p.grad, value=0.001)
            p.sub_(rate * (m / (v.sqrt() + 1e-6) + decay * p))


class AdamW:
    """``torch.optim.AdamW`` with the rate of each step given from outside."""

    def __init__(self, decayed: list[torch.Tensor], others: list[torch.Tensor]) -> None:
        groups = [{"params": decayed, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.999), eps=1e-6)

    def step(self, rate: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()


def record_curve(*, bert2018: bool) -> dict[str, np.ndarray]:
    """Losses, gradient norms before clipping and rates of every step; parameters after the last."""
    model = CURVE_MODEL | ({"activation": "gelu_tanh"} if bert2018 else {})
    network = build(model, torch.float32)
    by_name = dict(network.named_parameters())
    names = list(parameter_shapes(model))
    decayed = [by_name[reference_name(n)] for n in names if is_decayed(n)]
    others = [by_name[reference_name(n)] for n in names if not is_decayed(n)]
    optimizer = (BertAdam if bert2018 else AdamW)(decayed, others)
    curves: dict[str, list[float]] = {n: [] for n in ("loss", "mlm_loss", "nsp_loss", "grad_norm", "learning_rate")}
    for step in range(CURVE_STEPS):
        outputs = forward(network, batch(curve_case(step)))
        network.zero_grad()
        outputs["loss"].backward()
        norm = torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        rate = learning_rate(step, bert2018=bert2018)
        optimizer.step(rate)
        for name in ("loss", "mlm_loss", "nsp_loss"):
            curves[name].append(outputs[name].item())
        curves["grad_norm"].append(norm.item())
        curves["learning_rate"].append(rate)
    result = {name: np.asarray(values) for name, values in curves.items()}
    for name in names:
        value = by_name[reference_name(name)].detach().numpy()
        result[f"parameter:{name}"] = value.T if name.endswith("kernel") else value
    return result


def check(path: Path, arrays: dict[str, np.ndarray]) -> float:
    """Largest difference between a fixture and what was computed now."""
    with np.load(path) as stored:
        if set(stored.files) != set(arrays):
            raise ValueError(f"{path}: other arrays than recorded: {sorted(set(stored.files) ^ set(arrays))}")
        return max(float(np.abs(stored[name] - value).max()) for name, value in arrays.items())


def main() -> int:
    """Record, or compare with ``--check`` (exit code 3 on a difference above 1e-5)."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare with the stored fixtures")
    arguments = parser.parse_args()
    torch.use_deterministic_algorithms(True)
    fixtures = {f"model_{case.name}": record_case(case) for case in MODEL_CASES}
    fixtures["curve_standard"] = record_curve(bert2018=False)
    fixtures["curve_bert2018"] = record_curve(bert2018=True)
    if not arguments.check:
        FIXTURES.mkdir(exist_ok=True)
        for name, arrays in fixtures.items():
            path = FIXTURES / f"{name}.npz"
            np.savez_compressed(path, **arrays)
            print(f"{path.name}: {path.stat().st_size:,} bytes")
        for case in MODEL_CASES:
            single, exact = record_case(case, torch.float32), fixtures[f"model_{case.name}"]
            worst = max(float(np.abs(single[n] - exact[n]).max()) for n in exact if not n.startswith("gradient"))
            print(f"{case.name}: outputs of transformers in float32 are within {worst:.1e} of these")
        return 0
    worst = {name: check(FIXTURES / f"{name}.npz", arrays) for name, arrays in fixtures.items()}
    for name, difference in worst.items():
        print(f"{name}: {difference:.1e}")
    return 3 if max(worst.values()) > 1e-5 else 0


if __name__ == "__main__":
    sys.exit(main())
