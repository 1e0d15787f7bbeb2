"""Description of Hugging Face folders of one family: classes, keys of ``config.json``, names of tensors.

A family is one file in ``families``: a :class:`Family`, which the reader and the writer of folders both use.
"""

import dataclasses
import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from bert_jax.config import ModelConfig, ModelSpec
from bert_jax.interop.stored_model import Tensor
from bert_jax.json_values import Json


def name_set(text: str) -> frozenset[str]:
    """Return the names in ``text``, which are separated by white space."""
    return frozenset(text.split())


# Activation -> its names in transformers; the writer uses the first one.
ACTIVATION_NAMES = {
    "gelu": ("gelu", "gelu_python"),
    "gelu_tanh": ("gelu_new", "gelu_pytorch_tanh", "gelu_python_tanh", "gelu_fast", "gelu_accurate"),
    "gelu_sigmoid": ("quick_gelu",),
    "relu": ("relu",),
    "silu": ("silu", "swish"),
}
ACTIVATIONS: dict[str, Any] = {name: ours for ours, names in ACTIVATION_NAMES.items() for name in names}
# Heads whose classes exist for most encoders: suffix of the class -> heads.
HEADED = {
    "Model": ("pooler",),
    "ForMaskedLM": ("mlm",),
    "ForSequenceClassification": ("pooler", "sequence"),
    "ForTokenClassification": ("token",),
    "ForQuestionAnswering": ("span",),
    "ForMultipleChoice": ("pooler", "choice"),
}
# Task heads that may have their own dropout rate.
TASK_HEADS = ("sequence", "token", "choice")
# Keys of every config class that have no effect on the outputs of an encoder.
HARMLESS = name_set(
    """_name_or_path name_or_path architectures model_type transformers_version _commit_hash torch_dtype
        dtype output_hidden_states output_attentions output_scores return_dict
        return_dict_in_generate torchscript use_cache use_bfloat16 tf_legacy_loss
        chunk_size_feed_forward id2label label2id num_labels _num_labels problem_type
        task_specific_params finetuning_task tokenizer_class prefix bos_token_id eos_token_id
        pad_token_id sep_token_id cls_token_id mask_token_id unk_token_id decoder_start_token_id
        forced_bos_token_id forced_eos_token_id max_length min_length do_sample early_stopping
        num_beams num_beam_groups diversity_penalty temperature top_k top_p typical_p
        repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size
        bad_words_ids num_return_sequences remove_invalid_values exponential_decay_length_penalty
        suppress_tokens begin_suppress_tokens tie_encoder_decoder cross_attention_hidden_size
        gradient_checkpointing attn_implementation _attn_implementation _attn_implementation_autoset
        output_past language name vocab_file directionality pooler_fc_size
        pooler_num_attention_heads pooler_num_fc_layers pooler_size_per_head pooler_type
        classifier_dropout tie_word_embeddings use_return_dict initializer_range
        sentence_transformers sbert_ce_default_activation_function
        generator_size is_composition keys_to_ignore_at_inference total_flos max_seq_length
        do_lower_case"""
)
# Most layers of a model with pruned_heads.
_MOST_PRUNED = 1024
# Key -> values that every family supports. A model with any other value computes a different function.
REFUSED: dict[str, tuple[Json, ...]] = {
    "is_decoder": (False, None),
    "add_cross_attention": (False, None),
    "is_encoder_decoder": (False, None),
    "pruned_heads": ({}, [], None),
    "quantization_config": (None, {}),
    "auto_map": (None, {}),
}


class Key(NamedTuple):
    """A key of ``config.json`` and the field of ``ModelConfig`` with the same meaning."""

    field: str
    kind: Literal["integer", "number", "flag", "activation"]
    # Default of the config class; None: the key must be present.
    default: Json = None
    # Add a note if the key is absent.
    announced: bool = False


class HeadDropout(NamedTuple):
    """The dropout before a task head in ``config.json``."""

    # Empty: no key, the family always has the default rate.
    key: str
    # Rate if the key is missing or null; None: the encoder's.
    default: float | None = None


class Place(NamedTuple):
    """The part of a stored tensor that contains a module's kernel or bias.

    The output features of the stored tensor are ``groups`` equal groups of ``parts`` equal parts; the module is the
    part ``part`` of every group. A group is a head, or all heads (``groups`` 1).
    """

    module: str
    part: int = 0
    parts: int = 1
    # Groups are heads.
    per_head: bool = False
    # Rotary positions rotate the dimensions 2i and 2i + 1 of a head, not i and i + D / 2.
    interleaved: bool = False
    # The kernel is stored as [in, out].
    input_first: bool = False


def no_fields(config: Mapping[str, Json], name: str) -> dict[str, Json]:
    """Return no fields: ``config`` has no keys besides ``Family.keys``."""
    return {}


@dataclass(frozen=True, kw_only=True)
class Family:
    """A family of encoders in Hugging Face folders."""

    # ``model_type``, and the name of the family in messages.
    name: str
    title: str
    # Class of transformers -> heads.
    classes: Mapping[str, tuple[str, ...]]
    # Prefix of the encoder's tensors in classes with a head; the bare encoder has none.
    prefix: str
    keys: Mapping[str, Key]
    # Fields of ModelConfig with one value in this family.
    fixed: Mapping[str, Any] = field(default_factory=dict)
    # Further keys: those that ``read`` reads and ``write`` writes.
    other_keys: frozenset[str] = frozenset()
    # transformers 4 removes the attention heads that ``pruned_heads`` lists.
    prunes: bool = False
    # Fields from the other keys; raises ``ValueError`` with a message that begins with ``name``.
    read: Callable[[Mapping[str, Any], str], dict[str, Any]] = no_fields
    # The other keys from a model.
    write: Callable[[ModelConfig], dict[str, Any]] = lambda model: {}
    # Keys without an effect on outputs, besides HARMLESS; and keys with the values that are supported.
    harmless: frozenset[str] = frozenset()
    refused: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    # Canonical module -> stored module, of the encoder and ("layer_{i}", "{i}") of its layers, without the prefix.
    encoder: Mapping[str, str | Place]
    layers: Mapping[str, str | Place]
    # Stored prefix of layer {i}.
    layer: str
    # Head -> modules; "{prefix}" is the prefix of the encoder. A head may redefine the pooler.
    heads: Mapping[str, Mapping[str, str | Place]]
    # Output with several heads, as in ``serving.FIELDS`` -> its name in the family.
    outputs: Mapping[str, str] = field(default_factory=dict)
    # Tied tensors: name of the copy -> canonical parameter that equals it.
    tied: Mapping[str, str] = field(default_factory=dict)
    # Field of ModelConfig -> (stored tensor without prefix, dimension, factor) from which its value follows.
    sizes: Mapping[str, tuple[str, int, int]] = field(default_factory=dict)
    # Classes of the authors' own code -> the class of transformers with the same function and heads.
    aliases: Mapping[str, str] = field(default_factory=dict)
    # Changes to a stored name before it is used.
    rename: Callable[[str], str] = lambda name: name
    # Changes to the stored tensors, by name, after ``rename``.
    convert: Callable[[Mapping[str, Tensor]], dict[str, Tensor]] = dict
    # Beginnings of the names of tensors that are omitted, with a note, unless a parameter has the name.
    omitted: tuple[str, ...] = ()
    # Task head -> the dropout before it; other heads have the dropout of the encoder.
    dropouts: Mapping[str, HeadDropout] = field(
        default_factory=lambda: dict.fromkeys(TASK_HEADS, HeadDropout("classifier_dropout"))
    )
    # Classes with a pooler of which no output depends: it is left out with a note, and written as zeros.
    idle_pooler: frozenset[str] = frozenset()
    # Repository of the authors' code, where transformers has no such family.
    code: str = ""
    # Prefix of the names of classes.
    class_prefix: str = ""

    def class_of(self, spec: ModelSpec) -> str:
        """Return the class that has the heads of ``spec``; the pooler is ignored. Raises ``ValueError`` if there is
        none."""
        heads = set(spec.heads.present()) - {"pooler"}
        for name, held in self.classes.items():
            if set(held) - {"pooler"} == heads:
                return name
        wanted, known = ", ".join(spec.heads.present()), ", ".join(self.classes)
        raise ValueError(f"no {self.title} class of transformers has exactly the heads {wanted}; known: {known}")


def headed(
    prefix: str, *more: tuple[str, tuple[str, ...]], without: tuple[str, ...] = ()
) -> dict[str, tuple[str, ...]]:
    """Return the classes whose names begin with ``prefix``: those of HEADED except ``without``, then ``more``."""
    names = {suffix: heads for suffix, heads in (*HEADED.items(), *more) if suffix not in without}
    return {f"{prefix}{suffix}": heads for suffix, heads in names.items()}


def short(value: Any) -> str:
    """Return ``value`` as JSON of at most 60 characters."""
    text = json.dumps(value, ensure_ascii=True)
    return text if len(text) <= 60 else f"{text[:57]}..."


def integer(config: Mapping[str, Json], key: str, name: str, default: Json = None) -> int:
    """Return the whole number ``key`` of ``config``. Raises ``ValueError`` for another type or a huge number."""
    value = config.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"{name}: {key} is {short(value)}, not a whole number")
    if not -(1 << 31) <= value < 1 << 31:
        raise ValueError(f"{name}: {key} is {short(value)}; allowed: {-(1 << 31)} to {(1 << 31) - 1}")
    return value


def number(config: Mapping[str, Json], key: str, name: str, default: Json = None) -> float:
    """Return the number ``key`` of ``config``. Raises ``ValueError`` for another type."""
    value = config.get(key, default)
    if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) < 1e30:
        raise ValueError(f"{name}: {key} is {short(value)}, not a number")
    return float(value)


def flag(config: Mapping[str, Json], key: str, name: str, default: Json = None) -> bool:
    """Return the boolean ``key`` of ``config``. Raises ``ValueError`` for another type."""
    value = config.get(key, default)
    if not isinstance(value, bool):
        raise ValueError(f"{name}: {key} is {short(value)}; allowed: true, false")
    return value


def activation(config: Mapping[str, Any], key: str, name: str, default: Any = None) -> str:
    """Return the activation function that ``key`` of ``config`` names. Raises ``ValueError`` for an unknown one."""
    value = config.get(key, default)
    if not isinstance(value, str) or value not in ACTIVATIONS:
        raise ValueError(f"{name}: {key} is {short(value)}; allowed: {', '.join(ACTIVATIONS)}")
    found: str = ACTIVATIONS[value]
    return found


def choice(config: Mapping[str, Json], key: str, name: str, default: str, allowed: Collection[str]) -> str:
    """Return the name ``key`` of ``config``. Raises ``ValueError`` if it is not one of ``allowed``."""
    value = config.get(key, default)
    if not isinstance(value, str) or value not in allowed:
        raise ValueError(f"{name}: {key} is {short(value)}; allowed: {', '.join(allowed)}")
    return value


def with_pruned_heads(model: ModelConfig, config: Mapping[str, Any], name: str) -> ModelConfig:
    """Return ``model`` without the attention heads that ``pruned_heads`` of ``config`` lists by layer. Raises
    ``ValueError`` for a list that does not fit the model."""
    table, most = config.get("pruned_heads") or {}, model.num_attention_heads
    layers = min(model.num_layers, _MOST_PRUNED)  # a file may declare any size
    problem = f"{name}: pruned_heads is {short(table)}; allowed: a map from layers (0 to {layers - 1}) to heads"
    left = {}
    for layer, heads in table.items() if isinstance(table, dict) else [("", None)]:
        pruned = {*heads} if isinstance(heads, list) and all(type(head) is int for head in heads) else {most}
        if not (
            layer in map(str, range(layers)) and len(pruned) < most and all(0 <= head < most for head in pruned)
        ):
            raise ValueError(f"{problem} (0 to {most - 1}), one or more of which is left")
        left[int(layer)] = most - len(pruned)
    if not left:
        return model
    if model.num_layers > layers:
        raise ValueError(f"{name}: pruned_heads: the model has {model.num_layers} layers; allowed: up to {layers}")
    return dataclasses.replace(model, layer_heads=tuple(left.get(i, most) for i in range(model.num_layers)))


def pruned_heads(model: ModelConfig) -> dict[str, Json]:
    """Return the key ``pruned_heads`` of a model, {} if it has all heads. Tensors hold the heads that are left, and
    only the number of the others matters."""
    most = model.num_attention_heads
    table = {str(layer): [*range(left, most)] for layer, left in enumerate(model.heads_by_layer) if left < most}
    return {"pruned_heads": table} if table else {}


def check_head_size(config: Mapping[str, Json], key: str, name: str, width: int, heads: int) -> None:
    """Raise ``ValueError`` if ``key`` of ``config`` is not ``width / heads``; null and no such key are allowed."""
    if config.get(key) is not None and integer(config, key, name) * heads != width:
        quotient = f", {width / heads:g}" if heads else ""
        problem = f"{name}: {key} is {short(config[key])}"
        raise ValueError(f"{problem}; supported: hidden_size / num_attention_heads{quotient}")


def check_code(config: Mapping[str, Json], name: str, prefix: str) -> None:
    """Raise ``ValueError`` if ``auto_map`` of ``config`` names classes that do not begin with ``prefix``: they may
    compute another function. The code that it names is never run."""
    stated = config.get("auto_map") or {}
    values = stated.values() if isinstance(stated, dict) else [stated]
    for part in [part for value in values for part in (value if isinstance(value, list) else [value])]:
        if not isinstance(part, str) or not part.rpartition(".")[2].startswith(prefix):
            raise ValueError(
                f"{name}: auto_map names {short(part)}; supported: classes whose names begin with {prefix}"
            )


READ: dict[str, Callable[..., Any]] = {
    "integer": integer, "number": number, "flag": flag, "activation": activation,
}  # fmt: skip
