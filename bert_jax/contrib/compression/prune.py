"""``bert-jax prune`` writes a model with fewer layers, attention heads and feed-forward units."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import jax
import numpy as np

from bert_jax.config import ModelConfig
from bert_jax.contrib.compression import importance
from bert_jax.contrib.compression.heads_and_units import Parts, cut, kept, masked, whole_masks
from bert_jax.contrib.surgery.network_changes import with_layers
from bert_jax.inference.loaded import LoadedModel, load, prepare
from bert_jax.interop.model_bundle import ModelBundle, ReadOptions
from bert_jax.interop.readers import read_weights
from bert_jax.interop.saved_model import write_saved
from bert_jax.io.files import new_folder, whole_folder
from bert_jax.io.hub import model_path
from bert_jax.model.flops import traced_flops
from bert_jax.process import exits
from bert_jax.records import Record

Importance = Literal["gradient", "magnitude", "movement", "random"]
_ROWS, _LENGTH = 8, 32  # of drawn ids, for which outputs are compared
_COUNTED = 128  # tokens of the text whose operations are counted
_BAR = 1e-5  # largest difference of outputs, as a share of the largest value (at least 1): sums of another order


@dataclass(frozen=True, kw_only=True)
class Pruning:
    """Parts of a model to keep, and how they are chosen."""

    # Shares of the attention heads and of the feed-forward units to keep.
    heads: float = 1.0
    units: float = 1.0
    # Layers to keep, counted from 0; empty: all.
    layers: tuple[int, ...] = ()
    # Keep equally many in every layer.
    even: bool = False
    importance: Importance = "gradient"
    # For the importance gradient: examples, and how many of them count (0: all).
    examples: Sequence[Record] = ()
    limit: int = 2000
    # For the importance movement: the model from which training started.
    start: str = ""
    # Seed of random importance, and of the draw of examples.
    seed: int = 0

    def __post_init__(self) -> None:
        """Raise ``ValueError`` for options that contradict each other."""
        chooses = self.heads != 1 or self.units != 1
        if not chooses and not self.layers:
            raise ValueError("nothing to prune; set --heads or --units to the share to keep, or --layers")
        if self.importance not in get_args(Importance):
            allowed = ", ".join(get_args(Importance))
            raise ValueError(f"--importance: {self.importance!r} is not allowed; allowed: {allowed}")
        if chooses and self.importance == "gradient" and not self.examples:
            raise ValueError(
                "--examples: missing; --importance gradient requires examples with labels, or texts for a masked "
                "language model; name their files, or use --importance magnitude"
            )
        if self.examples and not (chooses and self.importance == "gradient"):
            raise ValueError("--examples: requires --importance gradient, and --heads or --units; omit it")
        if bool(self.start) != (chooses and self.importance == "movement"):
            what = "requires --importance movement, and --heads or --units; omit it"
            if not self.start:
                what = "missing; --importance movement requires the model from which training started"
            raise ValueError(f"--start: {what}")
        for name in ("limit", "seed"):
            if getattr(self, name) < 0:
                raise ValueError(f"--{name}: {getattr(self, name)} is not allowed; allowed: 0 or more")


def prune_model(
    source: Path, target: Path, pruning: Pruning, options: ReadOptions, *, report: Callable[[str], None] = print
) -> None:
    """Remove layers, attention heads and feed-forward units of the model ``source``, and save the result to the new
    folder ``target``.

    Layers are removed first; importance is computed in the remaining network. The outputs are those of this
    network with masks on the removed heads and units, up to rounding, which is verified before the model is saved.
    ``report`` is called with each line of the log.

    Raises ``ValueError`` if the model cannot be read or pruned, or if ``target`` is not empty; ``exits.Stop`` with
    VERIFICATION_FAILED if an output of the saved model differs.
    """
    target = new_folder(target)
    whole = read_weights(source, options)
    for note in whole.notes:
        report(note)
    shallow = with_layers(whole, pruning.layers, "--layers") if pruning.layers else whole
    check_prunable(shallow.spec.model, pruning, str(source))
    loaded = prepare(shallow, name=str(source))
    masks = _masks(loaded, shallow, pruning, options, report)
    smaller = cut(shallow, masks)
    lines = [
        shallow.notes[-1] if pruning.layers else f"all of {whole.spec.model.num_layers} layers",
        *_counts(shallow.spec.model, smaller.spec.model),
    ]
    smaller = dataclasses.replace(smaller, origin={**whole.origin, "pruned": "; ".join(lines)}, notes=())
    head_size = shallow.spec.model.head_size
    reference = prepare(dataclasses.replace(shallow, params=masked(shallow.params, masks, head_size)))
    with whole_folder(target) as unverified:
        write_saved(unverified, smaller)
        part = load(unverified)
        for line in (*lines, *_sizes(whole, smaller), _compare(reference, part)):
            report(line)
    report(f"saved: {target}")


def check_prunable(model: ModelConfig, pruning: Pruning, name: str) -> None:
    """Raise ``ValueError`` if the heads or units of ``model`` cannot be removed; ``name`` names the model."""
    reason = ""
    if not model.has_attention:
        reason = f"the encoder ({model.encoder}) has no attention heads and feed-forward units"
    elif model.shared_layers:
        reason = "all layers share their parameters, so they cannot have different sizes"
    elif pruning.heads != 1 and model.relative_positions != "none":
        kind = model.relative_positions
        reason = f"positions that are relative ({kind}) belong to the numbers of the heads; --units is possible"
    elif pruning.heads != 1 and model.attention_block:
        reason = "random blocks (model.attention_block) belong to the numbers of the heads; --units is possible"
    if reason:
        raise ValueError(f"{name}: cannot be pruned: {reason}")


def _masks(
    loaded: LoadedModel,
    weights: ModelBundle,
    pruning: Pruning,
    options: ReadOptions,
    report: Callable[[str], None],
) -> Parts:
    """Return the masks of the kept heads and units, bool."""
    model, masks = weights.spec.model, whole_masks(weights.spec.model)
    shares = {"heads": pruning.heads, "units": pruning.units}
    for name, scores in zip(shares, masks, strict=True):  # the shares are checked before anything is computed
        kept(scores, shares[name], even=pruning.even, option=f"--{name}")
    if pruning.heads == pruning.units == 1:
        return Parts(*(tuple(mask > 0 for mask in each) for each in masks))
    if pruning.importance == "gradient":
        found, count = importance.gradient_importance(loaded, pruning.examples, pruning.limit, pruning.seed)
        report(f"importance: gradients of {count:,} examples")
    elif pruning.importance == "magnitude":
        found = importance.magnitude_importance(model, weights.params)
    elif pruning.importance == "movement":
        found = importance.movement_importance(model, weights.params, _started(weights, pruning, options))
    else:
        found = importance.random_importance(model, pruning.seed)
    return Parts(*(
        kept(scores, shares[name], even=pruning.even, option=f"--{name}")
        for name, scores in zip(shares, found, strict=True)
    ))  # fmt: skip


def _started(weights: ModelBundle, pruning: Pruning, options: ReadOptions) -> Mapping[str, np.ndarray]:
    """Return the parameters of the start of training. Raises ``ValueError`` if their shapes are others."""
    start = read_weights(model_path(pruning.start), options)
    start = with_layers(start, pruning.layers, "--layers") if pruning.layers else start
    layers = [
        {name: array.shape for name, array in params.items() if name.startswith("encoder/layer_")}
        for params in (weights.params, start.params)
    ]
    if layers[0] != layers[1]:
        raise ValueError(
            f"--start {pruning.start}: the layers differ from those of the model to prune; give the "
            "model from which the training of the model to prune started"
        )
    return start.params


def _counts(before: ModelConfig, after: ModelConfig) -> list[str]:
    pairs = {
        "heads": (before.heads_by_layer, after.heads_by_layer),
        "units": (before.units_by_layer, after.units_by_layer),
    }
    return [
        f"{sum(new):,} of {sum(old):,} {name}, by layer: {' '.join(map(str, new))}"
        for name, (old, new) in pairs.items()
    ]


def _sizes(before: ModelBundle, after: ModelBundle) -> list[str]:
    """Return lines with the numbers of parameters and of operations."""
    length = min(_COUNTED, before.spec.model.max_length)
    sizes = {
        "parameters": [sum(array.size for array in bundle.params.values()) for bundle in (before, after)],
        f"operations for {length} tokens": [encoder_flops(prepare(bundle), length) for bundle in (before, after)],
    }
    return [f"{name}: {whole:,} to {part:,} ({part / whole:.0%})" for name, (whole, part) in sizes.items()]


def encoder_flops(loaded: LoadedModel, length: int) -> int:
    """Return the operations of all matrix products for one text of ``length`` tokens, without the heads."""
    features = {
        name: jax.ShapeDtypeStruct((1, length), np.int32)
        for name in ("input_ids", "token_type_ids", "position_ids", "sequence_ids")
    }
    model = loaded.model.clone(sentence=None)
    run = traced_flops(lambda params, batch: model.apply({"params": params}, batch), loaded.params, features)
    return sum(count for scope, count in run.items() if "/encoder/" in f"{scope}/")


def _compare(reference: LoadedModel, saved: LoadedModel) -> str:
    """Compare the outputs of both models for rows of random ids; raise ``exits.Stop`` if they differ."""
    model, rng = saved.spec.model, np.random.default_rng(0)
    length = min(_LENGTH, model.max_length)
    ids = rng.integers(0, model.vocab_size, (_ROWS, length))
    mask = (np.arange(length) < rng.integers(1, length + 1, (_ROWS, 1))).astype(np.int32)
    largest = 0.0
    outputs = [each.forward({"input_ids": ids, "attention_mask": mask}) for each in (reference, saved)]
    for name, values in outputs[1].items():
        other = outputs[0][name]
        if values.shape[:2] == mask.shape:
            values, other = values[mask > 0], other[mask > 0]
        difference = float(np.abs(other - values).max()) / max(1.0, float(np.abs(other).max()))
        if not difference <= _BAR:
            problem = f"{name} of the pruned model differs by {difference:.3g}; nothing was saved"
            raise exits.Stop(exits.VERIFICATION_FAILED, f"error: {problem}")
        largest = max(largest, difference)
    return f"outputs for {_ROWS} rows: equal to those with masks up to rounding ({largest:.1e})"
