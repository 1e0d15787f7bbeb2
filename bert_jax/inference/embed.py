"""Compute one vector per text (Sentence-BERT; Reimers and Gurevych 2019), or one per token and layer.

Shapes: B rows, S tokens, C sequences per row, L layers, H width, E width of an embedding.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from bert_jax.batch import Batch
from bert_jax.config import ModelSpec, SentenceConfig, SentenceModule
from bert_jax.config.spec import Pooling
from bert_jax.inference.batching import BatchOptions, DeviceOutputs
from bert_jax.inference.engine import Engine, Text, checked_texts
from bert_jax.inference.predict import task_of
from bert_jax.json_values import Json
from bert_jax.model.bert import bert_output, of_layers
from bert_jax.model.canonical import Params
from bert_jax.model.layers import INTERMEDIATES
from bert_jax.model.pooling import SentenceHead
from bert_jax.model.pooling import normalize as divided_by_norm
from bert_jax.records import Record
from bert_jax.tasks.task import ModelInput

POOLINGS = ("cls", "mean", "max")
LAST_FOUR = (-1, -2, -3, -4)
# Vectors of every token and layer need much memory, so few texts are processed together.
_TOKEN_WINDOW = 32
# Two texts on one line, as in google-research/bert extract_features.py.
_PAIR = re.compile(r"^(.*) \|\|\| (.*)$", re.DOTALL)


@dataclass(frozen=True)
class VectorOptions:
    """Options of the vector of a text."""

    # cls, mean or max over the last layer, without the dense layers of the model. None: pooling and dense layers of
    # the model, or the mean if it has none.
    pooling: Pooling | None = None
    # True: divide vectors by their Euclidean norm. False: do not. None: as the model defines.
    normalize: bool | None = None
    # The first values of each vector only, divided by their norm if whole vectors are. None: all.
    width: int | None = None
    # Text to insert before every input.
    prompt: str | None = None
    # Name of a prompt of the model. None: the default prompt of the model, unless ``prompt`` is set.
    prompt_name: str | None = None
    # int8: the products of the encoder in 8 bits, by onnxruntime on the CPU. None: the dtype of the model.
    dtype: Literal["int8"] | None = None


def embed(
    loaded: Engine,
    texts: Iterable[str],
    vectors: VectorOptions = VectorOptions(),
    batches: BatchOptions = BatchOptions(),
) -> Iterator[np.ndarray]:
    """Yield the vector of every text, float32[E], in order; ``texts`` may be endless.

    Raises ``ValueError`` for an unknown pooling, prompt or dtype, for a width that the vectors do not have, for a
    model without a vocabulary, and as ``onnx_network.encoder_in_8_bits`` does for int8.
    """
    if vectors.dtype not in (None, "int8"):
        remedy = "use int8, or omit it for the dtype with which the model was loaded"
        raise ValueError(f"dtype: {vectors.dtype!r} is not allowed; {remedy}")
    sentence = sentence_config(loaded.spec, vectors.pooling, vectors.normalize)
    size = vector_width(loaded.spec, vectors.pooling, vectors.width)
    text = prompt_text(loaded.spec, vectors.prompt, vectors.prompt_name)
    skipped = 0 if sentence.include_prompt else prompt_length(loaded, text)

    of_run = loaded.spec.task is not None and loaded.spec.task.kind == "sentence"
    # Truncates texts as in the run, but at the length that the model states now.
    task = task_of(loaded, "sentence", max_length=loaded.spec.max_length) if of_run else None

    def featurize(part: list[str]) -> list[ModelInput]:
        given = [text + one for one in part]
        if task is not None:
            return task.featurize([Record(id="", source="", text=one) for one in given], training=False)
        return [ModelInput(i, (sequence,)) for i, sequence in enumerate(loaded.model_inputs(given))]

    run = _program(loaded, sentence, size, in_8_bits=vectors.dtype == "int8")
    windows = loaded.windows(checked_texts(texts), featurize, run, np.int32(skipped), batches=batches)
    return (output["vectors"] for _, _, outputs in windows for output in outputs)


def sentence_config(spec: ModelSpec, pooling: Pooling | None, normalize: bool | None) -> SentenceConfig:
    """Return the pooling and the modules that reduce token outputs to one vector. ``pooling`` and ``normalize``
    override those of the model; None: as the model defines."""
    if pooling is not None and pooling not in POOLINGS:
        raise ValueError(f"pooling: {pooling!r} is not allowed; use one of {', '.join(POOLINGS)}")
    own = spec.sentence or SentenceConfig()
    modules = own.modules if pooling is None else tuple(m for m in own.modules if m.kind == "normalize")
    if normalize is False:
        while modules and modules[-1].kind == "normalize":
            modules = modules[:-1]
    elif normalize and not (modules and modules[-1].kind == "normalize"):
        modules = (*modules, SentenceModule(kind="normalize"))
    poolings = own.pooling if pooling is None else (pooling,)
    return SentenceConfig(pooling=poolings, modules=modules, include_prompt=own.include_prompt)


def vector_width(spec: ModelSpec, pooling: Pooling | None, width: int | None = None) -> int:
    """Return E, the width of the vectors of :func:`embed`. Raises ``ValueError`` if ``width`` is not from 1
    to the width of whole vectors."""
    whole = sentence_config(spec, pooling, None).vector_width(spec.model.hidden_size)
    return whole if width is None else checked_width(width, whole)


def checked_width(width: int, whole: int) -> int:
    """Return ``width``; raise ``ValueError`` if it is not from 1 to ``whole``."""
    if not 1 <= width <= whole:
        raise ValueError(f"width: {width} is not allowed; use 1 to {whole}, the width of whole vectors")
    return width


def prompt_text(spec: ModelSpec, prompt: str | None, prompt_name: str | None) -> str:
    """Return the text to insert before every input; empty if there is no prompt."""
    if prompt is not None:
        if prompt_name is not None:
            raise ValueError("--prompt and --prompt_name: give only one of them")
        return prompt
    prompts = dict(spec.sentence.prompts) if spec.sentence is not None else {}
    name = prompt_name or (spec.sentence.default_prompt if spec.sentence is not None else "")
    if name and name not in prompts:
        raise ValueError(f"the model has no prompt {name!r}; it has: {', '.join(prompts) or 'none'}")
    return prompts.get(name, "")


def prompt_length(loaded: Engine, prompt: str) -> int:
    """Return the number of tokens of a prompt, including the special token before it. Raises ``ValueError`` if no
    room remains for a text."""
    if not prompt:
        return 0
    length = len(loaded.need_tokenizer().encode(prompt)) + 1
    if length + 1 >= loaded.spec.max_length:
        raise ValueError(
            f"the prompt has {length} tokens, but prompt and text together may have at most "
            f"{loaded.spec.max_length}; shorten the prompt"
        )
    return length


def _program(
    loaded: Engine, sentence: SentenceConfig, width: int, *, in_8_bits: bool
) -> Callable[..., DeviceOutputs]:
    pool, key = _pooled(loaded, sentence, width), ("embed", sentence, width, in_8_bits)

    def run(params: Mapping[str, Params], batch: Batch, skipped: jax.Array) -> DeviceOutputs:
        encoder = loaded.model.clone(sentence=None)
        x_BxSxH = bert_output(encoder.apply({"params": params}, batch)).sequence_output
        return pool(params, batch, skipped, x_BxSxH)

    if not in_8_bits:
        return loaded.program(key, run)
    network, pooled = loaded.encoder_in_8_bits(), loaded.program(key, pool)
    return lambda params, batch, skipped: pooled(params, batch, skipped, network(batch).sequence_output)


def _pooled(loaded: Engine, sentence: SentenceConfig, width: int) -> Callable[..., DeviceOutputs]:
    def pool(params: Mapping[str, Params], batch: Batch, skipped: jax.Array, x_BxSxH: jax.Array) -> DeviceOutputs:
        is_unit = bool(sentence.modules) and sentence.modules[-1].kind == "normalize"
        head = SentenceHead(loaded.spec.model, sentence)
        slots_C = 1 + jnp.arange(batch["cls_positions"].shape[1])
        seen_CxBxS = batch["sequence_ids"] == slots_C[:, None, None]
        seen_CxBxS &= batch["position_ids"] >= skipped
        if loaded.spec.model.encoder == "none":  # a word or special token that has no vector in the file has zeros
            known_CxBxS = seen_CxBxS & (x_BxSxH != 0).any(-1)
            seen_CxBxS = jnp.where(known_CxBxS.any(-1, keepdims=True), known_CxBxS, seen_CxBxS)
        own = {"params": params.get("sentence_head", {})}
        vectors_CxBxE = jax.vmap(lambda seen_BxS: head.apply(own, x_BxSxH, seen_BxS))(seen_CxBxS)
        assert isinstance(vectors_CxBxE, jax.Array)
        if width < vectors_CxBxE.shape[-1]:
            vectors_CxBxE = vectors_CxBxE[..., :width]
            vectors_CxBxE = divided_by_norm(vectors_CxBxE) if is_unit else vectors_CxBxE
        return {"unit": {"vectors": jnp.swapaxes(vectors_CxBxE, 0, 1)}}

    return pool


# ------------------------------------------------------------------ every token


def embed_tokens(
    loaded: Engine,
    texts: Iterable[Text],
    *,
    layers: Sequence[int] = LAST_FOUR,
    batches: BatchOptions = BatchOptions(),
) -> Iterator[tuple[list[str], np.ndarray]]:
    """Yield (pieces, float32[layers, tokens, H]) for every text, including special tokens.

    ``layers`` are indices of encoder layers, from 0; negative indices count from the last layer (-1), as in
    ``extract_features.py`` of google-research/bert. Raises ``ValueError`` for a layer that does not exist.
    """
    count = loaded.spec.model.num_layers
    if not count:
        raise ValueError(f"{loaded.name}: word vectors have no layers; compute one vector per text")
    loaded.spec.model.require_equal_widths()
    wrong = [str(layer) for layer in layers if not -count <= layer < count]
    if wrong or not layers:
        raise ValueError(f"layers: {', '.join(wrong) or 'none'} is not allowed; use {-count} to {count - 1}")
    chosen = tuple(layer % count for layer in layers)
    tokenizer = loaded.need_tokenizer()

    def run(params: Params, batch: dict[str, jax.Array]) -> DeviceOutputs:
        encoder = loaded.model.clone(sentence=None)
        _, state = encoder.apply({"params": params}, batch, mutable=[INTERMEDIATES])
        seen = of_layers(state[INTERMEDIATES].get("encoder", {}), loaded.spec.model, "hidden_states")
        hidden_BxSxLxH = jnp.stack([seen[i] for i in chosen], axis=2)
        return {"token": {"hidden": hidden_BxSxLxH.astype(jnp.float32)}}

    def featurize(part: list[Text]) -> list[ModelInput]:
        return [ModelInput(i, (sequence,)) for i, sequence in enumerate(loaded.model_inputs(part))]

    windows = loaded.windows(
        checked_texts(texts, pairs=True), featurize, loaded.program(("tokens", chosen), run),
        window=_TOKEN_WINDOW, batches=batches,
    )  # fmt: skip
    return (
        (tokenizer.pieces(unit.sequences[0].ids), output["hidden"].swapaxes(0, 1))
        for _, units, outputs in windows
        for unit, output in zip(units, outputs, strict=True)
    )


def extract_features(
    loaded: Engine,
    lines: Iterable[str],
    *,
    layers: Sequence[int] = LAST_FOUR,
    batches: BatchOptions = BatchOptions(),
) -> Iterator[dict[str, Json]]:
    """Yield one object per line with the fields of ``extract_features.py`` of google-research/bert: linex_index and
    features, each with token and layers (index, values rounded to 6 places). `` ||| `` separates the texts of a
    pair."""
    pairs = ((match[1], match[2]) if (match := _PAIR.match(line)) else line for line in lines)
    for number, (pieces, hidden) in enumerate(embed_tokens(loaded, pairs, layers=layers, batches=batches)):
        rounded = np.round(hidden.astype(np.float64), 6)
        yield {
            "linex_index": number,
            "features": [
                {
                    "token": piece,
                    "layers": [
                        {"index": layer, "values": rounded[i, token].tolist()} for i, layer in enumerate(layers)
                    ],
                }
                for token, piece in enumerate(pieces)
            ],
        }
