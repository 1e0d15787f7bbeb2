"""Description of Hugging Face folders of one family: classes, keys of ``config.json``, names of tensors.

A family is one file in ``families``: a :class:`Family`, which the reader and the writer of folders both use.
"""

import dataclasses
import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from bert_jax.config import ModelConfig, ModelSpec
from bert_jax.config.architecture import Biased
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
ACTIVATIONS = {name: ours for ours, names in ACTIVATION_NAMES.items() for name in names}
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
    """A key of ``config.json`` and the field of ``ModelConfig`` with the same meaning and type."""

    field: str
    # Default of the config class; None: the key must be present.
    default: Json = None
    # Add a note if the key is absent.
    announced: bool = False
    # With the field without_bias: the part of the network that has a bias if the key is true.
    part: Biased | None = None


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


class Values(NamedTuple):
    """The content of a ``config.json``. Every method raises ``ValueError``, with a message that begins with
    ``name``, for a value of another type or that is not allowed."""

    config: Mapping[str, Json]
    name: str

    def wrong(self, key: str, rule: str, default: Json = None) -> ValueError:
        """Return the error for the value of ``key``; ``rule`` states the allowed values."""
        return ValueError(f"{self.name}: {key} is {short(self.config.get(key, default))}{rule}")

    def integer(self, key: str, default: Json = None) -> int:
        """Return the whole number ``key``, at most 32 bits long."""
        value = self.config.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool):
            raise self.wrong(key, ", not a whole number")
        if not -(1 << 31) <= value < 1 << 31:
            raise self.wrong(key, f"; allowed: {-(1 << 31)} to {(1 << 31) - 1}")
        return value

    def number(self, key: str, default: Json = None) -> float:
        """Return the number ``key``."""
        value = self.config.get(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) < 1e30:
            raise self.wrong(key, ", not a number")
        return float(value)

    def flag(self, key: str, default: Json = None) -> bool:
        """Return the boolean ``key``."""
        value = self.config.get(key, default)
        if not isinstance(value, bool):
            raise self.wrong(key, "; allowed: true, false")
        return value

    def choice(self, key: str, default: Json, allowed: Collection[str]) -> str:
        """Return the name ``key``, which must be one of ``allowed``."""
        value = self.config.get(key, default)
        if not isinstance(value, str) or value not in allowed:
            raise self.wrong(key, f"; allowed: {', '.join(allowed)}")
        return value

    def activation(self, key: str, default: Json = None) -> str:
        """Return our name of the activation function that ``key`` names."""
        return ACTIVATIONS[self.choice(key, default, ACTIVATIONS)]

    def of_type(self, kind: type, key: str, default: Json) -> Json:
        """Return the value of ``key`` for a field of the type ``kind``; a string is the name of an activation."""
        if kind is float:
            return self.number(key, default)
        if kind is int:
            return self.integer(key, default)
        return self.flag(key, default) if kind is bool else self.activation(key, default)

    def require(self, key: str, supported: Sequence[Json], default: Json = None) -> None:
        """Check that the value of ``key`` is one of ``supported``."""
        if self.config.get(key, default) not in supported:
            values = [short(value) for value in supported if value not in (None, {}, [])]
            allowed = ", ".join(dict.fromkeys(values)) or "folders without it"
            raise self.wrong(key, f"; supported: {allowed}", default)

    def check_head_size(self, key: str, width: int, heads: int) -> None:
        """Check that ``key`` is ``width / heads``; null and no such key are allowed."""
        if self.config.get(key) is not None and self.integer(key) * heads != width:
            quotient = f", {width / heads:g}" if heads else ""
            raise self.wrong(key, f"; supported: hidden_size / num_attention_heads{quotient}")

    def check_code(self, prefix: str) -> None:
        """Check that all classes in ``auto_map`` begin with ``prefix``: others may compute another function. The
        code that it names is never run."""
        stated = self.config.get("auto_map") or {}
        values = stated.values() if isinstance(stated, dict) else [stated]
        for part in [part for value in values for part in (value if isinstance(value, list) else [value])]:
            if not isinstance(part, str) or not part.rpartition(".")[2].startswith(prefix):
                rule = f"supported: classes whose names begin with {prefix}"
                raise ValueError(f"{self.name}: auto_map names {short(part)}; {rule}")


# Field of ModelConfig -> canonical kernel ([in, out]) or table and its dimension from which the value follows.
SIZE_SOURCES = {
    "vocab_size": ("embeddings/word_embeddings/embedding", 0),
    "max_position_embeddings": ("embeddings/position_embeddings/embedding", 0),
    "type_vocab_size": ("embeddings/token_type_embeddings/embedding", 0),
    "embedding_size": ("embeddings/projection/kernel", 0),
    "relative_buckets": ("encoder/relative_embeddings/embedding", 0),
    "intermediate_size": ("encoder/layer_0/feed_forward/output/kernel", 0),
    "hidden_size": ("encoder/layer_0/feed_forward/output/kernel", 1),
}


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
    fixed: Mapping[str, Json] = field(default_factory=dict)
    # Further keys: those that ``read`` reads and ``write`` writes.
    other_keys: frozenset[str] = frozenset()
    # transformers 4 removes the attention heads that ``pruned_heads`` lists.
    prunes: bool = False
    # Fields from the other keys; raises ``ValueError`` as ``Values`` does.
    read: Callable[[Values], dict[str, Json]] = lambda values: {}
    # The other keys from a model.
    write: Callable[[ModelConfig], dict[str, Json]] = lambda model: {}
    # Keys without an effect on outputs, in addition to HARMLESS; and keys with the values that are supported.
    harmless: frozenset[str] = frozenset()
    refused: Mapping[str, tuple[Json, ...]] = field(default_factory=dict)
    # Canonical module -> stored module, of the encoder and ("layer_{i}", "{i}") of its layers, without the prefix.
    encoder: Mapping[str, str | Place]
    layers: Mapping[str, str | Place]
    # Stored prefix of layer {i}.
    layer: str = "encoder.layer.{i}."
    # Head -> modules; "{prefix}" is the prefix of the encoder. A head may redefine the pooler.
    heads: Mapping[str, Mapping[str, str]]
    # Output with several heads, as in ``serving.FIELDS`` -> its name in the family.
    outputs: Mapping[str, str] = field(default_factory=dict)
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
    # Classes with a pooler on which no output depends: it is ignored with a note, and written as zeros.
    idle_pooler: frozenset[str] = frozenset()
    # Repository of the authors' code, where transformers has no such family.
    code: str = ""

    def class_of(self, spec: ModelSpec) -> str:
        """Return the class that has the heads of ``spec``; the pooler is ignored. Raises ``ValueError`` if there is
        none."""
        heads = set(spec.heads.present()) - {"pooler"}
        for name, held in self.classes.items():
            if set(held) - {"pooler"} == heads:
                return name
        wanted, known = ", ".join(spec.heads.present()), ", ".join(self.classes)
        raise ValueError(f"no {self.title} class of transformers has exactly the heads {wanted}; known: {known}")

    def output_layer(self, head: str) -> str:
        """Return the stored name of the output layer of ``head``, the last of its modules whose name ends in
        _head."""
        return [place for name, place in self.heads[head].items() if name.endswith("_head")][-1]

    @property
    def tied(self) -> dict[str, str]:
        """Name of each tensor that is a copy of another one -> canonical name of that parameter."""
        modules = self.heads.get("mlm", {})
        copy = modules.get("mlm_head/output_embeddings")
        tied = {f"{copy}.weight": "embeddings/word_embeddings/embedding", f"{copy}.bias": "mlm_head/output_bias"}
        return {name: ours for name, ours in tied.items() if copy and f"{modules['mlm_head']}.bias" != name}

    def places(self, prefix: str, layers: int, heads: Iterable[str] = ()) -> dict[str, Place]:
        """Return a dict from canonical to stored modules: of the encoder, whose stored names begin with ``prefix``,
        of its first ``layers`` layers, and of the pooler and the ``heads``."""
        places = {ours: as_place(place, prefix) for ours, place in self.encoder.items()}
        for i in range(layers):
            inner = prefix + self.layer.format(i=i)
            places |= {f"encoder/layer_{i}/{ours}": as_place(place, inner) for ours, place in self.layers.items()}
        for head in ("pooler", *heads):
            modules = self.heads.get(head, {})
            places |= {ours: Place(module.format(prefix=prefix)) for ours, module in modules.items()}
        return places

    def sizes(self, prefix: str) -> dict[str, tuple[str, int]]:
        """Return a dict from each field of ``SIZE_SOURCES`` to the stored tensor and its dimension."""
        places, sizes = self.places(prefix, 1), {}
        for name, (parameter, dimension) in SIZE_SOURCES.items():
            module, _, leaf = parameter.rpartition("/")
            if place := places.get(module):
                is_transposed = leaf == "kernel" and not place.input_first
                sizes[name] = f"{place.module}.weight", 1 - dimension if is_transposed else dimension
        return sizes


def activation_name(ours: str) -> str:
    """Return the name of the activation ``ours`` in files; a name unknown to transformers is returned unchanged."""
    return ACTIVATION_NAMES.get(ours, (ours,))[0]


def as_place(place: str | Place, prefix: str) -> Place:
    """Return ``place``; for a string, the place of the whole stored module named ``prefix + place``."""
    place = Place(place) if isinstance(place, str) else place
    return place._replace(module=prefix + place.module)


def headed(prefix: str, *more: tuple[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    """Return the classes whose names begin with ``prefix``: those of HEADED, then ``more``."""
    return {f"{prefix}{suffix}": heads for suffix, heads in (HEADED | dict(more)).items()}


def with_pruned_heads(model: ModelConfig, values: Values) -> ModelConfig:
    """Return ``model`` without the attention heads that ``pruned_heads`` lists by layer. Raises ``ValueError`` for
    a list that does not fit the model."""
    table, most = values.config.get("pruned_heads") or {}, model.num_attention_heads
    layers = min(model.num_layers, _MOST_PRUNED)  # a file may declare any size
    left = {}
    for layer, heads in table.items() if isinstance(table, dict) else [("", None)]:
        pruned = {*heads} if isinstance(heads, list) and all(type(head) is int for head in heads) else {most}
        if not (
            layer in map(str, range(layers)) and len(pruned) < most and all(0 <= head < most for head in pruned)
        ):
            rule = f"a map from layers (0 to {layers - 1}) to heads (0 to {most - 1}), one or more of which is left"
            raise values.wrong("pruned_heads", f"; allowed: {rule}")
        left[int(layer)] = most - len(pruned)
    if not left:
        return model
    if model.num_layers > layers:
        problem = f"pruned_heads: the model has {model.num_layers} layers; at most {layers} are supported"
        raise ValueError(f"{values.name}: {problem}")
    return dataclasses.replace(model, layer_heads=tuple(left.get(i, most) for i in range(model.num_layers)))


def pruned_heads(model: ModelConfig) -> dict[str, Json]:
    """Return the key ``pruned_heads`` of a model, {} if it has all heads. Tensors hold the heads that are left, and
    only the number of the others matters."""
    most = model.num_attention_heads
    table = {str(layer): [*range(left, most)] for layer, left in enumerate(model.heads_by_layer) if left < most}
    return {"pruned_heads": table} if table else {}


def short(value: object) -> str:
    """Return ``value`` as JSON of at most 60 characters."""
    text = json.dumps(value, ensure_ascii=True)
    return text if len(text) <= 60 else f"{text[:57]}..."
