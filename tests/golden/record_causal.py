"""Records the loss curve of the causal language model: modules of torch on the batches of ``cases.py``.

    pip install -r tests/golden/requirements.lock      (an environment of its own; torch and numpy suffice)
    python tests/golden/record_causal.py               writes tests/golden/fixtures/causal_lm.npz
    python tests/golden/record_causal.py --check       compares with what is there instead

``logits`` of the first batch with the first weights, computed in float64 and stored as float32; ``loss`` and
``grad_norm`` (before clipping at 1) of 50 optimizer steps in float32. The loss is the mean over the tokens whose
next token belongs to the same sequence. Weights and batches are stored nowhere: ``cases.py`` makes them.
"""

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from cases import CURVE_MODEL, CURVE_STEPS, causal_batch, learning_rate, original_tokens, weights
from torch import nn

FIXTURE = Path(__file__).parent / "fixtures" / "causal_lm.npz"


class Network(nn.Module):
    """Embeddings, torch's post-LN encoder, and the table of word embeddings as output layer."""

    def __init__(self, model: Mapping[str, int | str]) -> None:
        super().__init__()
        hidden, self.heads = model["hidden_size"], model["num_attention_heads"]
        self.words = nn.Embedding(model["vocab_size"], hidden)
        self.segments = nn.Embedding(model["type_vocab_size"], hidden)
        self.positions = nn.Embedding(model["max_position_embeddings"], hidden)
        self.norm = nn.LayerNorm(hidden, eps=1e-12)
        layer = nn.TransformerEncoderLayer(
            hidden, self.heads, model["intermediate_size"], dropout=0.0, activation=model["activation"],
            layer_norm_eps=1e-12, batch_first=True, norm_first=False,
        )  # fmt: skip
        self.encoder = nn.TransformerEncoder(layer, model["num_layers"], enable_nested_tensor=False)

    def forward(self, features: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Logits [B, S, V]. A token sees itself and what precedes it in its sequence."""
        sequences, length = features["sequence_ids"], features["sequence_ids"].shape[1]
        earlier = torch.ones(length, length, dtype=torch.bool).tril()
        visible = (sequences[:, :, None] == sequences[:, None, :]) & earlier
        x = self.words(features["tokens"])
        x = self.norm(x + self.segments(features["token_type_ids"]) + self.positions(features["position_ids"]))
        x = self.encoder(x, mask=~visible.repeat_interleave(self.heads, dim=0))
        return x @ self.words.weight.T


def torch_weights(model: Mapping[str, int | str]) -> dict[str, torch.Tensor]:
    """The shared weights under torch's names: [out, in], query, key and value in one."""
    given = {name: torch.from_numpy(value) for name, value in weights(model).items()}
    given = {name: value.T if name.endswith("kernel") else value for name, value in given.items()}
    result = {
        "words.weight": given["embeddings/word_embeddings/embedding"],
        "segments.weight": given["embeddings/token_type_embeddings/embedding"],
        "positions.weight": given["embeddings/position_embeddings/embedding"],
        "norm.weight": given["embeddings/layer_norm/scale"],
        "norm.bias": given["embeddings/layer_norm/bias"],
    }
    for i in range(model["num_layers"]):
        ours, theirs = f"encoder/layer_{i}", f"encoder.layers.{i}"
        for of_ours, of_theirs in (("kernel", "weight"), ("bias", "bias")):
            parts = [given[f"{ours}/attention/{part}/{of_ours}"] for part in ("query", "key", "value")]
            result[f"{theirs}.self_attn.in_proj_{of_theirs}"] = torch.cat(parts)
            result[f"{theirs}.self_attn.out_proj.{of_theirs}"] = given[f"{ours}/attention/output/{of_ours}"]
            result[f"{theirs}.linear1.{of_theirs}"] = given[f"{ours}/feed_forward/intermediate/{of_ours}"]
            result[f"{theirs}.linear2.{of_theirs}"] = given[f"{ours}/feed_forward/output/{of_ours}"]
        for of_ours, of_theirs in (("scale", "weight"), ("bias", "bias")):
            result[f"{theirs}.norm1.{of_theirs}"] = given[f"{ours}/attention/layer_norm/{of_ours}"]
            result[f"{theirs}.norm2.{of_theirs}"] = given[f"{ours}/feed_forward/layer_norm/{of_ours}"]
    return result


def build(dtype: torch.dtype) -> Network:
    network = Network(CURVE_MODEL)
    network.load_state_dict(torch_weights(CURVE_MODEL))
    return network.to(dtype).train()


def torch_batch(step: int) -> dict[str, torch.Tensor]:
    batch = causal_batch(step)
    names = ("token_type_ids", "sequence_ids", "position_ids")
    return {name: torch.from_numpy(batch[name]).long() for name in names} | {
        "tokens": torch.from_numpy(original_tokens(batch)).long()
    }


def loss_of(logits: torch.Tensor, features: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Mean cross-entropy of the next tokens; -100 is what torch leaves out."""
    sequences, targets = features["sequence_ids"], features["tokens"][:, 1:].clone()
    targets[(sequences[:, 1:] != sequences[:, :-1]) | (sequences[:, 1:] == 0)] = -100
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), targets.flatten(), ignore_index=-100)


def record() -> dict[str, np.ndarray]:
    with torch.no_grad():
        logits = build(torch.float64)(torch_batch(0)).numpy().astype(np.float32)
    network = build(torch.float32)
    groups = {0.01: [], 0.0: []}  # by weight decay
    for name, parameter in network.named_parameters():
        groups[0.0 if name.endswith("bias") or "norm" in name else 0.01].append(parameter)
    optimizer = torch.optim.AdamW(
        [{"params": group, "weight_decay": decay} for decay, group in groups.items()],
        lr=0.0, betas=(0.9, 0.999), eps=1e-6,
    )  # fmt: skip
    losses, norms = [], []
    for step in range(CURVE_STEPS):
        features = torch_batch(step)
        loss = loss_of(network(features), features)
        optimizer.zero_grad()
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(network.parameters(), 1.0).item())
        losses.append(loss.item())
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, bert2018=False)
        optimizer.step()
    return {"logits": logits, "loss": np.asarray(losses), "grad_norm": np.asarray(norms)}


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
    with np.load(FIXTURE) as stored:
        worst = {name: float(np.abs(stored[name] - value).max()) for name, value in arrays.items()}
    for name, difference in worst.items():
        print(f"{name}: {difference:.1e}")
    return 3 if max(worst.values()) > 1e-5 else 0


if __name__ == "__main__":
    sys.exit(main())
