"""BERT (Devlin et al. 2018): ``BertConfig`` and ``modeling_bert`` of transformers."""

from bert_jax.interop.hf.family import HEADED, Family, Key

KEYS = {
    "vocab_size": Key("vocab_size", "integer"),
    "hidden_size": Key("hidden_size", "integer"),
    "num_hidden_layers": Key("num_layers", "integer"),
    "num_attention_heads": Key("num_attention_heads", "integer"),
    "intermediate_size": Key("intermediate_size", "integer"),
    "max_position_embeddings": Key("max_position_embeddings", "integer", 512),
    "type_vocab_size": Key("type_vocab_size", "integer", 2),
    "hidden_dropout_prob": Key("hidden_dropout", "number", 0.1),
    "attention_probs_dropout_prob": Key("attention_dropout", "number", 0.1),
    "initializer_range": Key("initializer_range", "number", 0.02),
    "hidden_act": Key("activation", "activation", "gelu", announced=True),
    "layer_norm_eps": Key("norm_epsilon", "number", 1e-12, announced=True),
}
EMBEDDINGS = {
    **{
        f"embeddings/{table}_embeddings": f"embeddings.{table}_embeddings"
        for table in ("word", "token_type", "position")
    },
    "embeddings/layer_norm": "embeddings.LayerNorm",
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
POOLER = {"pooler": "{prefix}pooler.dense"}
TOKEN_AND_SPAN = {"token": {"token_head": "classifier"}, "span": {"span_head": "qa_outputs"}}
CLASSIFIERS = {"sequence": {"sequence_head": "classifier"}, "choice": {"choice_head": "classifier"}}
SIZES = {
    "vocab_size": ("embeddings.word_embeddings.weight", 0, 1),
    "hidden_size": ("embeddings.word_embeddings.weight", 1, 1),
    "max_position_embeddings": ("embeddings.position_embeddings.weight", 0, 1),
    "type_vocab_size": ("embeddings.token_type_embeddings.weight", 0, 1),
    "intermediate_size": ("encoder.layer.0.intermediate.dense.weight", 0, 1),
}


def mlm(module: str, transform: str, norm: str, decoder: str) -> dict[str, str]:
    """Return the modules of an MLM head with a transform; ``decoder`` holds an untied output layer."""
    return {
        "mlm_head": module, "mlm_head/transform": transform, "mlm_head/layer_norm": norm,
        "mlm_head/output_embeddings": decoder,
    }  # fmt: skip


def tied(decoder: str, embedding: str = "embeddings/word_embeddings/embedding") -> dict[str, str]:
    """Return the tied tensors of an MLM head: weight and bias of ``decoder``."""
    return {f"{decoder}.weight": embedding, f"{decoder}.bias": "mlm_head/output_bias"}


FAMILY = Family(
    name="bert",
    title="BERT",
    class_prefix="Bert",
    classes={
        "BertModel": HEADED["Model"],
        "BertForPreTraining": ("pooler", "mlm", "nsp"),
        "BertForMaskedLM": ("mlm",),
        "BertForNextSentencePrediction": ("pooler", "nsp"),
        **{f"Bert{suffix}": heads for suffix, heads in list(HEADED.items())[2:]},
    },
    prefix="bert.",
    keys=KEYS,
    prunes=True,
    refused={"position_embedding_type": ("absolute", None)},
    encoder=EMBEDDINGS,
    layer="encoder.layer.{i}.",
    layers=LAYERS,
    heads={
        "pooler": POOLER,
        "mlm": mlm(
            "cls.predictions", "cls.predictions.transform.dense", "cls.predictions.transform.LayerNorm",
            "cls.predictions.decoder",
        ),
        "nsp": {"nsp_head": "cls.seq_relationship"},
        **CLASSIFIERS,
        **TOKEN_AND_SPAN,
    },
    tied=tied("cls.predictions.decoder"),
    sizes=SIZES,
)  # fmt: skip
