"""The network as an ONNX graph: opset 17, standard operators only, in a form that onnxruntime fuses.

Dimensions: B rows, S tokens, H hidden width, A heads, D head size, V vocabulary size. Weights keep their canonical
names.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from bert_jax.config.switches import ANY, SIZES, Supported
from bert_jax.interop.programs.onnx_nodes import FLOAT, INT64, Graph
from bert_jax.interop.programs.onnx_scores import ScoreGraph, global_tokens
from bert_jax.interop.programs.serving import FIELDS, output_names
from bert_jax.model.attention import MASKED_SCORE
from bert_jax.model.positions import rotary_tables, sinusoidal_positions

# Standard operators cover every field, so a new field is refused by name until it is added here.
SUPPORTED: Supported = SIZES | dict.fromkeys(
    (
        "layer_heads", "layer_units", "position_offset", "embedding_size", "word_rank", "shared_layers",
        "embedding_dropout",
        "attention_output_dropout", "feed_forward_dropout", "activation", "feed_forward", "norm",
        "norm_position", "norm_epsilon", "without_bias", "embedding_norm", "final_norm", "position_embeddings",
        "rotary_base", "rotary_window_base", "relative_positions", "relative_buckets", "relative_max_distance",
        "attention", "attention_windows", "attention_block", "random_blocks", "global_tokens", "separator_id",
        "pooling", "pooler_layer", "head_parts", "mlm_layer", "tied_output",
        "embedding_scale", "initialization",
    ),
    ANY,
)  # fmt: skip


def add_network(graph: Graph) -> list[str]:
    """Append all layers of the model; return the names of the outputs."""
    from onnx import helper

    # A token is visible if its attention_mask is not 0.
    seen_BxS = graph.op("Cast", graph.op("Cast", "attention_mask", to=9), to=FLOAT)
    model = graph.spec.model
    x_BxSxH = _embeddings(graph)
    hidden_Bx1x1xS = _attention_bias(graph)
    global_BxS = global_tokens(graph, seen_BxS)
    scores = ScoreGraph(graph, global_BxS)
    biases = {window: scores.bias(hidden_Bx1x1xS, window) for window in dict.fromkeys(model.layer_windows)}
    kept_BxS = scores.kept(seen_BxS)
    for i, window in enumerate(model.layer_windows):
        name = "encoder/layer_0" if model.shared_layers else f"encoder/layer_{i}"
        x_BxSxH = _layer(
            graph, x_BxSxH, Layer(name, i, window, biases[window], scores, hidden_Bx1x1xS, kept_BxS, global_BxS)
        )
    if model.has_final_norm:
        x_BxSxH = graph.norm(x_BxSxH, "encoder/final_layer_norm")
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
    x = graph.rows("embeddings/word_embeddings/embedding", "input_ids")
    if model.word_rank:
        x = graph.product(x, "embeddings/word_factor/embedding")
    if model.embedding_scale:
        x = graph.op("Mul", x, graph.scalar(model.embedding_width**0.5))
    if model.type_vocab_size:
        x = graph.op("Add", x, graph.rows("embeddings/token_type_embeddings/embedding", "token_type_ids"))
    if model.position_embeddings == "learned":
        x = graph.op("Add", x, graph.rows("embeddings/position_embeddings/embedding", _position_rows(graph)))
    elif model.position_embeddings == "sinusoidal":
        values = sinusoidal_positions(model.max_position_embeddings, model.embedding_width)
        rows = graph.op("Gather", graph.constant(values, np.float32), _position_rows(graph), axis=0)
        x = graph.op("Add", x, rows)
    elif model.position_embeddings == "rotary":
        # Rows before the first position, which belong to padding, have the angles of the first position.
        positions = np.maximum(np.arange(model.max_position_embeddings) - model.position_offset, 0)
        rows = _position_rows(graph)
        for base in {model.rotary_base_of(window) for window in model.layer_windows}:
            graph.turns[base] = []
            for values in rotary_tables(model.max_position_embeddings, model.head_size, base):
                turns = graph.op("Gather", graph.constant(values[positions], np.float32), rows, axis=0)
                graph.turns[base].append(graph.op("Unsqueeze", turns, graph.axes(2)))
    x = graph.norm(x, "embeddings/layer_norm") if model.has_embedding_norm else x
    return graph.dense(x, "embeddings/projection") if model.embedding_size else x


def _attention_bias(graph: Graph) -> str:
    """Append the attention bias, float32[B, 1, 1, S]: 0 for a visible key, a large negative number for any other
    key.

    The optimizer of onnxruntime fuses exactly these nodes, including the two Unsqueeze nodes.
    """
    mask_Bx1x1xS = graph.op("Unsqueeze", graph.op("Unsqueeze", "attention_mask", graph.axes(1)), graph.axes(2))
    hidden_Bx1x1xS = graph.op("Sub", graph.scalar(1), graph.op("Cast", mask_Bx1x1xS, to=FLOAT))
    return graph.op("Mul", hidden_Bx1x1xS, graph.scalar(MASKED_SCORE))


@dataclass(frozen=True)
class Layer:
    """One encoder layer of the graph: prefix of its weights, index, window, bias of its scores, distances, hidden
    keys, tokens whose context is kept, global tokens."""

    name: str
    index: int
    window: int
    bias: str
    scores: ScoreGraph
    hidden: str
    kept: str
    global_tokens: str


def _layer(graph: Graph, x_BxSxH: str, layer: Layer) -> str:
    model = graph.spec.model
    skips = model.norm_position == "pre_skip_first" and layer.index == 0
    x_BxSxH = _residual(graph, x_BxSxH, f"{layer.name}/attention", lambda x: _attention(graph, x, layer), skips)
    return _feed_forward(graph, x_BxSxH, f"{layer.name}/feed_forward")


def _residual(graph: Graph, x_BxSxH: str, name: str, inner: Callable[[str], str], skips_norm: bool = False) -> str:
    """Append the block ``name`` with ``inner``, its residual connection and its normalization."""
    norm = f"{name}/layer_norm"
    if graph.spec.model.norm_position == "post":
        return graph.norm(graph.op("Add", inner(x_BxSxH), x_BxSxH), norm)
    normed = x_BxSxH if skips_norm else graph.norm(x_BxSxH, norm)
    return graph.op("Add", inner(normed), x_BxSxH)


def _rotate(graph: Graph, x_BxSxAxD: str, base: float) -> str:
    """Append the nodes that rotate queries or keys according to their positions, as in ``positions.rotate``."""
    size = graph.spec.model.head_size
    first, second = (
        graph.op("Slice", x_BxSxAxD, graph.axes(begin), graph.axes(begin + size // 2), graph.axes(3))
        for begin in (0, size // 2)
    )
    cos, sin = graph.turns[base]
    lower = graph.op("Sub", graph.op("Mul", first, cos), graph.op("Mul", second, sin))
    upper = graph.op("Add", graph.op("Mul", second, cos), graph.op("Mul", first, sin))
    return graph.op("Concat", lower, upper, axis=-1)


def _attention(graph: Graph, x_BxSxH: str, layer: Layer) -> str:
    model = graph.spec.model
    context_BxSxAxD = _context(graph, x_BxSxH, layer, layer.bias)
    if layer.kept:
        context_BxSxAxD = graph.op("Mul", context_BxSxAxD, graph.op("Unsqueeze", layer.kept, graph.axes(2, 3)))
    if layer.global_tokens:
        whole_BxSxAxD = _context(graph, x_BxSxH, layer, layer.hidden, "_global")
        is_global = graph.op(
            "Greater", graph.op("Unsqueeze", layer.global_tokens, graph.axes(2, 3)), graph.scalar(0)
        )
        context_BxSxAxD = graph.op("Where", is_global, whole_BxSxAxD, context_BxSxAxD)
    width = model.heads_by_layer[layer.index] * model.head_size
    context_BxSxN = graph.op("Reshape", context_BxSxAxD, graph.axes(0, 0, width))
    return graph.dense(context_BxSxN, f"{layer.name}/attention/output", model.has_bias("attention_output"))


def _context(graph: Graph, x_BxSxH: str, layer: Layer, bias: str, kind: str = "") -> str:
    """Append the attention with ``bias`` and the projections whose names end with ``kind``, float32[B, S, A, D]."""
    model = graph.spec.model
    split = graph.axes(0, 0, model.heads_by_layer[layer.index], model.head_size)

    def projected(part: str, order: list[int]) -> str:
        dense = graph.dense(x_BxSxH, f"{layer.name}/attention/{part}{kind}", model.has_bias("qkv"))
        y_BxSxAxD = graph.op("Reshape", dense, split)
        if graph.turns and part != "value":
            y_BxSxAxD = _rotate(graph, y_BxSxAxD, model.rotary_base_of(layer.window))
        return graph.op("Transpose", y_BxSxAxD, perm=order)

    query, value = projected("query", [0, 2, 1, 3]), projected("value", [0, 2, 1, 3])
    key = projected("key", [0, 2, 3, 1])
    scores_BxAxSxS = graph.op("MatMul", query, key)
    terms = 1
    if model.relative_positions == "disentangled":
        scores_BxAxSxS = graph.op("Add", scores_BxAxSxS, layer.scores.products(query, key, layer.name))
        terms = 3
    scaled_BxAxSxS = graph.op("Div", scores_BxAxSxS, graph.scalar(math.sqrt(terms * model.head_size)))
    weights_BxAxSxS = graph.op("Softmax", graph.op("Add", scaled_BxAxSxS, bias), axis=-1)
    return graph.op("Transpose", graph.op("MatMul", weights_BxAxSxS, value), perm=[0, 2, 1, 3])


def _feed_forward(graph: Graph, x_BxSxH: str, name: str) -> str:
    model, has_bias = graph.spec.model, graph.spec.model.has_bias("feed_forward")

    def inner(x_BxSxH: str) -> str:
        hidden = graph.dense(x_BxSxH, f"{name}/intermediate", has_bias)
        if model.feed_forward == "mlp":
            hidden = graph.activation(hidden, model.activation)
        else:
            gate = graph.dense(x_BxSxH, f"{name}/gate", has_bias)
            hidden = graph.op("Mul", graph.activation(gate, model.activation), hidden)
        return graph.dense(hidden, f"{name}/output", has_bias)

    return _residual(graph, x_BxSxH, name, inner)


def _outputs(graph: Graph, x_BxSxH: str, seen_BxS: str) -> dict[str, Callable[[], str]]:
    """Return a dict from each name in ``serving.FIELDS`` to a function that appends that output to the graph."""
    model, pooled = graph.spec.model, dict[str, str]()

    def pooler_layers(x: str) -> str:
        kind = model.pooler_activation(bool(graph.spec.heads.sequence_labels))
        if kind == "none":
            return x
        x = graph.activation(graph.dense(x, "pooler", model.has_bias("pooler_layer")), kind)
        return graph.norm(x, "pooler_norm") if "pooler_norm" in model.head_parts else x

    def pooler() -> str:
        if "rows" not in pooled:
            if model.pooling == "first":
                read_BxH = graph.op("Gather", x_BxSxH, graph.constant(0, np.int64), axis=1)
            else:
                read_BxH = _pool(graph, x_BxSxH, seen_BxS, model.pooling)
            pooled["rows"] = pooler_layers(read_BxH)
        return pooled["rows"]

    def of_tokens() -> str:
        """Return the vectors that the token and span heads read."""
        if "tokens" not in pooled:
            has_layers = "token_pooler" in model.head_parts and graph.spec.heads.pooler
            pooled["tokens"] = pooler_layers(x_BxSxH) if has_layers else x_BxSxH
        return pooled["tokens"]

    def rtd() -> str:
        dense_BxSxH = graph.dense(x_BxSxH, "rtd_head/transform")
        score_BxSx1 = graph.dense(graph.activation(dense_BxSxH, graph.spec.model.activation), "rtd_head/output")
        return graph.op("Gather", score_BxSx1, graph.constant(0, np.int64), axis=2)

    def span(column: int) -> str:
        read_BxSxH = of_tokens()
        if "span_transform" in model.head_parts:
            read_BxSxH = _feed_forward(graph, read_BxSxH, "span_transform")
        both_BxSx2 = graph.dense(read_BxSxH, "span_head")
        scores_BxS = graph.op("Gather", both_BxSx2, graph.constant(column, np.int64), axis=2)
        return graph.op("Sub", scores_BxS, _question(graph)) if "span_transform" in model.head_parts else scores_BxS

    made: dict[str, Callable[[], str]] = {
        "last_hidden_state": lambda: x_BxSxH,
        "pooler_output": pooler,
        "prediction_logits": lambda: _mlm(graph, x_BxSxH),
        "seq_relationship_logits": lambda: graph.dense(pooler(), "nsp_head"),
        "sequence_logits": lambda: graph.dense(pooler(), "sequence_head", model.has_bias("sequence_head")),
        "token_logits": lambda: graph.dense(of_tokens(), "token_head"),
        "start_logits": lambda: span(0),
        "end_logits": lambda: span(1),
        "rtd_logits": rtd,
        "choice_logits": lambda: graph.dense(pooler(), "choice_head"),
        "sentence_embedding": lambda: _sentence(graph, x_BxSxH, seen_BxS),
    }
    assert made.keys() == FIELDS.keys()
    return made


def _mlm(graph: Graph, x: str) -> str:
    model = graph.spec.model
    if model.mlm_layer != "none":
        dense = graph.dense(x, "mlm_head/transform", model.has_bias("mlm_layer"))
        x = graph.norm(graph.activation(dense, model.mlm_activation), "mlm_head/layer_norm")
    table = "embeddings/word_embeddings" if model.tied_output else "mlm_head/output_embeddings"
    if model.word_rank and model.tied_output:
        x = graph.product(x, "embeddings/word_factor/embedding", transposed=True)
    logits = graph.product(x, f"{table}/embedding", transposed=True)
    has_bias = model.has_bias("mlm_output")
    return graph.op("Add", logits, graph.weight("mlm_head/output_bias")) if has_bias else logits


def _question(graph: Graph) -> str:
    """Append 1e6 for the tokens of the question and 0 for others, float32[B, S], as ``bert.in_question`` finds
    them."""
    one = graph.constant(1, np.int64)
    separates = graph.op("Equal", "input_ids", graph.constant(graph.spec.model.separator_id, np.int64))
    separates_BxS = graph.op("Cast", separates, to=INT64)
    found_Bx1 = graph.op("ReduceMax", separates_BxS, axes=[1], keepdims=1)
    earlier_BxS = graph.op("CumSum", separates_BxS, one, exclusive=1)
    ones_BxS = graph.op("Expand", one, graph.op("Shape", "input_ids"))
    after_first_BxS = graph.op("Min", graph.op("CumSum", ones_BxS, one, exclusive=1), one)
    asked_BxS = graph.op("Mul", graph.op("Sub", one, graph.op("Min", earlier_BxS, one)), after_first_BxS)
    asked_BxS = graph.op("Cast", graph.op("Mul", asked_BxS, found_Bx1), to=FLOAT)
    return graph.op("Mul", asked_BxS, graph.scalar(1e6))


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
    if kind in ("cls", "last"):
        place = graph.op("ArgMax", seen_BxS, axis=1, keepdims=1, select_last_index=int(kind == "last"))
        return graph.op("GatherND", x_BxSxH, place, batch_dims=1)
    seen_BxSx1 = graph.op("Unsqueeze", seen_BxS, graph.axes(2))
    if kind == "max":
        shown = graph.op("Where", graph.op("Cast", seen_BxSx1, to=9), x_BxSxH, graph.scalar(-1e9))
        return graph.op("ReduceMax", shown, axes=[1], keepdims=0)
    sum_BxH = graph.op("ReduceSum", graph.op("Mul", x_BxSxH, seen_BxSx1), graph.axes(1), keepdims=0)
    count_Bx1 = graph.op("ReduceSum", seen_BxS, graph.axes(1), keepdims=1)
    return graph.op("Div", sum_BxH, graph.op("Max", count_Bx1, graph.scalar(1e-9)))
