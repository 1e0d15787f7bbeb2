"""An ONNX graph under construction: nodes, constants, weights, and the operations that several layers use."""

import math
from typing import Any

import numpy as np

from bert_jax.config import ModelSpec

FLOAT, INT64 = 1, 7  # onnx.TensorProto.DataType


class Graph:
    """An ONNX graph under construction: nodes, constants and weights. Every method returns the name of a graph
    value."""

    def __init__(self, spec: ModelSpec, *, cast_weights: bool) -> None:
        self.spec = spec
        self.cast_weights = cast_weights
        self.nodes: list[Any] = []
        self.constants: dict[str, np.ndarray] = {}
        self.weights: dict[str, str] = {}
        # Values of weights that are not stored as ``cast_weights`` requires.
        self.stored: dict[str, np.ndarray] = {}
        # Names of the cosines and sines of rotary positions, float32[B, S, 1, D / 2], by their base.
        self.turns: dict[float, list[str]] = {}

    def op(self, kind: str, *inputs: str, **attributes: Any) -> str:
        """Append a node with one output."""
        from onnx import helper

        name = f"{kind}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, list(inputs), [name], name=name, **attributes))
        return name

    def constant(self, value: Any, dtype: type) -> str:
        """Add a small constant, unless the graph already contains an equal one."""
        array: np.ndarray = np.asarray(value, dtype)
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

    def rows(self, name: str, ids: str) -> str:
        """Append the rows ``ids`` of the table ``name``."""
        return self.op("Gather", self.weight(name), ids, axis=0)

    def product(self, x: str, name: str, transposed: bool = False) -> str:
        """Append the product of ``x`` and the parameter ``name``, [in, out] or, with ``transposed``, [out, in]."""
        kernel = self.weight(name)
        return self.op("MatMul", x, self.op("Transpose", kernel, perm=[1, 0]) if transposed else kernel)

    def dense(self, x: str, name: str, bias: bool = True) -> str:
        """Append ``x @ kernel + bias``."""
        product = self.product(x, f"{name}/kernel")
        return self.op("Add", product, self.weight(f"{name}/bias")) if bias else product

    def norm(self, x: str, name: str) -> str:
        """Append LayerNorm or RMSNorm over the last axis."""
        model, scale = self.spec.model, self.weight(f"{name}/scale")
        if model.norm == "layer_norm":
            bias = [self.weight(f"{name}/bias")] if model.has_bias("norm") else []
            return self.op("LayerNormalization", x, scale, *bias, axis=-1, epsilon=model.norm_epsilon)
        mean = self.op("ReduceMean", self.op("Mul", x, x), axes=[-1], keepdims=1)
        root = self.op("Sqrt", self.op("Add", mean, self.scalar(model.norm_epsilon)))
        return self.op("Mul", self.op("Div", x, root), scale)

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
            case "silu":
                return self.op("Mul", x, self.op("Sigmoid", x))
        raise AssertionError(kind)
