"""ONNX graphs with 8-bit weights.

:class:`Int8Graph` has 8-bit products, which onnxruntime runs with integer arithmetic. A weight is stored as int8
with a scale per output (a table: per row). Inputs of products are uint8: with one scale and one zero point from
calibrated ranges, or, without ranges, with a scale per token, so that the outputs of a text do not depend on the
others of its batch. Sums, biases, normalization, attention and output layers stay float32. :class:`BlockGraph` has
more scales, and products that are slower and more exact.
"""

from collections.abc import Mapping

import numpy as np

from bert_jax.config import ModelSpec
from bert_jax.interop.programs.onnx_nodes import FLOAT, Graph

# Parameters that are stored in 8 bits: nearly all of a model. Output layers are small, and decide.
QUANTIZED = ("encoder/", "embeddings/", "mlm_head/output_embeddings/")
# Among them, but small, and used in both directions.
_WHOLE = "embeddings/word_factor/"
LARGEST = 127
# Uint8 value of an input that is 0, if the scale is that of its token.
_ZERO = 128
# Name of a product -> least and greatest value of its input.
Ranges = Mapping[str, tuple[float, float]]


def quantize(values: np.ndarray, axis: int) -> tuple[np.ndarray, np.ndarray]:
    """Return ``values`` [rows, columns] as int8, and the float32 scales along ``axis``; ``stored * scale`` is
    nearest to the values."""
    largest = np.abs(values).max(axis=1 - axis, keepdims=True)
    scales = np.maximum(largest / LARGEST, np.finfo(np.float32).tiny).astype(np.float32)
    return np.rint(values / scales).astype(np.int8), scales.reshape(-1)


def input_scale(low: float, high: float) -> tuple[np.float32, np.uint8]:
    """Return scale and zero point of uint8 inputs from ``low`` to ``high``; 0 is represented exactly."""
    low, high = min(low, 0.0), max(high, 0.0)
    scale = np.float32(max((high - low) / 255, float(np.finfo(np.float32).tiny)))
    return scale, np.uint8(np.clip(np.rint(-low / scale), 0, 255))


class Int8Graph(Graph):
    """A graph with 8-bit products. ``ranges`` are the input ranges of all products; empty: from each token."""

    def __init__(self, spec: ModelSpec, params: Mapping[str, np.ndarray], ranges: Ranges) -> None:
        super().__init__(spec, cast_weights=False)
        self.ranges = ranges
        self._params = params
        self._scales: dict[str, np.ndarray] = {}
        self._inputs: dict[tuple[str, ...], list[str]] = {}

    def _weight(self, name: str, axis: int) -> np.ndarray:
        """Store a weight in 8 bits; return its scales along ``axis``."""
        if name not in self.stored:
            self.weights[name] = name
            self.stored[name], self._scales[name] = quantize(self._params[name], axis)
        return self._scales[name]

    def rows(self, name: str, ids: str) -> str:
        scales = self.constant(self._weight(name, 0)[:, None], np.float32)
        rows = self.op("Cast", self.op("Gather", name, ids, axis=0), to=FLOAT)
        return self.op("Mul", rows, self.op("Gather", scales, ids, axis=0))

    def product(self, x: str, name: str, transposed: bool = False) -> str:
        if not name.startswith(QUANTIZED) or name.startswith(_WHOLE):
            return super().product(x, name, transposed)
        scales = self._weight(name, 0 if transposed else 1)
        kernel = self.op("Transpose", name, perm=[1, 0]) if transposed else name
        constant = self.constant(scales, np.float32)
        if self.ranges:
            values = self.op("DequantizeLinear", kernel, constant, axis=1)
            return self.op("MatMul", self._calibrated(x, name), values)
        rounded, scale = self._by_token(x, self._params[name].shape[1 if transposed else 0])
        sums = self.op("MatMulInteger", rounded, kernel, self.constant(_ZERO, np.uint8))
        values = self.op("Mul", self.op("Mul", self.op("Cast", sums, to=FLOAT), constant), scale)
        return self.op("Reshape", values, self.op("Concat", self.op("Shape", x, end=-1), self.axes(-1), axis=0))

    def _calibrated(self, x: str, name: str) -> str:
        """Append ``x``, rounded to the range of the inputs of the product ``name``."""
        scale, zero = input_scale(*self.ranges[name])
        names = [x, self.scalar(float(scale)), self.constant(zero, np.uint8)]
        if tuple(names) not in self._inputs:
            rounded = self.op("QuantizeLinear", *names)
            self._inputs[tuple(names)] = [self.op("DequantizeLinear", rounded, *names[1:])]
        return self._inputs[tuple(names)][0]

    def _by_token(self, x: str, width: int) -> list[str]:
        """Append the rows of ``x``, uint8[tokens, width], and their scales, float32[tokens, 1]."""
        if (x,) not in self._inputs:
            rows = self.op("Reshape", x, self.axes(-1, width))
            largest = self.op("ReduceMax", self.op("Abs", rows), axes=[-1], keepdims=1)
            least = self.scalar(float(np.finfo(np.float32).tiny))
            scale = self.op("Max", self.op("Div", largest, self.scalar(LARGEST)), least)
            scales = self.op("Squeeze", scale, self.axes(1))
            zeros = self.op("Expand", self.constant([_ZERO], np.uint8), self.op("Shape", scales))
            self._inputs[x,] = [self.op("QuantizeLinear", rows, scales, zeros, axis=0), scale]
        return self._inputs[x,]


class BlockGraph(Graph):
    """A graph whose kernels and word tables are stored in 8 bits, with a scale for each block of 32 values, as in
    llama.cpp's Q8_0.

    Products are onnxruntime's MatMulNBits (from release 1.22 on), with inputs in float32: accuracy level 4 rounds
    them to 8 bits too, which takes less time on a CPU, but costs more of the cosine than the weights do.
    """

    BLOCK, ZERO = 32, 128

    def __init__(self, spec: ModelSpec, params: Mapping[str, np.ndarray]) -> None:
        super().__init__(spec, cast_weights=False)
        self._params = params
        self._scales: dict[str, np.ndarray] = {}

    def _blocks(self, name: str, transposed: bool) -> bool:
        """Store the weight ``name``, [in, out] or, with ``transposed``, [out, in], as uint8[out, in / 32, 32].
        Return False if it stays float32."""
        rows = self._params[name] if transposed else self._params[name].T
        is_small = name.startswith(("embeddings/position_embeddings/", "embeddings/token_type_embeddings/", _WHOLE))
        if not name.startswith(QUANTIZED) or is_small or rows.shape[1] % self.BLOCK:
            return False
        if name not in self.stored:
            blocks = rows.reshape(len(rows), -1, self.BLOCK)
            values, scales = quantize(blocks.reshape(-1, self.BLOCK), 0)
            self.weights[name] = name
            self.stored[name] = (values.reshape(blocks.shape).astype(np.int16) + self.ZERO).astype(np.uint8)
            self._scales[name] = scales.reshape(blocks.shape[:2])
        return True

    def rows(self, name: str, ids: str) -> str:
        if not self._blocks(name, transposed=True):
            return super().rows(name, ids)
        scales = self.constant(self._scales[name][:, :, None], np.float32)
        blocks = self.op("Cast", self.op("Gather", name, ids, axis=0), to=FLOAT)
        blocks = self.op(
            "Mul", self.op("Sub", blocks, self.scalar(self.ZERO)), self.op("Gather", scales, ids, axis=0)
        )
        return self.op("Reshape", blocks, self.axes(0, 0, self._params[name].shape[1]))

    def product(self, x: str, name: str, transposed: bool = False) -> str:
        if not self._blocks(name, transposed):
            return super().product(x, name, transposed)
        outputs, blocks, size = self.stored[name].shape
        sizes = {"N": outputs, "K": blocks * size, "bits": 8, "block_size": size}
        scales = self.constant(self._scales[name], np.float32)
        return self.op("MatMulNBits", x, name, scales, domain="com.microsoft", **sizes)


class CalibrationGraph(Graph):
    """A float32 graph that notes the inputs of the products of an :class:`Int8Graph`."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec, cast_weights=False)
        # Input of products -> names of these products.
        self.inputs: dict[str, list[str]] = {}

    def product(self, x: str, name: str, transposed: bool = False) -> str:
        if name.startswith(QUANTIZED) and not name.startswith(_WHOLE):
            self.inputs.setdefault(x, []).append(name)
        return super().product(x, name, transposed)
