"""Writer of StableHLO exports: a program that XLA runs on cpu, cuda and tpu, and a separate weights file.

``jax.export.deserialize`` reads ``program.bin``; ``program.mlir`` contains the same program as text,
``weights.safetensors`` contains the weights by canonical name, and ``signature.json`` lists all arguments and
outputs.
"""

import contextlib
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from safetensors.numpy import load_file

from bert_jax.config import ModelSpec
from bert_jax.interop.hf.write import write_json, write_safetensors
from bert_jax.interop.model_bundle import ModelBundle, StoredDtype, check_shapes, parameter_shapes
from bert_jax.interop.programs import serving
from bert_jax.interop.stored_model import StoredName
from bert_jax.json_values import Json

PROGRAM, TEXT, WEIGHTS, SIGNATURE = "program.bin", "program.mlir", "weights.safetensors", "signature.json"
PLATFORMS = ("cpu", "cuda", "tpu")


def write_stablehlo(folder: Path, weights: ModelBundle, *, dtype: StoredDtype = "float32") -> list[str]:
    """Write the program, its text, weights, signature, config.json and tokenizer files into ``folder``; return
    notes.

    The arguments of the program are (weights by name, input_ids, attention_mask, token_type_ids). The inputs are
    int32[batch, sequence] with any batch size and any length up to the maximum length of the model. The program
    returns a dict of float32 outputs with the names in ``serving.output_names``. ``dtype`` is the dtype of the
    stored weights and of the weight arguments; arithmetic is float32.
    """
    check_shapes(weights.spec, weights.params, folder)
    exported = _export(weights.spec, jnp.dtype(dtype))
    (folder / PROGRAM).write_bytes(exported.serialize())
    (folder / TEXT).write_text(exported.mlir_module(), encoding="utf-8")
    write_json(folder / SIGNATURE, _signature(weights.spec, exported), indent=1)
    names = {name: StoredName(name, transpose=False) for name in weights.params}
    write_safetensors(folder / WEIGHTS, weights.params, names, dtype)
    notes = [f"the program accepts sequence lengths up to {weights.spec.model.max_length}"]
    if dtype != "float32":
        notes.append(f"{dtype} weights are converted to float32 inside the program; arithmetic is float32")
    return [*notes, *serving.write_companions(folder, weights, dtype)]


def check_stablehlo(
    folder: Path, weights: ModelBundle, shapes: tuple[tuple[int, int], ...] = ()
) -> dict[str, float] | None:
    """Run the export in ``folder``, which :func:`write_stablehlo` wrote, on this machine with its weights file.

    Returns, for each output, the largest difference from the output of the model with the stored weights.
    """
    program = jax.export.deserialize(bytearray((folder / PROGRAM).read_bytes()))
    names = [output["name"] for output in json.loads((folder / SIGNATURE).read_text("utf-8"))["outputs"]]
    stored = load_file(folder / WEIGHTS)
    on_device = {name: jnp.asarray(values) for name, values in stored.items()}
    rounded = {name: values.astype(stored[name].dtype) for name, values in weights.params.items()}

    def run(inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        outputs = program.call(on_device, *(jnp.asarray(inputs[name], jnp.int32) for name in serving.INPUTS))
        return {name: np.asarray(outputs[name]) for name in sorted(outputs, key=names.index)}

    return serving.largest_differences(weights.spec, rounded, run, serving.sample_inputs(weights.spec, shapes))


def _export(spec: ModelSpec, dtype: DTypeLike) -> jax.export.Exported:
    def program(
        params: dict[str, jax.Array], input_ids: jax.Array, attention_mask: jax.Array, token_type_ids: jax.Array
    ) -> dict[str, jax.Array]:
        raised = {name: values.astype(jnp.float32) for name, values in params.items()}
        return serving.forward(spec, raised, input_ids, attention_mask, token_type_ids)

    batch, sequence = serving.symbolic_sizes(spec)
    ids = jax.ShapeDtypeStruct((batch, sequence), jnp.int32)
    shapes = {name: jax.ShapeDtypeStruct(shape, dtype) for name, shape in parameter_shapes(spec).items()}
    # Weights that no output uses remain arguments, so that the arguments match the weights file.
    jitted = jax.jit(program, keep_unused=True)
    # By default accelerators multiply float32 matrices with reduced precision, which suffices for bfloat16 weights.
    precision = "default" if dtype == jnp.bfloat16 else "highest"
    with jax.default_matmul_precision(precision), _without_source_paths():
        return jax.export.export(jitted, platforms=PLATFORMS)(shapes, *(ids for _ in serving.INPUTS))


@contextlib.contextmanager
def _without_source_paths() -> Iterator[None]:
    """Context manager that keeps the paths of source files out of the programs exported in its block."""
    option = "jax_traceback_in_locations_limit"
    before = getattr(jax.config, option)
    jax.config.update(option, 0)
    try:
        yield
    finally:
        jax.config.update(option, before)


def _signature(spec: ModelSpec, exported: jax.export.Exported) -> dict[str, Json]:
    """Return a JSON-serializable description of the program: versions, variable sizes, and the arguments and
    outputs in the order of the program."""
    (arguments, _), outputs = (
        jax.tree.unflatten(tree, values)
        for tree, values in ((exported.in_tree, exported.in_avals), (exported.out_tree, exported.out_avals))
    )
    params, *inputs = arguments
    return {
        "jax_version": jax.__version__,
        "calling_convention_version": exported.calling_convention_version,
        "platforms": list(exported.platforms),
        # True: the first argument of the MLIR function selects a platform; the weights and inputs follow.
        "platform_index_argument": len(exported.platforms) > 1,
        "free_sizes": {"batch": "at least 1", "sequence": f"1 to {spec.model.max_length}"},
        "weights": [_value(name, values) for name, values in params.items()],
        "inputs": [_value(name, values) for name, values in zip(serving.INPUTS, inputs, strict=True)],
        "outputs": [_value(name, outputs[name]) for name in serving.output_names(spec)],
        "mlir_outputs": list(outputs),
        "model": dataclasses.asdict(spec),
    }


def _value(name: str, values: jax.ShapeDtypeStruct) -> dict[str, Json]:
    shape = [size if isinstance(size, int) else str(size) for size in values.shape]
    return {"name": name, "dtype": str(values.dtype), "shape": shape}
