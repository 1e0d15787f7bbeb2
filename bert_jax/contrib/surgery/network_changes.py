"""Changes of the network of an initial model: fewer layers (``--init_layers``), a Longformer of more positions
(``--to_long``, Beltagy et al. 2020), the pieces that frame the inputs of a GPT (``--gpt_inputs``)."""

import dataclasses
import re
from collections.abc import Mapping, Sequence

import numpy as np

from bert_jax.config import ModelConfig
from bert_jax.contrib.surgery.run_options import ChangeOptions
from bert_jax.interop.hf.families.long import GLOBAL_TOKENS, copy_projections
from bert_jax.interop.model_bundle import ModelBundle
from bert_jax.start.fixed_options import Given, value_of
from bert_jax.start.vocabulary import WORD_ROWS
from bert_jax.tokenization import Tokenizer, build_tokenizer
from bert_jax.tokenization.json_tokenizer import INPUT_PIECES, with_input_pieces

# Families that become a Longformer: those with its network, but for windows and global tokens.
CONVERTIBLE = ("bert", "roberta", "xlm-roberta", "camembert")
_REMEDY = f"use a model of a family that can be converted: {', '.join(CONVERTIBLE)}"
# Keys on each side of a query in a converted model, half of the window of the published models.
WINDOW = 256
_LAYER = re.compile(r"encoder/layer_(\d+)/")


def changed(options: ChangeOptions, weights: ModelBundle, given: Given) -> ModelBundle:
    """Return ``weights``, the model of ``--init_from``, changed as ``options`` state.

    Raises ``ValueError`` (one line) if it cannot be changed so.
    """
    if options.to_long and options.extend_positions:
        raise ValueError("--extend_positions: not allowed with --to_long, which repeats the positions; omit it")
    if options.init_layers:
        weights = with_layers(weights, options.init_layers)
    more = [name for name in options.changes if name != "init_layers"]
    if not more:
        return weights
    spec, content, name = weights.spec, weights.tokenizer_content, options.init_from
    if spec.tokenizer is None or content is None:
        raise ValueError(
            f"--{more[0]}: {name} has no tokenizer, but the option needs special pieces; add the vocabulary file"
        )
    tokenizer = build_tokenizer(spec.tokenizer, content, name)
    if "gpt_inputs" in more:
        return with_gpt_input_pieces(weights, tokenizer, content)
    windows = value_of(given, "model.attention_windows", (WINDOW,))
    model = long_config(spec.model, options.to_long, windows, tokenizer.pad_id, tokenizer.sep_id)
    grown = f"positions {spec.model.max_length} -> {model.max_length}"
    note = f"long model: {grown}, windows of {' '.join(map(str, windows))} tokens on each side"
    return dataclasses.replace(
        weights, spec=dataclasses.replace(spec, model=model, family=model.family),
        params=long_params(weights.params, spec.model, model), notes=(*weights.notes, note),
    )  # fmt: skip


def with_layers(weights: ModelBundle, layers: Sequence[int], option: str = "--init_layers") -> ModelBundle:
    """Return a model whose layers are ``layers`` of ``weights``, counted from 0, in this order. The heads of lower
    layers (early exit) are removed, unless these are all layers. ``option`` names the layers in messages.

    Raises ``ValueError`` for a layer that the model lacks, and for a network whose layers differ from each other in
    more than their windows.
    """
    model, count = weights.spec.model, weights.spec.model.num_layers
    given = f"{option}: {' '.join(map(str, layers))} is not allowed"
    if model.shared_layers or not model.has_attention:
        what = "whose layers are one" if model.shared_layers else f"whose encoder is {model.encoder}"
        raise ValueError(f"{given} with a model {what}; omit {option}")
    if not all(0 <= layer < count for layer in layers):
        raise ValueError(f"{given}; allowed: layers from 0 to {count - 1}")
    note = f"layers {' '.join(map(str, layers))} of {count}"
    if list(layers) == list(range(count)):
        return dataclasses.replace(weights, notes=(*weights.notes, note))
    if model.norm_position == "pre_skip_first" and [layer for layer in layers if not layer] != list(layers[:1]):
        raise ValueError(f"{given}; allowed: layer 0 first, and only there, since it has no LayerNorm before it")
    windows = tuple(model.layer_windows[layer] for layer in layers) if model.attention_windows else ()
    params = {name: array for name, array in weights.params.items() if not _LAYER.match(name)}
    params = {name: array for name, array in params.items() if not name.startswith("exit_")}
    for name, array in weights.params.items():
        if match := _LAYER.match(name):
            rest = name[match.end() :]
            params |= {
                f"encoder/layer_{new}/{rest}": array for new, old in enumerate(layers) if old == int(match[1])
            }
    heads = tuple(model.layer_heads[layer] for layer in layers) if model.layer_heads else ()
    units = tuple(model.layer_units[layer] for layer in layers) if model.layer_units else ()
    sizes = {"attention_windows": windows, "layer_heads": heads, "layer_units": units}
    smaller = dataclasses.replace(model, num_layers=len(layers), **sizes)  # type: ignore[arg-type]
    spec = dataclasses.replace(weights.spec, model=smaller, heads=dataclasses.replace(weights.spec.heads, exits=()))
    if weights.spec.heads.exits:
        exits = " ".join(map(str, weights.spec.heads.exits))
        note += f"; without the heads of layers {exits} (counted from 1), so that no prediction stops early"
    return dataclasses.replace(weights, spec=spec, params=params, notes=(*weights.notes, note))


def with_gpt_input_pieces(weights: ModelBundle, tokenizer: Tokenizer, content: bytes) -> ModelBundle:
    """Return a GPT with randomly initialized pieces that frame its inputs (Radford et al. 2018, section 3.3)."""
    if tokenizer.framed:
        frame = f"frames its texts already, with {' and '.join(tokenizer.special_pieces[2:4])}"
        raise ValueError(f"--gpt_inputs: the tokenizer {frame}; omit --gpt_inputs")
    first, spec = tokenizer.vocab_size, weights.spec
    size = max(spec.model.vocab_size, first + len(INPUT_PIECES))
    params, rng = dict(weights.params), np.random.default_rng(0)
    for name in (WORD_ROWS[0], "mlm_head/output_embeddings/embedding"):
        if name in params:
            table = np.zeros((size, params[name].shape[1]), np.float32)
            table[: len(params[name])] = params[name]
            shape = len(INPUT_PIECES), table.shape[1]
            table[first : first + len(INPUT_PIECES)] = spec.model.initializer_range * rng.standard_normal(shape)
            params[name] = table
    model = dataclasses.replace(spec.model, vocab_size=size)
    note = f"{', '.join(INPUT_PIECES)} are added to the vocabulary, randomly initialized"
    return dataclasses.replace(
        weights, spec=dataclasses.replace(spec, model=model), params=params,
        tokenizer_content=with_input_pieces(content), notes=(*weights.notes, note),
    )  # fmt: skip


def long_config(model: ModelConfig, length: int, windows: tuple[int, ...], pad_id: int, sep_id: int) -> ModelConfig:
    """Return the Longformer of ``length`` positions that ``model`` becomes.

    Raises ``ValueError`` (one line, which begins with --to_long) for a network that is not a BERT or RoBERTa, and
    for lengths or windows that do not fit.
    """
    if reason := _unconvertible(model):
        raise ValueError(f"--to_long: {reason}")
    if length <= model.max_length:
        few = f"the model has {model.max_length} positions already"
        raise ValueError(f"--to_long: {length}, but {few}; set a larger number, or omit --to_long")
    if not windows or not all(0 < 2 * window < length for window in windows):
        allowed = f"numbers above 0 and below {length // 2}, half of --to_long"
        raise ValueError(
            f"model.attention_windows: {' '.join(map(str, windows))} is not allowed; allowed: {allowed}"
        )
    offset = max(model.position_offset, pad_id + 1)
    return dataclasses.replace(
        model, family="longformer", attention_windows=windows, global_tokens=GLOBAL_TOKENS, separator_id=sep_id,
        position_offset=offset, max_position_embeddings=length + offset,
        mlm_layer="gelu" if model.mlm_activation == "gelu" else model.mlm_layer,
    )  # fmt: skip


def _unconvertible(model: ModelConfig) -> str:
    """Return why ``model`` cannot become a Longformer; "" if it can."""
    if any(model.layer_windows):
        return "the model has windows already; omit --to_long (pretraining: --extend_positions adds positions)"
    if model.position_embeddings != "learned":
        kind = model.position_embeddings
        return f"the positions of the model are {kind} and have no table; omit --to_long and set the length"
    if model.relative_positions != "none":
        return f"the model has relative positions ({model.relative_positions}); {_REMEDY}"
    if model.family_name not in CONVERTIBLE:
        return f"the model is of the family {model.family_name}; {_REMEDY}"
    if model.attention == "causal" or model.shared_layers or model.embedding_size not in (0, model.hidden_size):
        return "the model is causal, has shared layers or narrow embeddings, which a Longformer does not have"
    return ""


def long_params(params: Mapping[str, np.ndarray], source: ModelConfig, model: ModelConfig) -> dict[str, np.ndarray]:
    """Return the canonical parameters of ``model`` (:func:`long_config`), converted from the parameters of
    ``source``: position rows are repeated, and the projections of global tokens are copies of the others."""
    found, table = dict(params), "embeddings/position_embeddings/embedding"
    positions = params[table][source.position_offset :]
    before = np.zeros((model.position_offset, positions.shape[1]), positions.dtype)
    before[: source.position_offset] = params[table][: source.position_offset]
    found[table] = np.concatenate([before, positions[np.arange(model.max_length) % len(positions)]])
    return copy_projections(found)
