"""Contextual vectors of words at any layer. A word has the mean, or the first, of the vectors of its pieces.

Shapes: B rows, S tokens, P pieces, W words, N layers, H width. Layer 0 is the output of the embeddings, layer i is
the output of layer i of the network, and -1 is the last layer (:attr:`BertOutput.hidden_states`, before the final
norm of a pre-LN network).
"""

import itertools
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np

from bert_jax.batch import Batch
from bert_jax.inference.batching import BatchOptions, DeviceOutputs, Outputs
from bert_jax.inference.engine import Engine, Input, checked_texts
from bert_jax.json_values import Json
from bert_jax.model.bert import bert_output, present
from bert_jax.model.canonical import Params
from bert_jax.tasks.task import ModelInput
from bert_jax.tasks.word_windows import Span, encode_words, owners, window_spans
from bert_jax.tokenization import Tokenizer
from bert_jax.tokenization.wordpiece import is_cjk

WordPooling = Literal["mean", "first"]
WORD_POOLINGS: tuple[WordPooling, ...] = get_args(WordPooling)
# Texts that are processed together: vectors of all tokens and layers need much memory.
_WINDOW = 32


class WordPieces(NamedTuple):
    """The pieces of a text and the words that they belong to.

    Word i consists of the pieces ``first[i]`` to ``last[i]`` - 1. Pieces between words belong to no word, and words
    share a piece that spans several of them.
    """

    ids: np.ndarray  # int64[P], without special tokens
    first: np.ndarray  # int64[W]
    last: np.ndarray  # int64[W]
    spans: list[Span]  # character range of each word; empty for words without a text


class WordVectors(NamedTuple):
    """The words of a text, as character ranges, and their vectors float32[N, W, H]."""

    spans: list[Span]
    vectors: np.ndarray


class WordInput(NamedTuple):
    """The pieces of a model input, without special tokens, and the W words that it scores: of each, the index, and
    the positions of its first token and after its last token in the model input."""

    pieces: list[int]
    words: np.ndarray  # int64[W]
    first: np.ndarray  # int64[W]
    last: np.ndarray  # int64[W]


# ------------------------------------------------------------------ words of a text


def word_spans(text: str) -> list[Span]:
    """Return the character range of every word of ``text``: a run of letters, digits, combining marks and
    underscores, a single CJK character, or any other single character that is not white space."""
    spans = []
    position = 0
    for kind, run in itertools.groupby(text, _kind):
        length = len(list(run))
        if kind == "word":
            spans.append((position, position + length))
        elif kind == "single":
            spans += [(position + i, position + i + 1) for i in range(length)]
        position += length
    return spans


def _kind(char: str) -> str:
    if char.isspace():
        return "space"
    return "word" if (unicodedata.category(char)[0] in "LMN" or char == "_") and not is_cjk(char) else "single"


def pieces_of_text(text: str, tokenizer: Tokenizer, room: int) -> WordPieces:
    """Return the pieces of ``text`` and its words (:func:`word_spans`). Words without pieces, such as control
    characters, are omitted. Of a word and the white space after it, at most ``room`` pieces are kept."""
    ids, offsets = tokenizer.encode_with_offsets(text)
    spans = np.array(word_spans(text), np.int64).reshape(-1, 2)
    ranges = np.array(offsets, np.int64).reshape(-1, 2)
    first = np.searchsorted(ranges[:, 1], spans[:, 0], "right")
    last = np.searchsorted(ranges[:, 0], spans[:, 1], "left")
    own = last > first
    first, last, spans = first[own], last[own], spans[own]
    if not len(first):
        return WordPieces(np.zeros(0, np.int64), first, last, [])
    starts = _starts(first, len(ids))
    age = np.arange(len(ids)) - np.repeat(starts[:-1], np.diff(starts))
    kept = np.concatenate([[0], np.cumsum(age < room)])
    return WordPieces(
        np.array(ids, np.int64)[age < room],
        kept[first],
        kept[last],
        [(begin, end) for begin, end in spans.tolist()],
    )


def pieces_of_words(
    sentences: Sequence[Sequence[str]], tokenizer: Tokenizer, room: int, lead: Sequence[int] = ()
) -> list[WordPieces]:
    """Return the pieces of each sentence, whose words are encoded separately, as in the tagging tasks. The pieces
    ``lead`` precede every sentence."""
    encoded = encode_words((word for words in sentences for word in words), tokenizer, room - len(lead))
    pieces = []
    for words in sentences:
        ids = [lead, *(encoded[word] for word in words)]
        starts = np.cumsum([*map(len, ids)])
        flat = np.fromiter(itertools.chain.from_iterable(ids), np.int64, int(starts[-1]))
        pieces.append(WordPieces(flat, starts[:-1], starts[1:], []))
    return pieces


def _starts(first: np.ndarray, count: int) -> np.ndarray:
    """Return int64[W + 1], the boundaries between words: pieces before the first word belong to it, pieces after a
    word belong to it."""
    starts = np.append(first, count)
    starts[0] = 0
    return starts


def word_inputs(pieces: WordPieces, tokenizer: Tokenizer, max_length: int) -> list[WordInput]:
    """Return the model inputs of a text: one if it fits into ``max_length`` tokens, otherwise windows that overlap
    by half. Each word is in the model input in which it has the most context."""
    count = len(pieces.first)
    if not count:
        return []
    room = max_length - len(tokenizer.build_inputs([])[0])
    starts = _starts(pieces.first, len(pieces.ids))
    spans = window_spans(starts, (0, count), room)
    owner = owners(starts, spans, (0, count))
    inputs = []
    for number, (begin, end) in enumerate(spans):
        words = np.flatnonzero(owner == number)
        if len(words):
            low, high = int(starts[begin]), int(starts[end])
            shift = tokenizer.framed - low
            last = np.minimum(pieces.last[words], high) + shift
            inputs.append(WordInput(pieces.ids[low:high].tolist(), words, pieces.first[words] + shift, last))
    return inputs


# ------------------------------------------------------------------ vectors


def hidden_layers(loaded: Engine) -> int:
    """Return the number of layers that have vectors, counting the embeddings: 1 + the layers of the network."""
    shape = jax.ShapeDtypeStruct((1, 8), jnp.int32)
    names = ("input_ids", "token_type_ids", "sequence_ids", "position_ids")
    batch = dict.fromkeys(names, shape) | {"cls_positions": jax.ShapeDtypeStruct((1, 1), jnp.int32)}
    return int(jax.eval_shape(_hidden(loaded), loaded.params, batch).shape[0])


def checked_layers(loaded: Engine, layers: Sequence[int]) -> tuple[int, ...]:
    """Return ``layers`` as indices from 0. Raises ``ValueError`` for a layer that does not exist."""
    count = hidden_layers(loaded)
    wrong = [str(layer) for layer in layers if not -count <= layer < count]
    if wrong or not layers:
        raise ValueError(
            f"layer {', '.join(wrong) or '(none)'} is not allowed; use {-count} to {count - 1} (0: the "
            "embeddings, -1: the last layer)"
        )
    return tuple(layer % count for layer in layers)


def word_vectors(
    loaded: Engine,
    texts: Iterable[str],
    *,
    layers: Sequence[int] = (-1,),
    pooling: WordPooling = "mean",
    batches: BatchOptions = BatchOptions(),
) -> Iterator[WordVectors]:
    """Yield the words of every text (:func:`word_spans`) with their contextual vectors; ``texts`` may be endless.

    The text is tokenized as a whole. A text that exceeds the maximum length is read in windows.

    Args:
        layers: layers to read, 0 for the embeddings; negative indices count from the last layer.
        pooling: mean: mean over the pieces of a word. first: vector of its first piece (Devlin et al. 2018, 5.3).
        batches: see ``BatchOptions``.

    Raises ``ValueError`` for a layer that does not exist, and for a model without a vocabulary.
    """
    tokenizer = loaded.need_tokenizer()

    def pieces_of(part: Sequence[str]) -> list[WordPieces]:
        return [pieces_of_text(text, tokenizer, _room(loaded)) for text in part]

    found = _read_words(loaded, checked_texts(texts), pieces_of, layers, pooling, _WINDOW, batches)
    return (WordVectors(one.spans, vectors) for one, vectors in found)


def word_lines(
    loaded: Engine,
    texts: Iterable[str],
    *,
    layers: Sequence[int],
    pooling: WordPooling,
    batches: BatchOptions = BatchOptions(),
) -> Iterator[dict[str, Json]]:
    """Yield one object per text: ``{"words": [{"word", "start", "end", "layers": [{"index", "values"}]}]}``, with
    values rounded to 6 places. Arguments as in :func:`word_vectors`."""
    first, second = itertools.tee(texts)
    found = word_vectors(loaded, second, layers=layers, pooling=pooling, batches=batches)
    for text, (spans, vectors) in zip(first, found, strict=True):
        rounded = np.round(vectors.astype(np.float64), 6)
        yield {
            "words": [
                {
                    "word": text[start:end], "start": start, "end": end,
                    "layers": [
                        {"index": layer, "values": rounded[i, word].tolist()} for i, layer in enumerate(layers)
                    ],
                }
                for word, (start, end) in enumerate(spans)
            ]
        }  # fmt: skip


def sentence_word_vectors(
    loaded: Engine,
    sentences: Iterable[Sequence[str]],
    *,
    layers: Sequence[int] = (-1,),
    pooling: WordPooling = "mean",
    lead: Sequence[int] = (),
    window: int = _WINDOW,
    batches: BatchOptions = BatchOptions(),
) -> Iterator[np.ndarray]:
    """Yield float32[N, W, H] for every sentence of W words, which are encoded separately; arguments as in
    :func:`word_vectors`. The pieces ``lead`` precede every sentence. ``window`` sentences are processed
    together."""
    tokenizer = loaded.need_tokenizer()

    def pieces_of(part: Sequence[Sequence[str]]) -> list[WordPieces]:
        return pieces_of_words(part, tokenizer, _room(loaded), lead)

    return (vectors for _, vectors in _read_words(loaded, sentences, pieces_of, layers, pooling, window, batches))


def _read_words(
    loaded: Engine, inputs: Iterable[Input], pieces_of: Callable[[Sequence[Input]], list[WordPieces]],
    layers: Sequence[int], pooling: WordPooling, window: int, batches: BatchOptions,
) -> Iterator[tuple[WordPieces, np.ndarray]]:  # fmt: skip
    """Yield the pieces of each input, and the vectors float32[N, W, H] of its words."""
    chosen = checked_layers(loaded, layers)
    run = loaded.program(("words", chosen), _read(loaded, chosen))
    kept: list[WordPieces] = []

    def featurize(part: list[Input]) -> list[ModelInput]:
        kept[:] = pieces_of(part)
        return [
            ModelInput(number, (loaded.build(one.pieces),), extra=one)
            for number, words in enumerate(kept)
            for one in word_inputs(words, loaded.need_tokenizer(), loaded.spec.max_length)
        ]

    for _, units, outputs in loaded.windows(inputs, featurize, run, window=window, batches=batches):
        pooled = _pooled(units, outputs, [len(one.first) for one in kept], len(chosen), loaded, pooling)
        yield from zip(kept, pooled, strict=True)


def word_tokens(tokenizer: Tokenizer, words: Sequence[str]) -> list[list[int]]:
    """Return the ids of each word, encoded as inside a text, without unknown pieces. Raises ``ValueError`` for a
    word without known pieces."""
    before = " " if tokenizer.space_before_word else ""
    encoded = tokenizer.encode_batch([before + word for word in words])
    known = [[i for i in ids if i != tokenizer.unk_id or tokenizer.special[i]] for ids in encoded]
    for word, ids in zip(words, known, strict=True):
        if not ids:
            raise ValueError(f"{word!r}: the vocabulary has no piece of this word; choose another word")
    return known


def _room(loaded: Engine) -> int:
    return loaded.spec.max_length - len(loaded.need_tokenizer().build_inputs([])[0])


def _hidden(loaded: Engine) -> Callable[[Params, Batch], jax.Array]:
    """Return a function of parameters and a batch to the hidden states [1 + layers, B, S, H]."""
    encoder = loaded.model.clone(sentence=None, all_layers=True)
    return lambda params, batch: present(bert_output(encoder.apply({"params": params}, batch)).hidden_states)


def _read(loaded: Engine, layers: tuple[int, ...]) -> Callable[..., DeviceOutputs]:
    hidden = _hidden(loaded)

    def run(params: Params, batch: dict[str, jax.Array]) -> DeviceOutputs:
        all_LxBxSxH = hidden(params, batch)
        chosen_BxSxNxH = jnp.stack([all_LxBxSxH[i] for i in layers], axis=2)
        return {"token": {"hidden": chosen_BxSxNxH.astype(jnp.float32)}}

    return run


def _pooled(
    units: Sequence[ModelInput],
    outputs: Sequence[Outputs],
    counts: Sequence[int],
    layers: int,
    loaded: Engine,
    pooling: str,
) -> list[np.ndarray]:
    """Return float32[N, W, H] for each text with W words."""
    if pooling not in WORD_POOLINGS:
        raise ValueError(f"word pooling: {pooling!r} is not allowed; use one of {', '.join(WORD_POOLINGS)}")
    width = outputs[0]["hidden"].shape[-1] if outputs else loaded.spec.model.hidden_size
    vectors = [np.zeros((layers, count, width), np.float32) for count in counts]
    for unit, output in zip(units, outputs, strict=True):
        hidden_NxSxH, one = output["hidden"].swapaxes(0, 1), unit.extra
        for word, first, last in zip(one.words, one.first, one.last, strict=True):
            if pooling == "first" or last == first + 1:
                vectors[unit.record][:, word] = hidden_NxSxH[:, first]
            else:
                vectors[unit.record][:, word] = hidden_NxSxH[:, first:last].mean(axis=1)
    return vectors
