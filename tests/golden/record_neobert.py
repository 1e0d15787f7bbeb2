"""Records what NeoBERT computes, from a statement of its forward pass in torch.

    python tests/golden/record_neobert.py      writes tests/golden/fixtures/families/neobert.{json,npz}

The facts are those of the authors' ``model.py`` (chandar-lab/NeoBERT) and of Le Breton et al. 2025, section 3: the
names and shapes of the tensors, RMSNorm before each block and after the last, complex rotary positions on pairs of
neighbouring dimensions with base 10,000, one projection with query, key and value of each head next to each other,
SwiGLU with two thirds of ``intermediate_size``, an own output layer with a bias. Weights, outputs and gradients are
those of ``record_families.py``.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from family_cases import CASES, LABELS, classes, inputs, values
from record_families import FIXTURES, gradients
from record_fields import FILE
from safetensors.torch import load_file, save_file
from torch import nn

CONFIG = {
    "auto_map": {
        "AutoConfig": "model.NeoBERTConfig", "AutoModel": "model.NeoBERT",
        "AutoModelForMaskedLM": "model.NeoBERTLMHead",
        "AutoModelForSequenceClassification": "model.NeoBERTForSequenceClassification",
    },
    "classifier_init_range": 0.02, "decoder_init_range": 0.02, "embedding_init_range": 0.02,
    "kwargs": {
        "classifier_init_range": 0.02, "pretrained_model_name_or_path": "google-bert/bert-base-uncased",
        "trust_remote_code": True,
    },
    "model_type": "neobert", "pad_token_id": 0, "pretrained_model_name_or_path": "google-bert/bert-base-uncased",
    "torch_dtype": "float32", "transformers_version": "4.48.2", "trust_remote_code": True,
}  # fmt: skip


# Defaults of the authors' config class.
DEFAULTS = {
    "hidden_size": 768, "num_hidden_layers": 28, "num_attention_heads": 12, "intermediate_size": 3072,
    "embedding_init_range": 0.02, "decoder_init_range": 0.02, "norm_eps": 1e-6, "vocab_size": 30522,
    "pad_token_id": 0, "max_length": 1024, "dim_head": 64, "kwargs": {}, "model_type": "neobert",
}  # fmt: skip


class FeedForward(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.w12 = nn.Linear(width, 2 * inner, bias=False)
        self.w3 = nn.Linear(inner, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, value = self.w12(x).chunk(2, dim=-1)
        return self.w3(nn.functional.silu(gate) * value)


class Layer(nn.Module):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        width, inner = config["hidden_size"], 2 * config["intermediate_size"] // 3
        self.heads = config["num_attention_heads"]
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.wo = nn.Linear(width, width, bias=False)
        self.ffn = FeedForward(width, (inner + 7) // 8 * 8)
        self.attention_norm = nn.RMSNorm(width, config["norm_eps"])
        self.ffn_norm = nn.RMSNorm(width, config["norm_eps"])

    def forward(self, x: torch.Tensor, seen: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        rows, length, width = x.shape
        parts = self.qkv(self.attention_norm(x)).reshape(rows, length, self.heads, -1)
        query, key, value = parts.chunk(3, dim=-1)
        query, key = (turned(part, turns) for part in (query, key))
        scores = torch.einsum("bqhd,bkhd->bhqk", query, key) / (width // self.heads) ** 0.5
        weights = scores.masked_fill(~seen[:, None, None, :], -torch.inf).softmax(-1)
        mixed = torch.einsum("bhqk,bkhd->bqhd", weights, value).reshape(rows, length, width)
        x = x + self.wo(mixed)
        return x + self.ffn(self.ffn_norm(x))


def turned(x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
    """The heads' pairs of neighbouring dimensions as complex numbers, multiplied by ``turns`` [length, pairs]."""
    pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2).contiguous())
    return torch.view_as_real(pairs * turns[None, :, None]).reshape(x.shape)


class NeoBERT(nn.Module):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.size = config["hidden_size"] // config["num_attention_heads"]
        self.encoder = nn.Embedding(config["vocab_size"], config["hidden_size"])
        self.transformer_encoder = nn.ModuleList(Layer(config) for _ in range(config["num_hidden_layers"]))
        self.layer_norm = nn.RMSNorm(config["hidden_size"], config["norm_eps"])

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> dict[str, torch.Tensor]:
        rates = 10_000.0 ** -(torch.arange(0, self.size, 2, dtype=torch.float64) / self.size)
        angles = torch.outer(torch.arange(input_ids.shape[1], dtype=torch.float64), rates)
        turns, x = torch.polar(torch.ones_like(angles), angles), self.encoder(input_ids)
        for layer in self.transformer_encoder:
            x = layer(x, attention_mask.bool(), turns)
        return {"last_hidden_state": self.layer_norm(x)}


class NeoBERTLMHead(nn.Module):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.model = NeoBERT(config)
        self.decoder = nn.Linear(config["hidden_size"], config["vocab_size"])

    def forward(self, **batch: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"logits": self.decoder(self.model(**batch)["last_hidden_state"])}


class NeoBERTForSequenceClassification(nn.Module):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.model = NeoBERT(config)
        self.dense = nn.Linear(config["hidden_size"], config["hidden_size"])
        self.classifier = nn.Linear(config["hidden_size"], len(LABELS["id2label"]))

    def forward(self, **batch: torch.Tensor) -> dict[str, torch.Tensor]:
        first = self.model(**batch)["last_hidden_state"][:, 0]
        return {"logits": self.classifier(torch.tanh(self.dense(first)))}


def run(folder: Path, scratch: Path) -> dict[str, Any]:
    """Load all tensors of ``folder``, run the batches in ``scratch`` and write the outputs beside them."""
    config = json.loads((folder / "config.json").read_text())
    model = globals()[config["architectures"][0]](config)
    model.load_state_dict(load_file(folder / "model.safetensors"))  # raises for a missing or unexpected tensor
    model.to(torch.float64)
    for file in sorted(scratch.glob("in_*.npz")):
        batch = {key: torch.from_numpy(array) for key, array in np.load(file).items() if key != "token_type_ids"}
        with torch.no_grad():
            found = model(**batch)
        np.savez(scratch / file.name.replace("in_", "out_"), **{key: value.numpy() for key, value in found.items()})
    save_again(folder, scratch)
    return {"version": "statement", "problems": []}


def save_again(folder: Path, scratch: Path) -> None:
    """Write ``folder`` again in shards of five tensors and in float16."""
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    parts = [names[i : i + 5] for i in range(0, len(names), 5)]
    files = {f"model-{i + 1:05}-of-{len(parts):05}.safetensors": part for i, part in enumerate(parts)}
    for kind in ("shards", "float16"):
        (scratch / kind).mkdir()
        shutil.copy(folder / "config.json", scratch / kind)
    for file, part in files.items():
        save_file({name: tensors[name] for name in part}, scratch / "shards" / file, {"format": "pt"})
    index = {"metadata": {}, "weight_map": {name: file for file, part in files.items() for name in part}}
    (scratch / "shards" / "model.safetensors.index.json").write_text(json.dumps(index))
    save_file({name: tensor.half() for name, tensor in tensors.items()}, scratch / "float16" / "model.safetensors")


def count(kind: str, config: dict[str, Any]) -> int:
    """Number of parameters of the class ``kind`` on the meta device."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in globals()[kind](config).parameters())


def record(case: str, name: str) -> tuple[dict, dict[str, np.ndarray]]:
    config = CASES[case]["config"]
    model = globals()[name](config).to(torch.float64)
    shapes = {key: list(value.shape) for key, value in model.state_dict().items()}
    model.load_state_dict({key: torch.from_numpy(values(key, tuple(shape))) for key, shape in shapes.items()})
    arrays: dict[str, np.ndarray] = {}
    trained: list[str] = []
    for side in ("right", "left") if name == "NeoBERT" else ("right",):
        batch = inputs(case, side == "left")
        found = model(**{key: torch.from_numpy(batch[key]) for key in ("input_ids", "attention_mask")})
        arrays |= {f"{side}/{key}": value.detach().numpy() for key, value in found.items()}
        if side == "right":
            trained, arrays["gradients"] = gradients(model, found, batch, False)
    more = LABELS if "Sequence" in name else {}
    stored = (
        CONFIG
        | config
        | more
        | {"architectures": [name], "dim_head": config["hidden_size"] // config["num_attention_heads"]}
    )
    return {"config": stored, "tensors": shapes, "gradients": trained}, {
        key: np.float32(array) for key, array in arrays.items()
    }


def main() -> None:
    for case in ("neobert", "neobert_sizes"):
        told, arrays = {}, {}
        for name in classes(case):
            told[name], found = record(case, name)
            arrays |= {f"{name}/{key}": array for key, array in found.items()}
        (FIXTURES / f"{case}.json").write_text(json.dumps(told, indent=0, sort_keys=True) + "\n")
        np.savez_compressed(FIXTURES / f"{case}.npz", **arrays)
        print(case, len(told))
    fields = json.loads(FILE.read_text()) | {"neobert": {"statement": DEFAULTS}}
    FILE.write_text(json.dumps(fields, indent=0, sort_keys=True) + "\n")
    published = {"vocab_size": 30522, "hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12}
    published |= {"num_hidden_layers": 28, "norm_eps": 1e-5}
    print({kind: count(kind, published) for kind in ("NeoBERT", "NeoBERTLMHead")})


if __name__ == "__main__":
    main()
