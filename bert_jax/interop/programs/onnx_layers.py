"""The network as an ONNX graph: opset 17, standard operators only, in a form that onnxruntime fuses.

Dimensions: B rows, S tokens, H hidden width, A heads, D head size, V vocabulary size. Weights keep their canonical
names.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from bert_jax.config import ModelSpec
from bert_jax.config.switches import ANY, SIZES, Supported
from bert_jax.interop.programs.serving import FIELDS, output_names
from bert_jax.model.attention import MASKED_SCORE
from bert_jax.model.positions import rotary_tables, sinusoidal_positions

FLOAT, INT64 = 1, 7  # onnx.TensorProto.DataType


SUPPORTED: Supported = SIZES | {
    "position_offset": ANY,
    "activation": ("gelu", "gelu_tanh", "gelu_sigmoid", "relu"),
    "mlm_activation": ANY,
    "norm_position": ("post", "pre"),
    "norm_epsilon": ANY,
    "position_embeddings": ("learned", "sinusoidal", "rotary"),
    "rotary_base": ANY,
}


class Graph:
    """An ONNX graph under construction: nodes, constants and weights. Every method returns the name of a graph
    value."""

    def __init__(self, spec: ModelSpec, *, cast_weights: bool) -> None:
        self.spec = spec
        self.cast_weights = cast_weights
        self.nodes: list[Any] = []
        self.constants: dict[str, np.ndarray] = {}
        self.weights: dict[str, str] = {}
        # Names of the cosines and sines of rotary positions, float32[B, S, 1, D / 2].
        self.turns: list[str] = []

    def op(self, kind: str, *inputs: str, **attributes: Any) -> str:
        """Append a node with one output."""
        from onnx import helper

        name = f"{kind}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, list(inputs), [name], name=name, **attributes))
        return name

    def constant(self, value: Any, dtype: type) -> str:
        """Add a small constant, unless the graph already contains an equal one."""
        array = np.asarray(value, dtype)
        for name, known in self.constants.items():
            if known.dtype == array.dtype and known.shape == array.shape and np.array_equal(known, array):
                return name
        name = f"constant_{len(self.constants)}"
        self.constants[name] = array
        return name

    def scalar(self, value: float) -> str:
        """Add a scalar float32 constant."""
        return self.constant(value, np.float32)

    def axes(self, *axes: int) -> str:
        """Add an int64 vector that lists axes or the dimensions of a shape. In a shape, 0 keeps the input
        dimension."""
        return self.constant(axes, np.int64)

    def weight(self, name: str) -> str:
        """Return the parameter ``name`` as float32; at most one Cast node is added per parameter."""
        if name not in self.weights:
            self.weights[name] = self.op("Cast", name, to=FLOAT) if self.cast_weights else name
        return self.weights[name]

    def dense(self, x: str, name: str, bias: bool = True) -> str:
        """Append ``x @ kernel + bias``."""
        product = self.op("MatMul", x, self.weight(f"{name}/kernel"))
        return self.op("Add", product, self.weight(f"{name}/bias")) if bias else product

    def layer_norm(self, x: str, name: str) -> str:
        """Append LayerNorm over the last axis."""
        scale, bias = self.weight(f"{name}/scale"), self.weight(f"{name}/bias")
        return self.op("LayerNormalization", x, scale, bias, axis=-1, epsilon=self.spec.model.norm_epsilon)

    def activation(self, x: str, kind: str) -> str:
        """Append the activation function ``kind``, a name that ``ModelConfig`` or ``SentenceModule`` allows."""
        match kind:
            case "identity":
                return x
            case "gelu":
                erf = self.op("Erf", self.op("Div", x, self.scalar(math.sqrt(2))))
                return self.op("Mul", self.op("Mul", x, self.op("Add", erf, self.scalar(1))), self.scalar(0.5))
            case "gelu_tanh":
                cube = self.op("Mul", self.op("Mul", x, self.op("Mul", x, x)), self.scalar(0.044715))
                inner = self.op("Mul", self.op("Add", x, cube), self.scalar(math.sqrt(2 / math.pi)))
                raised = self.op("Add", self.op("Tanh", inner), self.scalar(1))
                return self.op("Mul", self.op("Mul", x, raised), self.scalar(0.5))
            case "gelu_sigmoid":
                return self.op("Mul", x, self.op("Sigmoid", self.op("Mul", x, self.scalar(1.702))))
            case "relu" | "tanh" | "sigmoid":
                return self.op(kind.title(), x)
        raise AssertionError(kind)


def add_network(graph: Graph) -> list[str]:
    """Append all layers of the model; return the names of the outputs."""
    from onnx import helper

    # A token is visible if its attention_mask is not 0.
    seen_BxS = graph.op("Cast", graph.op("Cast", "attention_mask", to=9), to=FLOAT)
    x_BxSxH = _embeddings(graph)
    bias_Bx1x1xS = _attention_bias(graph)
    for i in range(graph.spec.model.num_layers):
        x_BxSxH = _layer(graph, x_BxSxH, bias_Bx1x1xS, f"encoder/layer_{i}")
    if graph.spec.model.norm_position == "pre":
        x_BxSxH = graph.layer_norm(x_BxSxH, "encoder/final_layer_norm")
    values = _outputs(graph, x_BxSxH, seen_BxS)
    names = output_names(graph.spec)
    graph.nodes += [helper.make_node("Identity", [values[field]()], [name]) for name, field in names.items()]
    return list(names)


def _position_rows(graph: Graph) -> str:
    """Append the row indices of the position table: :func:`serving.position_ids` plus the offset.

    The shape is int64[B, S] for RoBERTa and int64[1, S] for BERT.
    """
    offset = graph.spec.model.position_offset
    last = graph.constant(1, np.int64)
    if graph.spec.skips_padding:
        padding = graph.op("Equal", "input_ids", graph.constant(offset - 1, np.int64))
        real_BxS = graph.op("Cast", graph.op("Not", padding), to=INT64)
        counted_BxS = graph.op("Mul", graph.op("CumSum", real_BxS, last), real_BxS)
        return graph.op("Add", counted_BxS, graph.constant(offset - 1, np.int64))
    length = graph.op("Shape", "input_ids", start=1, end=2)
    scalar = graph.op("Squeeze", length, graph.axes(0))
    zero = graph.constant(offset, np.int64)
    end = graph.op("Add", scalar, zero) if offset else scalar
    rows_S = graph.op("Range", zero, end, last)
    return graph.op("Unsqueeze", rows_S, graph.axes(0))


def _embeddings(graph: Graph) -> str:
    model = graph.spec.model
    words = graph.op("Gather", graph.weight("embeddings/word_embeddings/embedding"), "input_ids", axis=0)
    types = graph.op("Gather", graph.weight("embeddings/token_type_embeddings/embedding"), "token_type_ids", axis=0)
    if model.position_embeddings == "learned":
        table = graph.weight("embeddings/position_embeddings/embedding")
    elif model.position_embeddings == "sinusoidal":
        table = graph.constant(sinusoidal_positions(model.max_position_embeddings, model.hidden_size), np.float32)
    x_BxSxH = graph.op("Add", words, types)
    rows = _position_rows(graph)
    if model.position_embeddings == "rotary":
        # Rows before the first position, which belong to padding, have the angles of the first position.
        positions = np.maximum(np.arange(model.max_position_embeddings) - model.position_offset, 0)
        for values in rotary_tables(model.max_position_embeddings, model.head_size, model.rotary_base):
            turns = graph.op("Gather", graph.constant(values[positions], np.float32), rows, axis=0)
            graph.turns.append(graph.op("Unsqueeze", turns, graph.axes(2)))
    else:
        x_BxSxH = graph.op("Add", x_BxSxH, graph.op("Gather", table, rows, axis=0))
    return graph.layer_norm(x_BxSxH, "embeddings/layer_norm") if model.norm_position == "post" else x_BxSxH


def _attention_bias(graph: Graph) -> str:
    """Append the attention bias, float32[B, 1, 1, S]: 0 for a visible key, a large negative number for any other
    key.

    The optimizer of onnxruntime fuses exactly these nodes, including the two Unsqueeze nodes.
    """
    mask_Bx1x1xS = graph.op("Unsqueeze", graph.op("Unsqueeze", "attention_mask", graph.axes(1)), graph.axes(2))
    hidden_Bx1x1xS = graph.op("Sub", graph.scalar(1), graph.op("Cast", mask_Bx1x1xS, to=FLOAT))
    return graph.op("Mul", hidden_Bx1x1xS, graph.scalar(MASKED_SCORE))


def _layer(graph: Graph, x_BxSxH: str, bias_Bx1x1xS: str, name: str) -> str:
    model = graph.spec.model
    for part, inner in (("attention", _attention), ("feed_forward", _feed_forward)):
        norm = f"{name}/{part}/layer_norm"
        if model.norm_position == "pre":
            x_BxSxH = graph.op("Add", inner(graph, graph.layer_norm(x_BxSxH, norm), bias_Bx1x1xS, name), x_BxSxH)
        else:
            x_BxSxH = graph.layer_norm(graph.op("Add", inner(graph, x_BxSxH, bias_Bx1x1xS, name), x_BxSxH), norm)
    return x_BxSxH


def _rotate(graph: Graph, x_BxSxAxD: str) -> str:
    """Append the nodes that rotate queries or keys according to their positions, as in ``positions.rotate``."""
    size = graph.spec.model.head_size
    first, second = (
        graph.op("Slice", x_BxSxAxD, graph.axes(begin), graph.axes(begin + size // 2), graph.axes(3))
        for begin in (0, size // 2)
    )
    cos, sin = graph.turns
    lower = graph.op("Sub", graph.op("Mul", first, cos), graph.op("Mul", second, sin))
    upper = graph.op("Add", graph.op("Mul", second, cos), graph.op("Mul", first, sin))
    return graph.op("Concat", lower, upper, axis=-1)


def _attention(graph: Graph, x_BxSxH: str, bias_Bx1x1xS: str, name: str) -> str:
    model = graph.spec.model
    split = graph.axes(0, 0, model.num_attention_heads, model.head_size)

    def projected(part: str, order: list[int]) -> str:
        y_BxSxAxD = graph.op("Reshape", graph.dense(x_BxSxH, f"{name}/attention/{part}"), split)
        if graph.turns and part != "value":
            y_BxSxAxD = _rotate(graph, y_BxSxAxD)
        return graph.op("Transpose", y_BxSxAxD, perm=order)

    query, value = projected("query", [0, 2, 1, 3]), projected("value", [0, 2, 1, 3])
    scores_BxAxSxS = graph.op("MatMul", query, projected("key", [0, 2, 3, 1]))
    scaled_BxAxSxS = graph.op("Div", scores_BxAxSxS, graph.scalar(math.sqrt(model.head_size)))
    weights_BxAxSxS = graph.op("Softmax", graph.op("Add", scaled_BxAxSxS, bias_Bx1x1xS), axis=-1)
    context = graph.op("Transpose", graph.op("MatMul", weights_BxAxSxS, value), perm=[0, 2, 1, 3])
    return graph.dense(
        graph.op("Reshape", context, graph.axes(0, 0, model.hidden_size)), f"{name}/attention/output"
    )


def _feed_forward(graph: Graph, x_BxSxH: str, bias_Bx1x1xS: str, name: str) -> str:
    hidden = graph.dense(x_BxSxH, f"{name}/feed_forward/intermediate")
    return graph.dense(graph.activation(hidden, graph.spec.model.activation), f"{name}/feed_forward/output")


def _outputs(graph: Graph, x_BxSxH: str, seen_BxS: str) -> dict[str, Callable[[], str]]:
    """Return a dict from each name in ``serving.FIELDS`` to a function that appends that output to the graph."""
    pooled: list[str] = []

    def pooler() -> str:
        if not pooled:
            first_BxH = graph.op("Gather", x_BxSxH, graph.constant(0, np.int64), axis=1)
            pooled.append(graph.op("Tanh", graph.dense(first_BxH, "pooler")))
        return pooled[0]

    def mlm() -> str:
        transformed = graph.activation(graph.dense(x_BxSxH, "mlm_head/transform"), graph.spec.model.head_activation)
        normed = graph.layer_norm(transformed, "mlm_head/layer_norm")
        table_HxV = graph.op("Transpose", graph.weight("embeddings/word_embeddings/embedding"), perm=[1, 0])
        return graph.op("Add", graph.op("MatMul", normed, table_HxV), graph.weight("mlm_head/output_bias"))

    def rtd() -> str:
        dense_BxSxH = graph.dense(x_BxSxH, "rtd_head/transform")
        score_BxSx1 = graph.dense(graph.activation(dense_BxSxH, graph.spec.model.activation), "rtd_head/output")
        return graph.op("Gather", score_BxSx1, graph.constant(0, np.int64), axis=2)

    def span(column: int) -> str:
        both_BxSx2 = graph.dense(x_BxSxH, "span_head")
        return graph.op("Gather", both_BxSx2, graph.constant(column, np.int64), axis=2)

    made: dict[str, Callable[[], str]] = {
        "last_hidden_state": lambda: x_BxSxH,
        "pooler_output": pooler,
        "prediction_logits": mlm,
        "seq_relationship_logits": lambda: graph.dense(pooler(), "nsp_head"),
        "rtd_logits": rtd,
        "sequence_logits": lambda: graph.dense(pooler(), "sequence_head"),
        "token_logits": lambda: graph.dense(x_BxSxH, "token_head"),
        "start_logits": lambda: span(0),
        "end_logits": lambda: span(1),
        "choice_logits": lambda: graph.dense(pooler(), "choice_head"),
        "sentence_embedding": lambda: _sentence(graph, x_BxSxH, seen_BxS),
    }
    assert made.keys() == FIELDS.keys()
    return made


def _sentence(graph: Graph, x_BxSxH: str, seen_BxS: str) -> str:
    """Append pooling and the modules after it, as in ``model.pooling``; return the name of the output, float32[B,
    E]."""
    sentence = graph.spec.sentence
    assert sentence is not None
    pooled = [_pool(graph, x_BxSxH, seen_BxS, kind) for kind in sentence.pooling]
    x = pooled[0] if len(pooled) == 1 else graph.op("Concat", *pooled, axis=-1)
    dense = 0
    for module in sentence.modules:
        if module.kind == "normalize":
            norm = graph.op("ReduceL2", x, axes=[-1], keepdims=1)
            x = graph.op("Div", x, graph.op("Max", norm, graph.scalar(1e-12)))
            continue
        x = graph.activation(graph.dense(x, f"sentence_head/dense_{dense}", module.bias), module.activation)
        dense += 1
    return x


def _pool(graph: Graph, x_BxSxH: str, seen_BxS: str, kind: str) -> str:
    if kind == "cls":
        return graph.op("GatherND", x_BxSxH, graph.op("ArgMax", seen_BxS, axis=1, keepdims=1), batch_dims=1)
    seen_BxSx1 = graph.op("Unsqueeze", seen_BxS, graph.axes(2))
    if kind == "max":
        shown = graph.op("Where", graph.op("Cast", seen_BxSx1, to=9), x_BxSxH, graph.scalar(-1e9))
        return graph.op("ReduceMax", shown, axes=[1], keepdims=0)
    sum_BxH = graph.op("ReduceSum", graph.op("Mul", x_BxSxH, seen_BxSx1), graph.axes(1), keepdims=0)
    count_Bx1 = graph.op("ReduceSum", seen_BxS, graph.axes(1), keepdims=1)
    return graph.op("Div", sum_BxH, graph.op("Max", count_Bx1, graph.scalar(1e-9)))
