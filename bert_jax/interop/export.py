"""Export of any readable model to a folder in another format.

The folder is renamed to its final name only after it is complete and, by default, verified.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from bert_jax import registry
from bert_jax.interop.export_table import DTYPES, HF_FORMATS, all_formats, fit, keep_heads, keep_width
from bert_jax.interop.hf.details import write_hf_folder, write_sentence_folder
from bert_jax.interop.model_bundle import Differences, ModelBundle, ReadOptions, StoredDtype
from bert_jax.interop.model_card import Publication, architecture, is_read_back, model_card
from bert_jax.interop.npz import check_npz, write_npz
from bert_jax.interop.programs.onnx_graph import FOLDER, QUANTIZED_FILE, check_onnx, write_onnx, write_onnx_folder
from bert_jax.interop.programs.stablehlo import check_stablehlo, write_stablehlo
from bert_jax.interop.readers import read_weights
from bert_jax.interop.tf1.checkpoint import check_tf1, write_tf1
from bert_jax.interop.verification import check_hf, check_read_back, check_sentence_transformers, judge
from bert_jax.io.files import whole_folder

# Format -> consumer (the library that loads the exported folder), largest allowed difference, and the function that
# compares the outputs or arrays of the consumer with the model.
_CHECKS: dict[str, tuple[str, float, Callable[[Path, ModelBundle], dict[str, float] | None]]] = {
    "tf1": ("tf.train.load_checkpoint", 0.0, check_tf1),
    "onnx": ("onnxruntime", 1e-4, check_onnx),
    "stablehlo": ("jax.export", 1e-5, check_stablehlo),
    "npz": ("numpy", 0.0, check_npz),
}
CARD = "README.md"
LARGEST_FLOAT16 = float(np.finfo(np.float16).max)


# Format -> function that writes a model into an existing empty folder and returns notes for the log.
WRITERS: dict[str, Callable[..., list[str]]] = {
    "hf": write_hf_folder,
    "sentence-transformers": write_sentence_folder,
    "tf1": write_tf1,
    "onnx": write_onnx,
    "stablehlo": write_stablehlo,
    "npz": write_npz,
}


def export_model(
    source: Path | ModelBundle,
    target: Path,
    format: str,
    *,
    dtype: StoredDtype = "float32",
    force: bool = False,
    heads: Sequence[str] | None = None,
    width: int | None = None,
    exact_tokenizer: bool = False,
    with_onnx: bool = False,
    calibrate: Callable[[ModelBundle], ModelBundle] | None = None,
    check: Callable[[Path, ModelBundle], None] | None = None,
    options: ReadOptions | None = None,
    verify: bool = True,
    peer_python: str | None = None,
    publication: Publication | None = None,
    kept: Sequence[tuple[Path, str]] = (),
    report: Callable[[str], None] = print,
) -> None:
    """Write the model ``source``, a path in any supported format, to the folder ``target`` in ``format``.

    Args:
        dtype: dtype of the stored weights; int8 (onnx): for encoder and embeddings, and for their products.
        force: replace a non-empty ``target`` when the new folder is complete, unless a path of ``kept`` is in it.
        heads: heads to export; the pooler is added if one of them needs it. None: all heads.
        width: number of the first values of a text's vector that the exported model returns. None: all.
        exact_tokenizer: write a tokenizer.json with the rules of google-research/bert (WordPiece), which only the
            tokenizers library reads, instead of those of transformers' BertTokenizer.
        with_onnx: for hf and sentence-transformers: also write the programs of ``write_onnx_folder``.
        calibrate: for int8: function that returns the model with ``ranges``. None: ranges of each batch.
        check: for onnx: function that is called with the new folder and the model before the folder is renamed.
        options: options of the reader.
        verify: compare the new folder with the model before it is renamed to ``target``: the parameters if this
            library reads the format, and the outputs if the library that loads the format is installed.
        peer_python: Python executable that has transformers or sentence-transformers; None: the running Python.
        publication: further facts for the model card, README.md.
        report: function that is called with each line of the log.

    Raises ``ValueError`` if the format cannot represent the model (docs/weights.md), if ``target`` may not be
    replaced, and for options that the format does not have; ``exits.Stop`` with VERIFICATION_FAILED if the files
    differ from the model. Then ``target`` is unchanged.
    """
    _check_options(format, dtype, with_onnx, calibrate is not None, check is not None)
    kept = kept if isinstance(source, ModelBundle) else (*kept, (source, "the source"))
    folder = replaced_folder(target, force, kept)
    weights = source if isinstance(source, ModelBundle) else read_weights(source, options)
    for note in weights.notes:
        report(note)
    weights, notes = _fitted(weights, format, dtype, heads, width)
    weights = dataclasses.replace(calibrate(weights) if calibrate else weights, exact_tokenizer=exact_tokenizer)
    with folder as partial:
        program, more = _write(partial, weights, format, dtype, with_onnx)
        _write_card(partial, weights, format, dtype, [*notes, *more], publication, with_onnx, report)
        if verify:
            _verify(partial, weights, format, dtype, peer_python, report)
            _verify_programs(partial / FOLDER, program, report)
        if check is not None:
            check(partial, weights)
    report(f"{target.resolve()}: {format}, {_size(target) / 1e6:,.1f} MB")


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def _write(
    folder: Path, weights: ModelBundle, format: str, dtype: str, with_onnx: bool
) -> tuple[ModelBundle | None, list[str]]:
    """Write all files except the card into ``folder``; return the model of the programs in its folder onnx (None:
    no programs), and notes."""
    write = WRITERS[format] if format in WRITERS else registry.load("formats", format).write
    notes = write(folder, weights, dtype=dtype)
    if not with_onnx:
        return None, notes
    program, more = fit(weights, "onnx")
    return program, [*notes, *more, *write_onnx_folder(folder, program)]


def _write_card(
    folder: Path, weights: ModelBundle, format: str, dtype: str, notes: Sequence[str],
    publication: Publication | None, has_programs: bool, report: Callable[[str], None],
) -> None:  # fmt: skip
    """Write README.md into ``folder`` and report the ``notes``, which it holds."""
    card = model_card(weights, format, dtype, architecture(folder), notes, publication, has_programs)
    (folder / CARD).write_text(card, encoding="utf-8")
    for note in notes:
        report(note)


def _check_options(format: str, dtype: str, with_onnx: bool, has_calibration: bool, has_check: bool) -> None:
    if format not in all_formats():
        raise ValueError(f"--format: {format!r} is not allowed; allowed: {', '.join(all_formats())}")
    if dtype not in DTYPES:
        raise ValueError(f"--dtype: {dtype!r} is not allowed; allowed: {', '.join(DTYPES)}")
    if with_onnx and format not in HF_FORMATS:
        raise ValueError(f"--with_onnx: not allowed with --format {format}; allowed with {', '.join(HF_FORMATS)}")
    if has_calibration and dtype != "int8":
        raise ValueError(f"--calibration: not allowed with --dtype {dtype}; allowed with int8")
    if has_check and format != "onnx":
        raise ValueError(f"--check: not allowed with --format {format}; allowed with onnx")


def _fitted(
    weights: ModelBundle, format: str, dtype: str, heads: Sequence[str] | None, width: int | None
) -> tuple[ModelBundle, list[str]]:
    """Return ``weights`` with the chosen heads and width, without the parts that ``format`` cannot represent, and
    notes."""
    if heads is not None:
        weights = keep_heads(weights, heads)
    weights = weights if width is None else keep_width(weights, width, format)
    weights, notes = fit(weights, format, dtype)
    if dtype == "float16":
        _check_float16(weights)
    return weights, notes


def _check_float16(weights: ModelBundle) -> None:
    for name, values in weights.params.items():
        largest = float(np.abs(values).max(initial=0))
        if largest > LARGEST_FLOAT16:
            limit = f"{name} has the value {largest:.3g}, but the largest float16 is {LARGEST_FLOAT16:g}"
            raise ValueError(f"--dtype float16: {limit}; use bfloat16 or float32")


def replaced_folder(
    target: Path, force: bool, kept: Sequence[tuple[Path, str]] = ()
) -> contextlib.AbstractContextManager[Path]:
    """Return :func:`whole_folder` for ``target``, which replaces a folder with files only with ``force``, and no
    folder that contains the working or home folder or one of ``kept``, paths with their names for messages."""
    target = target.resolve()
    _check_target(target, force, kept)
    return whole_folder(target, target.with_name(f".{target.name}.replaced"))


def _check_target(target: Path, force: bool, kept: Sequence[tuple[Path, str]]) -> None:
    if target.exists() and not target.is_dir():
        raise ValueError(f"{target}: is a file; give a folder")
    if not target.exists() or not any(target.iterdir()):
        return
    if not force:
        raise ValueError(
            f"{target}: not empty; give a new folder, or set --force (force=True) to replace this folder"
        )
    # --force deletes the folder, which must contain neither the source nor the working or home folder.
    for place, what in (*kept, (Path.cwd(), "the working folder"), (Path.home(), "your home")):
        if place.resolve().is_relative_to(target):
            raise ValueError(f"{target}: force would delete {what} ({place}); give another folder")


# ------------------------------------------------------------------ reading back


def _verify(
    folder: Path, weights: ModelBundle, format: str, dtype: str, peer_python: str | None,
    report: Callable[[str], None],
) -> None:  # fmt: skip
    other = None if format in WRITERS else registry.load("formats", format)
    stored = other.as_stored(weights, dtype) if other and other.as_stored else _as_stored(weights, dtype)
    if is_read_back(format):
        check_read_back(folder, stored, report)
    if other and other.check:
        result = other.check(folder, stored, dtype, peer_python)
    else:
        result = _consumer_differences(folder, stored, format, dtype, peer_python)
    judge(result, "", "; nothing was exported", report, strict=True)


def _verify_programs(folder: Path, weights: ModelBundle | None, report: Callable[[str], None]) -> None:
    """Compare the files of :func:`write_onnx_folder` with the model before rounding; None: there are none."""
    consumer, allowed, _ = _CHECKS["onnx"]
    if weights is None:
        return
    for file, bar in (("model.onnx", allowed), (QUANTIZED_FILE, np.inf)):
        found = check_onnx(folder, weights, file=file)
        values = {f"{FOLDER}/{file} {name}": (value, bar) for name, value in (found or {}).items()}
        judge(
            Differences(consumer, values) if found else f"{consumer} is not installed",
            "",
            "; nothing was exported",
            report,
            strict=True,
        )


def _as_stored(bundle: ModelBundle, dtype: str) -> ModelBundle:
    """Return ``bundle`` with every value rounded to a floating-point ``dtype`` and converted back to float32."""
    if dtype == "int8":
        return bundle  # outputs are compared with the outputs before rounding
    # numpy accepts the dtype name bfloat16 after ml_dtypes is imported, which JAX does.
    rounded = {
        name: np.asarray(values.astype(dtype, copy=False), np.float32) for name, values in bundle.params.items()
    }
    return dataclasses.replace(bundle, params=rounded)


def _consumer_differences(
    folder: Path, bundle: ModelBundle, format: str, dtype: str, peer_python: str | None
) -> Differences | str:
    """Return the differences between ``bundle`` and the results of the library that loads ``folder``. If they
    cannot be compared, return the reason as a string."""
    if format == "hf":
        return check_hf(folder, bundle, peer_python)
    if format == "sentence-transformers":
        return check_sentence_transformers(folder, bundle, peer_python)
    if format not in _CHECKS:
        return f"no other library is run for {format}"
    consumer, allowed, check = _CHECKS[format]
    # How much 8-bit products may differ depends on the use: --check compares scores.
    allowed = np.inf if dtype == "int8" else allowed
    values = check(folder, bundle)
    if values is None:
        return f"{consumer} is not installed"
    return Differences(consumer, {name: (value, allowed) for name, value in values.items()})
