"""Writer of ONNX files: ``model.onnx``, and ``model.onnx.data`` for weights that are too large for one file; and of
a folder ``onnx``, which transformers.js and other programs expect in a Hugging Face folder."""

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
from bert_jax.interop.programs.onnx_int8 import BlockGraph, CalibrationGraph, Int8Graph
from bert_jax.interop.programs.onnx_layers import add_network
from bert_jax.interop.programs.onnx_nodes import FLOAT, INT64, Graph
from bert_jax.io.errors import one_line

FILE, DATA = "model.onnx", ".data"
# Folder of programs in a Hugging Face folder; its files have the names that transformers.js looks for.
FOLDER, QUANTIZED_FILE = "onnx", "model_quantized.onnx"
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
    notes = write_program(folder, weights, dtype)
    _check(folder / FILE)
    return [
        *notes,
        *serving.write_companions(folder, weights, "float32" if dtype == "int8" else dtype),
    ]


def write_program(folder: Path, weights: ModelBundle, dtype: StoredDtype) -> list[str]:
    """Write only ``model.onnx`` of :func:`write_onnx`, without a test of its validity; return notes."""
    if dtype == "int8":
        graph: Graph = Int8Graph(weights.spec, weights.params, weights.ranges)
    else:
        graph = Graph(weights.spec, cast_weights=dtype != "float32")
    external = _save(folder / FILE, weights, graph, dtype)
    return _notes(weights, graph, external, dtype)


def write_onnx_folder(folder: Path, weights: ModelBundle) -> list[str]:
    """Write model.onnx (float32) and model_quantized.onnx (a :class:`BlockGraph`) into the new folder onnx in
    ``folder``; return notes. Inputs, outputs and errors are those of :func:`write_onnx`."""
    place = folder / FOLDER
    place.mkdir()
    graph = Graph(weights.spec, cast_weights=False)
    external = _save(place / FILE, weights, graph, "float32")
    _save(place / QUANTIZED_FILE, weights, BlockGraph(weights.spec, weights.params), "int8")
    for name in (FILE, QUANTIZED_FILE):
        _check(place / name)
    return _notes(weights, graph, external, "float32")


def write_calibration(folder: Path, weights: ModelBundle) -> dict[str, list[str]]:
    """Write ``model.onnx`` in float32, with the inputs of all products of an :class:`Int8Graph` as further outputs.
    Return a dict from the name of each such output to the names of the products. Raises ``ValueError`` as
    :func:`write_onnx` does."""
    graph = CalibrationGraph(weights.spec)
    _save(folder / FILE, weights, graph, "float32", graph.inputs)
    return graph.inputs


def _save(file: Path, weights: ModelBundle, graph: Graph, dtype: str, values: Iterable[str] = ()) -> bool:
    """Build the network in ``graph``, whose ``values`` are outputs too, and save it; return True if the weights are
    in a separate file. Raises ``ValueError`` without the onnx package, and for wrong parameters."""
    try:
        import onnx
    except ImportError:
        raise ValueError("ONNX export needs the onnx package: pip install 'bert_jax[onnx]'") from None
    check_shapes(weights.spec, weights.params, file.parent)
    outputs = add_network(graph)
    # In the order of ``weights.params``, not in the order in which the graph uses the weights.
    stored = {
        name: graph.stored[name] if name in graph.stored else _stored(weights.params[name], dtype)
        for name in weights.params
        if name in graph.weights
    }
    external = sum(array.nbytes for array in stored.values()) > EXTERNAL_DATA_BYTES
    tensors = _tensors(stored, file.with_name(f"{file.name}{DATA}") if external else None)
    tensors += [onnx.numpy_helper.from_array(value, name) for name, value in graph.constants.items()]
    model = _model(weights.spec, graph, outputs, tensors, dtype)
    model.graph.output.extend(onnx.helper.make_tensor_value_info(name, FLOAT, None) for name in values)
    onnx.save_model(model, file)
    return external


def _check(file: Path) -> None:
    """Raise ``ValueError`` if the ONNX file is invalid."""
    import onnx

    try:
        # The checker gets the path instead of the model, so that it also reads the file of external data.
        onnx.checker.check_model(str(file), full_check=True)
    except onnx.checker.ValidationError as error:
        raise ValueError(f"{file}: not a valid ONNX model: {one_line(error)}") from None


def check_onnx(
    folder: Path, weights: ModelBundle, shapes: tuple[tuple[int, int], ...] = (), file: str = FILE
) -> dict[str, float] | None:
    """Use onnxruntime to run the ``file`` in ``folder`` that :func:`write_onnx` or :func:`write_onnx_folder` wrote.

    For each output, return the largest difference from the output of the model with the weights as stored (int8:
    with the weights before rounding). Return None if onnxruntime is not installed.
    """
    try:
        import onnxruntime
    except ImportError:
        return None
    session = onnxruntime.InferenceSession(folder / file, providers=["CPUExecutionProvider"])
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
        "uint8": TensorProto.UINT8,
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
    domains = {(node.domain, 1 if node.domain else OPSET) for node in graph.nodes}
    model = helper.make_model(
        made,
        opset_imports=[helper.make_opsetid(*one) for one in sorted(domains)],
        ir_version=IR_VERSION,
        producer_name="bert_jax",
    )
    described = {"weights_dtype": dtype, "model": dataclasses.asdict(spec)}
    helper.set_model_props(model, {METADATA: json.dumps(described, ensure_ascii=False)})
    return model


def _notes(weights: ModelBundle, graph: Graph, external: bool, dtype: str) -> list[str]:
    unused = sorted({name.split("/")[0] for name in weights.params if name not in graph.weights})
    notes = [f"{part}: omitted, because no output of the ONNX file uses it" for part in unused]
    if external:
        notes.append(f"{FILE} needs {FILE}{DATA} in the same folder: the weights are too large for one file")
    if dtype in ("float16", "bfloat16"):
        notes.append(f"{dtype} weights are converted to float32 when the file is loaded; arithmetic is float32")
    if dtype == "int8":
        source = (
            "were calibrated on texts" if weights.ranges else "are those of each token (--calibration fixes them)"
        )
        notes.append(f"int8: the ranges of the inputs of products {source}; see docs/small-models.md")
    return notes
