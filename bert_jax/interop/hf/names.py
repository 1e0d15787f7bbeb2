"""Names of the tensors of BERT and RoBERTa in Hugging Face folders, for both the reader and the writer.

torch stores the weight of a linear layer as [out, in], so every stored kernel is the transpose of the canonical
kernel.
"""

import re
from collections.abc import Iterable

from bert_jax.config import ModelSpec
from bert_jax.interop.exchange import parameter_shapes
from bert_jax.interop.stored import StoredName

# Modules of the masked-LM head by family: output bias and tied copies, transform, LayerNorm.
_MLM = {
    "bert": ("cls.predictions", "cls.predictions.transform.dense", "cls.predictions.transform.LayerNorm"),
    "roberta": ("lm_head", "lm_head.dense", "lm_head.layer_norm"),
}
# Tied tensors: name of the copy -> canonical parameter that equals it.
TIED = {
    family: {
        f"{head}.decoder.weight": "embeddings/word_embeddings/embedding",
        f"{head}.decoder.bias": "mlm_head/output_bias",
    }
    for family, (head, *_) in _MLM.items()
}
# Buffers that old versions of transformers store. They contain constant ids, not weights.
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
_LEAF = {"kernel": "weight", "bias": "bias", "scale": "weight", "embedding": "weight", "output_bias": "bias"}
# Heads whose layer is named "classifier": a folder can contain only one of them.
_CLASSIFIERS = ("sequence", "token", "choice")


# Family -> beginning of the names of tensors that only the classes of this family with heads have.
_RECOGNIZED = {
    "bert": re.compile(r"(module\.)?bert\.(embeddings|encoder)\."),
    "roberta": re.compile(r"(module\.)?roberta\.(embeddings|encoder)\."),
}


def recognized_family(names: Iterable[str]) -> str | None:
    """Return the family to which tensors with these names belong. Return None if no family or several families
    match: the classes without heads have no prefix, so their names do not determine the family."""
    names = [*names]
    families = [family for family, begin in _RECOGNIZED.items() if any(map(begin.match, names))]
    return families[0] if len(families) == 1 else None


def hf_names(spec: ModelSpec, prefix: str | None = None) -> dict[str, StoredName]:
    """Return a dict from canonical to stored parameter names, in the order of ``parameter_shapes``.

    Parameters of the sentence head are excluded. The names of encoder tensors begin with ``prefix``, which includes
    its dot; None: the prefix that the transformers class with these heads uses. ``spec.model`` must have only
    values that ``config_json.SUPPORTED`` allows. Raises ``ValueError`` for two heads whose tensors have the same
    name, and for a sentence-pair head of RoBERTa.
    """
    heads, family = spec.heads, spec.family
    clash = [name for name in _CLASSIFIERS if name in heads.present()]
    if len(clash) > 1:
        heads_found = f"{', '.join(clash)}, because their tensors have the same name"
        raise ValueError(f"a Hugging Face folder can contain only one of the heads {heads_found}; keep one of them")
    if family == "roberta" and heads.nsp:
        raise ValueError("RoBERTa has no sentence-pair (nsp) head in Hugging Face folders")
    if prefix is None:
        # Classes with a head name the encoder after the family.
        prefix = f"{family}." if set(heads.present()) - {"pooler"} else ""
    modules, names = module_names(spec, prefix), {}
    for name in parameter_shapes(spec):
        module, _, leaf = name.rpartition("/")
        if not name.startswith("sentence_head/"):
            names[name] = StoredName(f"{modules[module]}.{_LEAF[leaf]}", transpose=leaf == "kernel")
    return names


def module_names(spec: ModelSpec, prefix: str) -> dict[str, str]:
    """Return a dict from canonical to stored module names. The stored names of encoder modules begin with
    ``prefix``, which includes its dot."""
    modules = {
        f"embeddings/{table}_embeddings": f"{prefix}embeddings.{table}_embeddings"
        for table in ("word", "token_type", "position")
    }
    modules["embeddings/layer_norm"] = f"{prefix}embeddings.LayerNorm"
    for i in range(spec.model.num_layers):
        modules |= {f"encoder/layer_{i}/{ours}": f"{prefix}encoder.layer.{i}.{hf}" for ours, hf in _LAYER.items()}
    modules |= zip(("mlm_head", "mlm_head/transform", "mlm_head/layer_norm"), _MLM[spec.family], strict=True)
    modules |= {f"{head}_head": "classifier" for head in _CLASSIFIERS}
    modules |= {
        "pooler": f"{prefix}pooler.dense",
        "nsp_head": "cls.seq_relationship",
        "span_head": "qa_outputs",
    }
    if spec.family == "roberta" and spec.heads.sequence_labels:
        # In RoBERTa tanh(dense(first token)) belongs to the head, and the encoder has no pooler.
        modules |= {"pooler": "classifier.dense", "sequence_head": "classifier.out_proj"}
    return modules
