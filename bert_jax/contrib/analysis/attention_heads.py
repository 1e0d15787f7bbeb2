"""Find the attention heads that follow a dependency relation best, and compare them with the best fixed offset
(Clark et al. 2019, section 4.2 and table 1).

Shapes: B rows, S tokens, D directions, L layers, A heads, N words of all sentences, W words of a row or a sentence.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bert_jax.contrib.analysis.probe_tasks import spread, universal
from bert_jax.contrib.analysis.word_vectors import pieces_of_words, word_inputs
from bert_jax.inference.batching import BatchOptions, DeviceOutputs
from bert_jax.inference.engine import Engine
from bert_jax.io.conll import ParsedSentence
from bert_jax.json_values import Json
from bert_jax.metrics.resampling import Interval, confidence_intervals
from bert_jax.metrics.score import mean_of_groups
from bert_jax.model.bert import of_layers
from bert_jax.model.canonical import Params
from bert_jax.model.layers import INTERMEDIATES
from bert_jax.tasks.task import ModelInput, Target

ALL = "all relations"
# Relations with fewer words, in training or in test, are not reported.
FEWEST = 20
_WINDOW = 64
_TARGETS = {"word_starts": Target("token", np.int32), "in_word": Target("token", np.int32)}


class Attended(NamedTuple):
    """Words of a treebank, except for the roots."""

    sentence: np.ndarray  # int64[N]
    relations: np.ndarray  # str[N], universal
    offsets: np.ndarray  # int64[N], position of the syntactic head minus word position
    # bool[N, D, L, A], True if attention finds the syntactic head. Direction 0: the word attends most to its
    # syntactic head. Direction 1: of all words, its syntactic head attends most to the word.
    hits: np.ndarray
    sentences: int
    skipped: int  # sentences that exceed the maximum length of the model


@dataclass(frozen=True)
class Relation:
    """Best attention head (layer and head from 1, as in the paper) with its direction, and best offset of a
    relation, all chosen on training words, with their accuracies on ``words`` test words."""

    name: str
    words: int
    layer: int
    head: int
    to_head: bool  # True: the word attends to its syntactic head; False: the syntactic head attends to the word
    accuracy: Interval
    offset: int
    offset_accuracy: Interval


def attended(
    loaded: Engine, sentences: Sequence[ParsedSentence], limit: int = 0, batches: BatchOptions = BatchOptions()
) -> Attended:
    """Return for every word of the parsed sentences (:func:`bert_jax.io.conll.read_treebank`), every attention head
    of the network and both directions whether attention finds the syntactic head of the word.

    The attention to a word is the sum over its pieces, the attention from a word is the mean over its pieces.
    Special tokens and the word itself are excluded. ``limit``: number of sentences at equal distances; 0: all.
    Raises ``ValueError`` for a network without attention, and if no word has a head.
    """
    encoder = loaded.spec.model.encoder
    if not loaded.spec.model.has_attention:
        raise ValueError(
            f"{loaded.name}: the encoder ({encoder}) has no attention, which heads requires; give a Transformer, "
            "or another task"
        )
    if len(set(loaded.spec.model.heads_by_layer)) > 1:
        raise ValueError(f"{loaded.name}: its layers have different numbers of heads; give a model before pruning")
    parsed = spread(sentences, limit)
    run = loaded.program("attended words", _attended_words(loaded))
    tokenizer, maximum = loaded.need_tokenizer(), loaded.spec.max_length
    room = maximum - len(tokenizer.build_inputs([])[0])

    def featurize(part: list[ParsedSentence]) -> list[ModelInput]:
        pieces = pieces_of_words([own.words for own in part], tokenizer, room)
        units = []
        for number, words in enumerate(pieces):
            if len(words.ids) <= room and len(words.first) > 1:
                (one,) = word_inputs(words, tokenizer, maximum)
                encoded = loaded.build(one.pieces)
                starts, inside = (np.zeros(len(encoded.ids), np.int32) for _ in range(2))
                starts[one.first] = 1
                inside[one.first[0] : one.last[-1]] = 1
                targets = {"word_starts": starts, "in_word": inside}
                units.append(ModelInput(number, (encoded,), targets, extra=one))
        return units

    columns: list[tuple[int, str, int]] = []
    hits: list[np.ndarray] = []
    first = used = 0
    for part, units, outputs in loaded.windows(
        parsed, featurize, run, targets=_TARGETS, window=_WINDOW, batches=batches
    ):
        for unit, output in zip(units, outputs, strict=True):
            own = part[unit.record]
            best_WxDxLxA = output["best"][unit.extra.first] - output["number"][unit.extra.first[0]]
            for word, (head, relation) in enumerate(zip(own.heads, own.relations, strict=True)):
                if head >= 0:
                    columns.append((first + unit.record, universal(relation), head - word))
                    hits.append(best_WxDxLxA[word] == head)
        first, used = first + len(part), used + len(units)
    if not hits:
        raise ValueError(
            f"no word has a syntactic head in a sentence of at most {maximum} tokens; give a longer file"
        )
    sentence, relations, offsets = map(np.array, zip(*columns, strict=True))
    short = sum(len(own.words) < 2 for own in parsed)
    return Attended(sentence, relations, offsets, np.stack(hits), len(parsed), len(parsed) - used - short)


def best_heads(train: Attended, test: Attended, seed: int = 0) -> list[Relation]:
    """Return the best attention head and the best offset for all words together and for each relation with at least
    20 words in both parts, from the most frequent one. Intervals are 95% bootstrap intervals over the sentences of
    ``test``. Raises ``ValueError`` if all words together are fewer."""
    fewest = min(len(train.relations), len(test.relations))
    if fewest < FEWEST:
        raise ValueError(
            f"too few words: {fewest} with a syntactic head; {FEWEST} or more are required in both files; give "
            "longer files, or a larger --limit"
        )
    names, counts = np.unique(test.relations, return_counts=True)
    found = []
    for name in [ALL, *names[np.argsort(-counts, kind="stable")].tolist()]:
        chosen, asked = (
            np.ones(len(own.relations), bool) if name == ALL else own.relations == name for own in (train, test)
        )
        if min(chosen.sum(), asked.sum()) < FEWEST:
            continue
        hits_DxLxA = train.hits[chosen].sum(axis=0)
        direction, layer, head = (int(i) for i in np.unravel_index(hits_DxLxA.argmax(), hits_DxLxA.shape))
        offsets, times = np.unique(train.offsets[chosen], return_counts=True)
        offset = int(offsets[times.argmax()])
        _, sentence = np.unique(test.sentence[asked], return_inverse=True)
        count = int(sentence.max()) + 1
        values = test.hits[asked, direction, layer, head], test.offsets[asked] == offset
        scores = [mean_of_groups("accuracy", one, sentence, count) for one in values]
        own, of_offset = confidence_intervals(scores, count, seed)
        words = int(asked.sum())
        found.append(Relation(name, words, layer + 1, head + 1, not direction, own, offset, of_offset))
    return found


def _attended_words(loaded: Engine) -> Callable[..., DeviceOutputs]:
    """Return a program whose outputs are, for every token, the number of its word in the row ("number"), and, for
    each direction, layer and head, the number of the word that its word attends to most, or that attends most to
    its word ("best")."""

    def run(params: Params, batch: dict[str, jax.Array]) -> DeviceOutputs:
        encoder = loaded.model.clone(sentence=None)
        _, state = encoder.apply({"params": params}, batch, mutable=[INTERMEDIATES])
        numbers_BxS = jnp.cumsum(batch["word_starts"], axis=1) - 1
        inside_BxS = batch["in_word"] > 0
        length = numbers_BxS.shape[1]
        # A row has at most as many words as tokens.
        sum_BxSxW = ((numbers_BxS[..., None] == jnp.arange(length)) & inside_BxS[..., None]).astype(jnp.float32)
        mean_BxSxW = sum_BxSxW / jnp.maximum(sum_BxSxW.sum(axis=1, keepdims=True), 1)
        # Sequence of each word, 0 for columns without a word.
        owner_BxW = jnp.max(jnp.where(sum_BxSxW > 0, batch["sequence_ids"][..., None], 0), axis=1)
        possible_BxWxW = (owner_BxW[:, :, None] == owner_BxW[:, None]) & (owner_BxW[:, None] > 0)
        possible_BxWxW &= ~jnp.eye(length, dtype=bool)

        def best(attention_BxAxSxS: jax.Array) -> jax.Array:
            to_BxAxSxW = jnp.einsum("bast,btw->basw", attention_BxAxSxS.astype(jnp.float32), sum_BxSxW)
            words_BxAxWxW = jnp.einsum("bsv,basw->bavw", mean_BxSxW, to_BxAxSxW)
            both_BxDxAxWxW = jnp.stack([words_BxAxWxW, words_BxAxWxW.swapaxes(2, 3)], axis=1)
            best_BxDxAxW = jnp.where(possible_BxWxW[:, None, None], both_BxDxAxWxW, -1).argmax(axis=-1)
            words_Bx1x1xS = jnp.maximum(numbers_BxS, 0)[:, None, None]
            return jnp.take_along_axis(best_BxDxAxW, words_Bx1x1xS, axis=3).astype(jnp.int32)

        layers = of_layers(state[INTERMEDIATES]["encoder"], loaded.spec.model, "attention", "attentions")
        best_BxSxDxLxA = jnp.stack([best(one).transpose(0, 3, 1, 2) for one in layers], axis=3)
        return {"token": {"best": best_BxSxDxLxA, "number": numbers_BxS[..., None, None, None]}}

    return run


# ------------------------------------------------------------------ lines


def relation_line(one: Relation) -> dict[str, Json]:
    """Return a relation as a JSON-serializable object; accuracies are [value, low, high]."""
    rounded = [[round(x, 6) for x in interval] for interval in (one.accuracy, one.offset_accuracy)]
    return {
        "task": "heads", "relation": one.name, "words": one.words, "layer": one.layer, "head": one.head,
        "direction": "to head" if one.to_head else "from head", "accuracy": rounded[0], "offset": one.offset,
        "offset_accuracy": rounded[1],
    }  # fmt: skip


def printed(one: Relation) -> str:
    """Return a relation as a line of text."""
    values = [f"{value:.3f} [{low:.3f}, {high:.3f}]" for value, low, high in (one.accuracy, one.offset_accuracy)]
    head = f"layer {one.layer} head {one.head} {'to' if one.to_head else 'from'} head"
    return f"{one.name:14s}{one.words:7,d} words  {head:28s}{values[0]}  offset {one.offset:+d} {values[1]}"
