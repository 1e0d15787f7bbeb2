"""Records the loss curves of replaced token detection: modules of torch on the batches of ``cases.py``.

    pip install -r tests/golden/requirements.lock      (an environment of its own; torch and numpy suffice)
    python tests/golden/record_rtd.py                  writes tests/golden/fixtures/replaced_tokens.npz
    python tests/golden/record_rtd.py --check          compares with what is there instead

For each way of sharing embeddings: ``loss`` (generator plus 50 times discriminator), ``rtd_loss`` and ``grad_norm``
(before clipping at 1) of 50 optimizer steps in float32. The samples of the generator are the arguments of the
maximum of logits plus the noise of ``cases.py``. Weights and batches are stored nowhere: ``cases.py`` makes them.
"""

import argparse
import sys
from pathlib import Path

import numpy as np
import torch
from cases import (
    CURVE_MODEL,
    CURVE_STEPS,
    GENERATOR_MODEL,
    SHARINGS,
    is_decayed,
    learning_rate,
    original_tokens,
    rtd_batch,
    rtd_weights,
)
from torch import nn

FIXTURE = Path(__file__).parent / "fixtures" / "replaced_tokens.npz"
Parameters = dict[str, torch.Tensor]


def dense(x: torch.Tensor, p: Parameters, name: str) -> torch.Tensor:
    return x @ p[f"{name}/kernel"] + p[f"{name}/bias"]


def norm(x: torch.Tensor, p: Parameters, name: str) -> torch.Tensor:
    return nn.functional.layer_norm(x, x.shape[-1:], p[f"{name}/scale"], p[f"{name}/bias"], 1e-12)


def encode(
    p: Parameters, network: str, model: dict, x: torch.Tensor, sequences: torch.Tensor, *, causal: bool = False
) -> torch.Tensor:
    """A post-LN encoder whose tokens see the tokens of their sequence, with ``causal`` only up to themselves."""
    heads, width = model["num_attention_heads"], model["hidden_size"]
    visible = (sequences[:, :, None] == sequences[:, None, :])[:, None]
    if causal:
        visible = visible.tril()

    def split(x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (heads, width // heads)).transpose(1, 2)

    for i in range(model["num_layers"]):
        layer = f"{network}/encoder/layer_{i}"
        q, k, v = (split(dense(x, p, f"{layer}/attention/{part}")) for part in ("query", "key", "value"))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=visible)
        attended = dense(mixed.transpose(1, 2).flatten(2), p, f"{layer}/attention/output")
        x = norm(x + attended, p, f"{layer}/attention/layer_norm")
        inner = nn.functional.gelu(dense(x, p, f"{layer}/feed_forward/intermediate"))
        x = norm(x + dense(inner, p, f"{layer}/feed_forward/output"), p, f"{layer}/feed_forward/layer_norm")
    return x


def tables(p: Parameters, network: str, sharing: str) -> Parameters:
    """The embedding parameters that a network uses."""
    owner = "discriminator" if sharing == "shared" else network
    names = [name for name in p if name.startswith(f"{owner}/embeddings/")]
    found = {name.removeprefix(f"{owner}/"): p[name] for name in names}
    if sharing == "disentangled" and network == "discriminator":
        for part in ("word", "position"):
            name = f"embeddings/{part}_embeddings/embedding"
            found[name] = found[name] + p[f"generator/{name}"].detach()
    return found


def embed(p: Parameters, network: str, sharing: str, features: dict, ids: torch.Tensor) -> tuple:
    t = tables(p, network, sharing)
    words = t["embeddings/word_embeddings/embedding"]
    x = words[ids] + t["embeddings/token_type_embeddings/embedding"][features["token_type_ids"]]
    x = norm(
        x + t["embeddings/position_embeddings/embedding"][features["position_ids"]], t, "embeddings/layer_norm"
    )
    projection = f"{network}/embeddings/projection"
    return (dense(x, p, projection) if f"{projection}/kernel" in p else x), words


def losses(p: Parameters, sharing: str, features: dict) -> tuple[torch.Tensor, torch.Tensor]:
    """Losses of generator and discriminator."""
    sequences, rows = features["sequence_ids"], torch.arange(len(features["input_ids"]))[:, None]
    x, words = embed(p, "generator", sharing, features, features["input_ids"])
    x = encode(p, "generator", GENERATOR_MODEL, x, sequences)[rows, features["mlm_positions"]]
    x = nn.functional.gelu(dense(x, p, "generator/mlm_head/transform"))
    logits = norm(x, p, "generator/mlm_head/layer_norm") @ words.T + p["generator/mlm_head/output_bias"]
    chosen = features["mlm_weights"] > 0
    mlm = nn.functional.cross_entropy(logits[chosen], features["mlm_labels"][chosen])
    sampled = (logits.detach() + features["noise"]).argmax(-1)
    corrupted = features["original"].clone()
    corrupted[rows.expand_as(chosen)[chosen], features["mlm_positions"][chosen]] = sampled[chosen]
    x, _ = embed(p, "discriminator", sharing, features, corrupted)
    x = encode(p, "discriminator", CURVE_MODEL, x, sequences)
    x = nn.functional.gelu(dense(x, p, "discriminator/rtd_head/transform"))
    scores = dense(x, p, "discriminator/rtd_head/output")[..., 0]
    is_token = sequences > 0
    is_replaced = (corrupted != features["original"]).float()
    rtd = nn.functional.binary_cross_entropy_with_logits(scores[is_token], is_replaced[is_token])
    return mlm, rtd


def torch_batch(step: int) -> dict[str, torch.Tensor]:
    batch = rtd_batch(step)
    features = {
        name: torch.from_numpy(value).long()
        for name, value in (batch | {"original": original_tokens(batch)}).items()
        if name not in ("noise", "mlm_weights", "sequence_keys", "nsp_weights")
    }
    return features | {name: torch.from_numpy(batch[name]) for name in ("noise", "mlm_weights")}


def curve(sharing: str) -> dict[str, np.ndarray]:
    p = {name: nn.Parameter(torch.from_numpy(value.copy())) for name, value in rtd_weights(sharing).items()}
    groups = [
        {"params": [value for name, value in p.items() if is_decayed(name) is decayed], "weight_decay": decay}
        for decayed, decay in ((True, 0.01), (False, 0.0))
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.999), eps=1e-6)
    found: dict[str, list[float]] = {"loss": [], "rtd_loss": [], "grad_norm": []}
    for step in range(CURVE_STEPS):
        mlm, rtd = losses(p, sharing, torch_batch(step))
        optimizer.zero_grad()
        (mlm + 50 * rtd).backward()
        found["grad_norm"].append(nn.utils.clip_grad_norm_(p.values(), 1.0).item())
        found["loss"].append((mlm + 50 * rtd).item())
        found["rtd_loss"].append(rtd.item())
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, bert2018=False)
        optimizer.step()
    return {f"{sharing}/{name}": np.asarray(values) for name, values in found.items()}


def main() -> int:
    """Record, or compare with ``--check`` (exit code 3 on a difference above 1e-4)."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare with the stored fixture")
    arguments = parser.parse_args()
    torch.use_deterministic_algorithms(True)
    arrays = {name: values for sharing in SHARINGS for name, values in curve(sharing).items()}
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
