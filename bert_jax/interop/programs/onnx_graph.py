"""Writer of ONNX files: ``model.onnx``, and ``model.onnx.data`` for weights that are too large for one file."""

import contextlib
import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from bert_jax.config import ModelSpec
from bert_jax.interop.model_bundle import ModelBundle, StoredDtype, check_shapes
from bert_jax.interop.programs import serving
from bert_jax.interop.programs.onnx_int8 import CalibrationGraph, Int8Graph
from bert_jax.interop.programs.onnx_layers import add_network
from bert_jax.interop.programs.onnx_nodes import FLOAT, INT64, Graph
from bert_jax.io.errors import one_line

FILE, DATA_FILE = "model.onnx", "model.onnx.data"
# Metadata key of a JSON object: dtype of the weights, sizes, labels, pooling, tokenizer.
METADATA = "bert_jax"
OPSET, IR_VERSION = 17, 8
# Above this size the weights are stored in a separate file, because a protocol buffer has at most 2 GiB.
EXTERNAL_DATA_BYTES = 2_000_000_000
# Size of a memory page, so that a reader can memory-map each weight.
ALIGNMENT = 4096


def write_onnx(folder: Path, weights: ModelBundle, *, dtype: StoredDtype = "float32") -> list[str]:
    """Write ``model.onnx``, config.json and the files of the tokenizer into ``folder``; return notes.

    The inputs input_ids, attention_mask and token_type_ids are int64[batch, sequence]. The outputs are float32 and
    have the names in ``serving.output_names``. 16-bit weights are converted to float32 when the file is loaded;
    with int8, the graph is an :class:`Int8Graph` with ``weights.ranges``. Raises ``ValueError`` if the onnx package
    is not installed or the result is not a valid model.
    """
    if dtype == "int8":
        graph: Graph = Int8Graph(weights.spec, weights.params, weights.ranges)
    else:
        graph = Graph(weights.spec, cast_weights=dtype != "float32")
    external = _save(folder, weights, graph, dtype)
    import onnx

    try:
        # The checker gets the path instead of the model, so that it also reads the file of external data.
        onnx.checker.check_model(str(folder / FILE), full_check=True)
    except onnx.checker.ValidationError as error:
        raise ValueError(f"{folder / FILE}: not a valid ONNX model: {one_line(error)}") from None
    return [
        *_notes(weights, graph, external, dtype),
        *serving.write_companions(folder, weights, "float32" if dtype == "int8" else dtype),
    ]


def write_calibration(folder: Path, weights: ModelBundle) -> dict[str, list[str]]:
    """Write ``model.onnx`` in float32, with the inputs of all products of an :class:`Int8Graph` as further outputs.
    Return a dict from the name of each such output to the names of the products. Raises ``ValueError`` as
    :func:`write_onnx` does."""
    graph = CalibrationGraph(weights.spec)
    _save(folder, weights, graph, "float32", graph.inputs)
    return graph.inputs


def _save(folder: Path, weights: ModelBundle, graph: Graph, dtype: str, values: Iterable[str] = ()) -> bool:
    """Build the network in ``graph``, whose ``values`` are outputs too, and save it; return True if the weights are
    in a separate file."""
    try:
        import onnx
    except ImportError:
        raise ValueError("ONNX export needs the onnx package: pip install 'bert_jax[onnx]'") from None
    check_shapes(weights.spec, weights.params, folder)
    outputs = add_network(graph)
    # In the order of ``weights.params``, not in the order in which the graph uses the weights.
    stored = {
        name: graph.stored[name] if name in graph.stored else _stored(weights.params[name], dtype)
        for name in weights.params
        if name in graph.weights
    }
    external = sum(array.nbytes for array in stored.values()) > EXTERNAL_DATA_BYTES
    tensors = _tensors(stored, folder / DATA_FILE if external else None)
    tensors += [onnx.numpy_helper.from_array(value, name) for name, value in graph.constants.items()]
    model = _model(weights.spec, graph, outputs, tensors, dtype)
    model.graph.output.extend(onnx.helper.make_tensor_value_info(name, FLOAT, None) for name in values)
    onnx.save_model(model, folder / FILE)
    return external


def check_onnx(
    folder: Path, weights: ModelBundle, shapes: tuple[tuple[int, int], ...] = ()
) -> dict[str, float] | None:
    """Use onnxruntime to run the file that :func:`write_onnx` wrote into ``folder``.

    For each output, return the largest difference from the output of the model with the weights as stored (int8:
    with the weights before rounding). Return None if onnxruntime is not installed.
    """
    try:
        import onnxruntime
    except ImportError:
        return None
    session = onnxruntime.InferenceSession(folder / FILE, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    dtype = json.loads(session.get_modelmeta().custom_metadata_map[METADATA])["weights_dtype"]
    params = {name: _stored(values, dtype).astype(np.float32) for name, values in weights.params.items()}
    return serving.largest_differences(
        weights.spec,
        params,
        lambda inputs: dict(zip(names, session.run(names, inputs), strict=True)),
        serving.sample_inputs(weights.spec, shapes),
    )


def _stored(values: np.ndarray, dtype: str) -> np.ndarray:
    kinds = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
    return np.asarray(values, kinds.get(dtype, np.float32))


def _tensors(stored: dict[str, np.ndarray], file: Path | None) -> list[Any]:
    """Return the weights as ONNX tensors. If ``file`` is not None, the values are written to ``file``, and the
    tensors refer to this file."""
    from onnx import TensorProto

    kinds = {
        "float32": FLOAT,
        "float16": TensorProto.FLOAT16,
        "bfloat16": TensorProto.BFLOAT16,
        "int8": TensorProto.INT8,
    }
    tensors = []
    with contextlib.nullcontext() if file is None else file.open("xb") as data:
        for name, array in stored.items():
            tensor = TensorProto(name=name, data_type=kinds[array.dtype.name], dims=array.shape)
            if file is None or data is None:
                tensor.raw_data = array.tobytes()
            else:
                data.write(bytes(-data.tell() % ALIGNMENT))
                tensor.data_location = TensorProto.EXTERNAL
                place = {"location": file.name, "offset": data.tell(), "length": array.nbytes}
                for key, value in place.items():
                    tensor.external_data.add(key=key, value=str(value))
                data.write(array.tobytes())
            tensors.append(tensor)
    return tensors


def _model(spec: ModelSpec, graph: Graph, outputs: list[str], tensors: list[Any], dtype: str) -> Any:
    from onnx import helper

    inputs = [helper.make_tensor_value_info(name, INT64, ["batch", "sequence"]) for name in serving.INPUTS]
    shapes = serving.output_shapes(spec)
    results = [helper.make_tensor_value_info(name, FLOAT, shapes[name]) for name in outputs]
    made = helper.make_graph(graph.nodes, "bert_jax", inputs, results, initializer=tensors)
    model = helper.make_model(
        made, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION, producer_name="bert_jax"
    )
    described = {"weights_dtype": dtype, "model": dataclasses.asdict(spec)}
    helper.set_model_props(model, {METADATA: json.dumps(described, ensure_ascii=False)})
    return model


def _notes(weights: ModelBundle, graph: Graph, external: bool, dtype: str) -> list[str]:
    unused = sorted({name.split("/")[0] for name in weights.params if name not in graph.weights})
    notes = [f"{part}: omitted, because no output of the ONNX file uses it" for part in unused]
    if external:
        notes.append(f"{FILE} needs {DATA_FILE} in the same folder: the weights are too large for one file")
    if dtype in ("float16", "bfloat16"):
        notes.append(f"{dtype} weights are converted to float32 when the file is loaded; arithmetic is float32")
    if dtype == "int8":
        source = (
            "were calibrated on texts" if weights.ranges else "are those of each batch (--calibration fixes them)"
        )
        notes.append(f"int8: the ranges of the inputs of products {source}; see docs/small-models.md")
    return notes
