"""DistilBERT (Sanh et al. 2019): ``DistilBertConfig`` and ``modeling_distilbert`` of transformers.

No segment embeddings, no pooler and no dropout after the attention output. Sequence and choice heads have their
own dense layer with relu.
"""

from bert_jax.interop.hf.families import bert
from bert_jax.interop.hf.family import Family, HeadDropout, Key, headed, name_set

FAMILY = Family(
    name="distilbert",
    title="DistilBERT",
    classes=headed("DistilBert", ("Model", ())),
    prefix="distilbert.",
    prunes=True,
    keys={
        "vocab_size": Key("vocab_size"),
        "dim": Key("hidden_size"),
        "n_layers": Key("num_layers"),
        "n_heads": Key("num_attention_heads"),
        "hidden_dim": Key("intermediate_size"),
        "max_position_embeddings": Key("max_position_embeddings", 512),
        "dropout": Key("hidden_dropout", 0.1),
        "attention_dropout": Key("attention_dropout", 0.1),
        "activation": Key("activation", "gelu", announced=True),
        "initializer_range": Key("initializer_range", 0.02),
    },
    fixed={
        "type_vocab_size": 0, "norm_epsilon": 1e-12, "attention_output_dropout": 0.0, "pooler_layer": ("relu",),
    },
    # Sinusoidal positions are initial values of a stored table.
    harmless=name_set("sinusoidal_pos_embds qa_dropout tie_weights_"),
    encoder=bert.embeddings("word", "position"),
    layer="transformer.layer.{i}.",
    layers={
        "attention/query": "attention.q_lin",
        "attention/key": "attention.k_lin",
        "attention/value": "attention.v_lin",
        "attention/output": "attention.out_lin",
        "attention/layer_norm": "sa_layer_norm",
        "feed_forward/intermediate": "ffn.lin1",
        "feed_forward/output": "ffn.lin2",
        "feed_forward/layer_norm": "output_layer_norm",
    },
    heads={
        "mlm": bert.mlm("vocab_projector", "vocab_transform", "vocab_layer_norm", "vocab_projector"),
        **{head: {"pooler": "pre_classifier", **modules} for head, modules in bert.CLASSIFIERS.items()},
        **bert.TOKEN_AND_SPAN,
    },
    dropouts=dict.fromkeys(("sequence", "choice"), HeadDropout("seq_classif_dropout", 0.2)),
)  # fmt: skip
