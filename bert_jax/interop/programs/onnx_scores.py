"""Attention scores in an ONNX graph: hidden keys, windows, blocks, global tokens, causality, and terms that depend
on distances.

Dimensions: B rows, S tokens, A heads, D head size, R rows of a table of distances.
"""

import math

import numpy as np

from bert_jax.interop.programs.onnx_nodes import FLOAT, INT64, Graph
from bert_jax.model.attention import MASKED_SCORE
from bert_jax.model.positions import alibi_slopes, bucket_index, disentangled_index


def global_tokens(graph: Graph, seen_BxS: str) -> str:
    """Append 1 for global tokens and 0 for others, float32[B, S], as ``local_attention.global_features`` determines
    them by the heads; return "" if there are none."""
    model, heads = graph.spec.model, graph.spec.heads
    if not model.global_tokens or not (heads.sequence_labels or heads.span or heads.choice):
        return ""

    def as_int(x: str) -> str:
        return graph.op("Cast", x, to=INT64)

    zero, along = graph.constant(0, np.int64), graph.constant(1, np.int64)
    seen = as_int(seen_BxS)
    separates = as_int(graph.op("Equal", "input_ids", graph.constant(model.separator_id, np.int64)))
    before_BxS, most, found = graph.op("CumSum", separates, along), model.global_tokens, []
    if heads.choice:
        padded = graph.op("Pad", graph.op("Mul", before_BxS, seen), graph.axes(0, 2, 0, 0), zero)
        shifted = graph.op("Slice", padded, graph.axes(0), graph.axes(-2), graph.axes(1))
        found.append(graph.op("Greater", shifted, zero))
        most = model.max_length
    if heads.span:
        found.append(graph.op("Equal", before_BxS, zero))
    if heads.sequence_labels:
        ones = graph.op("Expand", graph.constant(1, np.int64), graph.op("Shape", "input_ids"))
        found.append(graph.op("Equal", graph.op("CumSum", ones, along), along))
        most = most if heads.span or heads.choice else 1
    chosen = found[0]
    for other in found[1:]:
        chosen = graph.op("Or", chosen, other)
    chosen = graph.op("Mul", as_int(chosen), seen)
    beyond = graph.op("Greater", graph.op("CumSum", chosen, along), graph.constant(most, np.int64))
    return graph.op("Cast", graph.op("Mul", chosen, as_int(graph.op("Not", beyond))), to=FLOAT)


class ScoreGraph:
    """Terms of the attention scores, which the layers share. ``global_BxS`` comes from :func:`global_tokens`."""

    def __init__(self, graph: Graph, global_BxS: str = "") -> None:
        self.graph = graph
        self._local = ""
        if global_BxS:
            local_BxS = graph.op("Sub", graph.scalar(1), global_BxS)
            self._local = graph.op("Unsqueeze", local_BxS, graph.axes(1, 2))
        self._ahead = ""
        self._table = ""

    def bias(self, hidden_Bx1x1xS: str, window: int) -> str:
        """Append the sum of ``hidden`` and all terms that do not depend on queries and keys, float32[B, 1 or A,
        1 or S, S]."""
        graph, model = self.graph, self.graph.spec.model
        bias = hidden_Bx1x1xS
        if model.attention == "causal":
            bias = graph.op(
                "Min", bias, self._masked(graph.op("Greater", self._distances(), graph.constant(0, np.int64)))
            )
        if window:
            far = graph.op("Greater", graph.op("Abs", self._distances()), graph.constant(window, np.int64))
            hidden = self._masked(far)
            bias = graph.op("Min", bias, graph.op("Mul", hidden, self._local) if self._local else hidden)
        if model.attention_block and model.max_length > model.whole_length:
            bias = graph.op("Add", bias, self._blocks())
        if model.relative_positions == "alibi":
            slopes_Ax1x1 = graph.constant(-alibi_slopes(model.num_attention_heads)[:, None, None], np.float32)
            away_SxS = graph.op("Cast", graph.op("Abs", self._distances()), to=FLOAT)
            bias = graph.op("Add", bias, graph.op("Mul", away_SxS, slopes_Ax1x1))
        if model.relative_positions == "buckets":
            table_RxA = graph.weight("encoder/relative_attention_bias/embedding")
            values_SxSxA = graph.op("Gather", table_RxA, self._rows(), axis=0)
            bias = graph.op("Add", bias, graph.op("Transpose", values_SxSxA, perm=[2, 0, 1]))
        return bias

    def kept(self, seen_BxS: str) -> str:
        """Append 0 for tokens whose context is set to 0, which are padding, 1 for others, float32[B, S]; "" if
        there are none."""
        graph, model = self.graph, self.graph.spec.model
        if model.global_tokens:
            return seen_BxS
        if model.attention_block and model.max_length > model.whole_length:
            return graph.op("Max", seen_BxS, graph.op("Sub", graph.scalar(1), self._is_divided()))
        return ""

    def products(self, query_BxAxSxD: str, key_BxAxDxS: str, layer: str) -> str:
        """Append the products of queries and keys with the embeddings of distances, as in
        ``positions.RelativeScores``."""
        graph, model = self.graph, self.graph.spec.model
        if not self._table:
            self._table = graph.norm(
                graph.weight("encoder/relative_embeddings/embedding"), "encoder/relative_layer_norm"
            )

        def table_AxDxR(part: str) -> str:
            dense_RxH = graph.dense(self._table, f"{layer}/attention/{part}", model.has_bias("qkv"))
            split = graph.axes(model.relative_buckets, model.num_attention_heads, model.head_size)
            return graph.op("Transpose", graph.op("Reshape", dense_RxH, split), perm=[1, 2, 0])

        def chosen(products_BxAxSxR: str, rows_SxS: str) -> str:
            outer = graph.op("Shape", products_BxAxSxR, start=0, end=3)
            shape = graph.op("Concat", outer, graph.op("Shape", products_BxAxSxR, start=2, end=3), axis=0)
            return graph.op("GatherElements", products_BxAxSxR, graph.op("Expand", rows_SxS, shape), axis=3)

        rows = self._rows()
        of_queries = chosen(graph.op("MatMul", query_BxAxSxD, table_AxDxR("key")), rows)
        key_BxAxSxD = graph.op("Transpose", key_BxAxDxS, perm=[0, 1, 3, 2])
        rows_of_keys = graph.op("Transpose", rows, perm=[1, 0])
        of_keys = chosen(graph.op("MatMul", key_BxAxSxD, table_AxDxR("query")), rows_of_keys)
        return graph.op("Add", of_queries, graph.op("Transpose", of_keys, perm=[0, 1, 3, 2]))

    def _masked(self, hidden_SxS: str) -> str:
        graph = self.graph
        return graph.op("Mul", graph.op("Cast", hidden_SxS, to=FLOAT), graph.scalar(MASKED_SCORE))

    def _length(self) -> str:
        return self.graph.op("Squeeze", self.graph.op("Shape", "input_ids", start=1, end=2), self.graph.axes(0))

    def _places(self) -> tuple[str, str]:
        """Append the indices of keys and queries, int64[1, S] and int64[S, 1]."""
        graph = self.graph
        places_S = graph.op("Range", graph.constant(0, np.int64), self._length(), graph.constant(1, np.int64))
        keys_1xS, queries_Sx1 = (graph.op("Unsqueeze", places_S, graph.axes(axis)) for axis in (0, 1))
        return keys_1xS, queries_Sx1

    def _distances(self) -> str:
        """Append key index minus query index, int64[S, S]."""
        if not self._ahead:
            self._ahead = self.graph.op("Sub", *self._places())
        return self._ahead

    def _blocks(self) -> str:
        """Append ``attention.block_scores`` without random blocks, float32[S, S]; 0 in undivided rows."""
        graph, model = self.graph, self.graph.spec.model
        size, zero, one = (graph.constant(value, np.int64) for value in (model.attention_block, 0, 1))
        keys_1xS, queries_Sx1 = (graph.op("Div", places, size) for places in self._places())
        last = graph.op("Div", graph.op("Sub", self._length(), one), size)

        def is_end(blocks: str) -> str:
            return graph.op("Or", graph.op("Equal", blocks, zero), graph.op("Equal", blocks, last))

        far = graph.op("Greater", graph.op("Abs", graph.op("Sub", keys_1xS, queries_Sx1)), one)
        inner_Sx1 = graph.op("Not", is_end(queries_Sx1))
        unseen = graph.op("And", graph.op("And", far, inner_Sx1), graph.op("Not", is_end(keys_1xS)))
        again = graph.op("And", inner_Sx1, graph.op("Equal", keys_1xS, zero))
        more = graph.op("Mul", graph.op("Cast", again, to=FLOAT), graph.scalar(math.log(1 + model.random_blocks)))
        return graph.op("Mul", graph.op("Add", self._masked(unseen), more), self._is_divided())

    def _is_divided(self) -> str:
        """Append 1 if the rows are divided into blocks, otherwise 0, float32[]."""
        longest = self.graph.constant(self.graph.spec.model.whole_length, np.int64)
        return self.graph.op("Cast", self.graph.op("Greater", self._length(), longest), to=FLOAT)

    def _rows(self) -> str:
        """Append the row of the table of distances for each query and key, int64[S, S]."""
        graph, model = self.graph, self.graph.spec.model
        index = bucket_index if model.relative_positions == "buckets" else disentangled_index
        most = model.max_length - 1
        rows = index(np.arange(-most, most + 1), model.relative_buckets, model.relative_max_distance)
        places = graph.op("Add", self._distances(), graph.constant(most, np.int64))
        return graph.op("Gather", graph.constant(rows, np.int64), places, axis=0)
