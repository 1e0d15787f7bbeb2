"""The reference side: transformers' ``BertForPreTraining`` on the shared cases. Needs torch and transformers 5."""

import re
from collections.abc import Mapping

import numpy as np
import torch
from cases import weights
from transformers import BertConfig, BertForPreTraining

ACTIVATIONS = {"gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh"}

# Patterns in canonical names, in the order in which they are replaced, and what transformers calls them.
RENAMES = (
    (r"^embeddings/", "bert.embeddings."),
    (r"^encoder/layer_", "bert.encoder.layer."),
    (r"^pooler/", "bert.pooler.dense."),
    (r"^mlm_head/output_bias", "cls.predictions.bias"),
    (r"^mlm_head/transform/", "cls.predictions.transform.dense."),
    (r"^mlm_head/", "cls.predictions.transform."),
    (r"^nsp_head/", "cls.seq_relationship."),
    (r"/attention/(query|key|value)", r".attention.self.\1"),
    (r"/attention/output", ".attention.output.dense"),
    (r"/attention/layer_norm", ".attention.output.LayerNorm"),
    (r"/feed_forward/(intermediate|output)", r".\1.dense"),
    (r"/feed_forward/layer_norm", ".output.LayerNorm"),
    (r"layer_norm", "LayerNorm"),
    (r"(kernel|scale|embedding)$", "weight"),
    (r"/", "."),
)


def reference_name(name: str) -> str:
    """transformers' name of the parameter with this canonical name."""
    for ours, theirs in RENAMES:
        name = re.sub(ours, theirs, name)
    return name


def build(model: Mapping[str, int | str], dtype: torch.dtype) -> BertForPreTraining:
    """The case's model with the shared weights: eager attention, no dropout."""
    config = BertConfig(
        vocab_size=model["vocab_size"],
        hidden_size=model["hidden_size"],
        num_hidden_layers=model["num_layers"],
        num_attention_heads=model["num_attention_heads"],
        intermediate_size=model["intermediate_size"],
        max_position_embeddings=model["max_position_embeddings"],
        type_vocab_size=model["type_vocab_size"],
        hidden_act=ACTIVATIONS[str(model["activation"])],
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        attn_implementation="eager",
    )
    network = BertForPreTraining(config).to(dtype)
    state = {}
    for name, value in weights(model).items():
        tensor = torch.from_numpy(value).to(dtype)
        state[reference_name(name)] = tensor.T.contiguous() if name.endswith("kernel") else tensor
    missing, unexpected = network.load_state_dict(state, strict=False)
    tied = {"cls.predictions.decoder.weight", "cls.predictions.decoder.bias"}
    if unexpected or not set(missing) <= tied:
        raise RuntimeError(f"missing {missing}, unexpected {unexpected}")
    if network.cls.predictions.decoder.weight is not network.bert.embeddings.word_embeddings.weight:
        raise RuntimeError("the MLM projection is not tied to the word embeddings")
    return network.train()


def forward(network: BertForPreTraining, batch: Mapping[str, np.ndarray]) -> dict[str, torch.Tensor]:
    """Outputs under the names of our model (MLM logits at the masked positions), and the pretraining loss."""
    features = {name: torch.from_numpy(value) for name, value in batch.items()}
    encoded = network.bert(
        input_ids=features["input_ids"].long(),
        attention_mask=features["sequence_ids"].long(),
        token_type_ids=features["token_type_ids"].long(),
    )
    mlm_logits, nsp_logits = network.cls(encoded.last_hidden_state, encoded.pooler_output)
    index = features["mlm_positions"].long()[:, :, None].expand(-1, -1, mlm_logits.shape[-1])
    mlm_logits = mlm_logits.gather(1, index)
    nll = torch.nn.functional.cross_entropy(
        mlm_logits.transpose(1, 2), features["mlm_labels"].long(), reduction="none"
    )
    mask = features["mlm_weights"].to(nll.dtype)
    mlm_loss = (mask * nll).sum() / (mask.sum() + 1e-5)
    nsp_loss = torch.nn.functional.cross_entropy(nsp_logits, features["nsp_labels"][:, 0].long())
    return {
        "sequence_output": encoded.last_hidden_state,
        "pooled_output": encoded.pooler_output[:, None],
        "mlm_logits": mlm_logits,
        "nsp_logits": nsp_logits[:, None],
        "mlm_loss": mlm_loss,
        "nsp_loss": nsp_loss,
        "loss": mlm_loss + nsp_loss,
    }


def gradients(network: BertForPreTraining, model: Mapping[str, int | str]) -> dict[str, np.ndarray]:
    """Gradients of the last backward pass under canonical names."""
    by_name = dict(network.named_parameters())
    result = {}
    for name in weights(model):
        grad = by_name[reference_name(name)].grad
        result[name] = (grad.T if name.endswith("kernel") else grad).numpy().copy()
    return result
