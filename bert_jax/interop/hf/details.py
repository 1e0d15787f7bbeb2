"""Details of a model in folders of other libraries: the settings of its task, and heads that have no class there.

``bert_jax.json`` and ``bert_jax.safetensors``, which other libraries ignore, hold them.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bert_jax.config import ModelSpec, TaskSettings
from bert_jax.config.spec import FORMAT, described
from bert_jax.interop.hf.sentence_transformers import write_sentence_transformers
from bert_jax.interop.hf.tensors import safetensors
from bert_jax.interop.hf.write import write_hf, write_json, write_safetensors
from bert_jax.interop.model_bundle import ModelBundle, StoredDtype, parameter_shapes
from bert_jax.interop.stored_model import FLOATS, StoredName, listed, read_float32
from bert_jax.io.untrusted_folder import inside, needed, read_small

DETAILS_FILE, WEIGHTS_FILE = "bert_jax.json", "bert_jax.safetensors"


@dataclass(frozen=True, kw_only=True)
class Details:
    """Content of ``bert_jax.json``: the task settings, and fields of ``HeadsConfig`` for heads without a class in
    other libraries."""

    task: TaskSettings | None = None
    crf: bool = False
    exits: tuple[int, ...] = ()
    pair_labels: tuple[str, ...] = ()
    pair_hidden: int = 0

    def with_heads(self, spec: ModelSpec) -> ModelSpec:
        """Return ``spec`` with these settings and heads. Raises ``ValueError`` if they do not fit the others."""
        heads = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)[1:]}
        return dataclasses.replace(spec, task=self.task, heads=dataclasses.replace(spec.heads, **heads))


def write_hf_folder(folder: Path, weights: ModelBundle, *, dtype: StoredDtype = "float32") -> list[str]:
    """Write a folder with ``write_hf`` and add the :class:`Details` of the model; return notes."""
    return _write(write_hf, folder, weights, dtype)


def write_sentence_folder(folder: Path, weights: ModelBundle, *, dtype: StoredDtype = "float32") -> list[str]:
    """Write a folder with ``write_sentence_transformers`` and add the :class:`Details` of the model; return
    notes."""
    return _write(write_sentence_transformers, folder, weights, dtype)


def _split(weights: ModelBundle) -> tuple[ModelBundle, Details]:
    """Return ``weights`` without the settings and heads of :class:`Details`, and these."""
    spec = weights.spec
    names = [field.name for field in dataclasses.fields(Details)[1:]]
    details = Details(task=spec.task, **{name: getattr(spec.heads, name) for name in names})
    plain = Details().with_heads(spec)
    params = {name: weights.params[name] for name in parameter_shapes(plain)}
    return dataclasses.replace(weights, spec=plain, params=params), details


def _write(write: Callable[..., list[str]], folder: Path, weights: ModelBundle, dtype: StoredDtype) -> list[str]:
    """Write ``weights`` into ``folder`` with ``write``, then the :class:`Details`, which ``write`` cannot store;
    return notes."""
    plain, details = _split(weights)
    notes = write(folder, plain, dtype=dtype)
    if details == Details():
        return notes
    write_json(folder / DETAILS_FILE, {"format": FORMAT, **dataclasses.asdict(details)})
    own = {name: StoredName(name, transpose=False) for name in weights.params if name not in plain.params}
    if not own:
        return notes
    write_safetensors(folder / WEIGHTS_FILE, weights.params, own, dtype)
    parts = listed(sorted({name.partition("/")[0] for name in own}))
    return [
        *notes,
        f"{WEIGHTS_FILE} holds {parts}, which only bert_jax reads: other libraries compute without them",
    ]


def read_details(folder: Path, weights: ModelBundle) -> ModelBundle:
    """Return ``weights``, read from ``folder``, with the :class:`Details` in the folder, if any.

    Raises ``ValueError`` for damaged files, and for details of another model.
    """
    file = inside(folder, DETAILS_FILE)
    if file is None:
        return weights
    details = described(Details, read_small(file, "details of a model"), str(file))
    try:
        spec = details.with_heads(weights.spec)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None
    params = dict(weights.params)
    if names := {name: shape for name, shape in parameter_shapes(spec).items() if name not in params}:
        path = needed(folder, WEIGHTS_FILE)
        tensors = safetensors(path)
        found = {name: tensor.shape for name, tensor in tensors.items() if tensor.dtype in FLOATS}
        if found != names:
            problem = f"not the arrays of {DETAILS_FILE}, {listed(list(names))}"
            raise ValueError(f"{path}: {problem}; export the model again")
        params |= {name: read_float32(tensors[name]) for name in names}
    return dataclasses.replace(weights, spec=spec, params=params)
