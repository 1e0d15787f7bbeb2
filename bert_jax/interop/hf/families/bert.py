"""BERT (Devlin et al. 2018): ``BertConfig`` and ``modeling_bert`` of transformers."""

from bert_jax.interop.hf.family import Family, Key, headed
from bert_jax.json_values import Json

KEYS = {
    "vocab_size": Key("vocab_size"),
    "hidden_size": Key("hidden_size"),
    "num_hidden_layers": Key("num_layers"),
    "num_attention_heads": Key("num_attention_heads"),
    "intermediate_size": Key("intermediate_size"),
    "max_position_embeddings": Key("max_position_embeddings", 512),
    "type_vocab_size": Key("type_vocab_size", 2),
    "hidden_dropout_prob": Key("hidden_dropout", 0.1),
    "attention_probs_dropout_prob": Key("attention_dropout", 0.1),
    "initializer_range": Key("initializer_range", 0.02),
    "hidden_act": Key("activation", "gelu", announced=True),
    "layer_norm_eps": Key("norm_epsilon", 1e-12, announced=True),
}
LAYERS = {
    "attention/query": "attention.self.query",
    "attention/key": "attention.self.key",
    "attention/value": "attention.self.value",
    "attention/output": "attention.output.dense",
    "attention/layer_norm": "attention.output.LayerNorm",
    "feed_forward/intermediate": "intermediate.dense",
    "feed_forward/output": "output.dense",
    "feed_forward/layer_norm": "output.LayerNorm",
}
TOKEN_AND_SPAN = {"token": {"token_head": "classifier"}, "span": {"span_head": "qa_outputs"}}
CLASSIFIERS = {"sequence": {"sequence_head": "classifier"}, "choice": {"choice_head": "classifier"}}


def keys(**defaults: Json) -> dict[str, Key]:
    """Return the named keys of ``BertConfig``, with other defaults."""
    return {key: KEYS[key]._replace(default=default) for key, default in defaults.items()}


def embeddings(*tables: str) -> dict[str, str]:
    """Return the stored names of the embedding ``tables`` and of their normalization."""
    places = {f"embeddings/{table}_embeddings": f"embeddings.{table}_embeddings" for table in tables}
    return places | {"embeddings/layer_norm": "embeddings.LayerNorm"}


def mlm(module: str, transform: str, norm: str, decoder: str) -> dict[str, str]:
    """Return the modules of an MLM head with a transform; ``decoder`` holds an untied output layer."""
    return {
        "mlm_head": module, "mlm_head/transform": transform, "mlm_head/layer_norm": norm,
        "mlm_head/output_embeddings": decoder,
    }  # fmt: skip


FAMILY = Family(
    name="bert",
    title="BERT",
    classes=headed(
        "Bert", ("ForPreTraining", ("pooler", "mlm", "nsp")), ("ForNextSentencePrediction", ("pooler", "nsp"))
    ),
    prefix="bert.",
    keys=KEYS,
    prunes=True,
    refused={"position_embedding_type": ("absolute", None)},
    encoder=embeddings("word", "token_type", "position"),
    layers=LAYERS,
    heads={
        "pooler": {"pooler": "{prefix}pooler.dense"},
        "mlm": mlm(
            "cls.predictions", "cls.predictions.transform.dense", "cls.predictions.transform.LayerNorm",
            "cls.predictions.decoder",
        ),
        "nsp": {"nsp_head": "cls.seq_relationship"},
        **CLASSIFIERS,
        **TOKEN_AND_SPAN,
    },
)  # fmt: skip
