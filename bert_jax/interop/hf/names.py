"""Names of BERT's and RoBERTa's tensors in Hugging Face folders: one table for both directions.

torch stores a linear layer's weight as [out, in], so every kernel is the transpose of the canonical one.
"""

from bert_jax.config import HeadsConfig, ModelSpec
from bert_jax.interop.exchange import parameter_shapes
from bert_jax.interop.stored import StoredName

# Tied copies: name of the copy -> canonical parameter that it repeats.
TIED = {
    "bert": {
        "cls.predictions.decoder.weight": "embeddings/word_embeddings/embedding",
        "cls.predictions.decoder.bias": "mlm_head/output_bias",
    },
    "roberta": {
        "lm_head.decoder.weight": "embeddings/word_embeddings/embedding",
        "lm_head.decoder.bias": "mlm_head/output_bias",
    },
}
# Buffers that old versions stored: counted upwards, no weights.
BUFFERS = ("embeddings.position_ids", "embeddings.token_type_ids")

_LAYER = {
    "attention/query": "attention.self.query",
    "attention/key": "attention.self.key",
    "attention/value": "attention.self.value",
    "attention/output": "attention.output.dense",
    "attention/layer_norm": "attention.output.LayerNorm",
    "feed_forward/intermediate": "intermediate.dense",
    "feed_forward/output": "output.dense",
    "feed_forward/layer_norm": "output.LayerNorm",
}
_MLM = {
    "bert": {
        "mlm_head/transform": "cls.predictions.transform.dense",
        "mlm_head/layer_norm": "cls.predictions.transform.LayerNorm",
        "mlm_head": "cls.predictions",
    },
    "roberta": {
        "mlm_head/transform": "lm_head.dense",
        "mlm_head/layer_norm": "lm_head.layer_norm",
        "mlm_head": "lm_head",
    },
}
_LEAF = {"kernel": "weight", "bias": "bias", "scale": "weight", "embedding": "weight", "output_bias": "bias"}
# These three are all called "classifier": a folder holds one of them.
CLASSIFIERS = ("sequence", "token", "choice")


def has_prefix(heads: HeadsConfig) -> bool:
    """Return True if the encoder's names begin with the family (``bert.``), as in classes with a head."""
    return any(name != "pooler" for name in heads.present())


def hf_names(spec: ModelSpec, prefix: str | None = None) -> dict[str, StoredName]:
    """Canonical name -> tensor of every parameter but the sentence head's, in the order of parameter_shapes.

    ``prefix`` (with its dot) is that of the encoder; None: as the transformers class for these heads has it.
    ``spec.model`` has what ``config_json.SUPPORTED`` lists. Raises ``ValueError`` for two of the heads that share a
    name and for a sentence-pair head in RoBERTa.
    """
    heads, family = spec.heads, spec.family
    clash = [name for name in CLASSIFIERS if name in heads.present()]
    if len(clash) > 1:
        raise ValueError(f"a Hugging Face folder holds one of the heads {', '.join(clash)}: they share a name")
    if family == "roberta" and heads.nsp:
        raise ValueError("RoBERTa has no sentence-pair (nsp) head in Hugging Face folders")
    if prefix is None:
        prefix = f"{family}." if has_prefix(heads) else ""
    modules = _modules(spec, prefix)
    return {
        name: _tensor(name, modules) for name in parameter_shapes(spec) if not name.startswith("sentence_head/")
    }


def _modules(spec: ModelSpec, prefix: str) -> dict[str, str]:
    """Canonical module -> module of the folder."""
    modules = {
        f"embeddings/{table}_embeddings": f"{prefix}embeddings.{table}_embeddings"
        for table in ("word", "token_type", "position")
    }
    modules["embeddings/layer_norm"] = f"{prefix}embeddings.LayerNorm"
    for i in range(spec.model.num_layers):
        modules |= {f"encoder/layer_{i}/{ours}": f"{prefix}encoder.layer.{i}.{hf}" for ours, hf in _LAYER.items()}
    modules |= _MLM[spec.family]
    modules |= {
        "pooler": f"{prefix}pooler.dense",
        "nsp_head": "cls.seq_relationship",
        "sequence_head": "classifier",
        "token_head": "classifier",
        "choice_head": "classifier",
        "span_head": "qa_outputs",
    }
    if spec.family == "roberta" and spec.heads.sequence_labels:
        # tanh(dense(first token)) belongs to the head there; the encoder has no pooler
        modules |= {"pooler": "classifier.dense", "sequence_head": "classifier.out_proj"}
    return modules


def _tensor(name: str, modules: dict[str, str]) -> StoredName:
    module, _, leaf = name.rpartition("/")
    return StoredName(f"{modules[module]}.{_LEAF[leaf]}", transpose=leaf == "kernel")
