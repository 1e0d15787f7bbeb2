"""Pictures of a model that reads a text: attention, nearest words, a map of words.

Shapes: L layers, A heads, T tokens, N layers with the embeddings, H width.
"""

import dataclasses
import functools
import html
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import jax
import numpy as np

from bert_jax.contrib.pictures.attention import (
    entropy,
    equal_attention,
    mean_distance,
    place_heads,
    rollout,
    special_share,
)
from bert_jax.contrib.pictures.nearest_words import NearestWords, above_random, nearest_words
from bert_jax.contrib.pictures.page import page
from bert_jax.contrib.pictures.words_map import WordsMap, words_map
from bert_jax.io.files import write_whole
from bert_jax.json_values import Json
from bert_jax.training.state import initial_params

if TYPE_CHECKING:
    from bert_jax.inference.engine import Text
    from bert_jax.inference.loaded import LoadedModel

# Bytes of attention in the page (base64): 147 tokens of a network with 12 layers of 12 heads.
_ATTENTION_BYTES = 4_500_000
# Tokens without attention, and words of a map.
_MOST_TOKENS, _MOST_WORDS = 256, 400


@dataclasses.dataclass(frozen=True, repr=False, eq=False, kw_only=True)
class Picture:
    """A picture as numbers and as a page; a notebook shows the page.

    ``attentions`` and what follows from them are those of the whole text, of which the page shows the first tokens
    if it is long. They are None for a network without attention. ``nearest`` is None without a text, ``map``
    without words. ``notes`` are lines about what is absent or cut.
    """

    html: str
    tokens: list[str]
    attentions: np.ndarray | None  # float32[L, A, T, T]
    rollout: np.ndarray | None  # float64[L, T, T]
    entropy: np.ndarray | None  # float64[L, A], in nats
    distance: np.ndarray | None  # float64[L, A], in tokens
    nearest: NearestWords | None
    map: WordsMap | None
    notes: tuple[str, ...]

    def save(self, path: str | Path) -> Path:
        """Write the page to the file ``path`` and return its path."""
        write_whole(Path(path), self.html)
        return Path(path)

    def __repr__(self) -> str:
        """Return one line."""
        shape = None if self.attentions is None else self.attentions.shape
        heads = "no attention" if shape is None else f"{shape[0]} layers of {shape[1]} heads"
        return f"Picture({len(self.tokens)} tokens, {heads}); save(path) writes the page"

    def _repr_html_(self) -> str:
        """Return the page for a notebook."""
        return f'<iframe srcdoc="{html.escape(self.html)}" style="width: 100%; height: 720px; border: 0"></iframe>'


def picture(
    loaded: "LoadedModel",
    text: "Text | None" = None,
    *,
    words: Sequence[str] = (),
    layer: int = 1,
    head: int = 1,
    top: int = 5,
    candidates: int = 2000,
) -> Picture:
    """Return the picture of a model that reads ``text``, or of its input embeddings only if ``text`` is None.

    Args:
        text: a text or a pair of texts, cut to the maximum length of the model.
        words: words for a map of their input embeddings; empty: no map.
        layer: layer, from 1, of the head that the page shows first.
        head: head, from 1, that the page shows first.
        top: nearest words of a token at each layer.
        candidates: number of vocabulary words among which the nearest are found (``nearest_words``); 0: none.

    Raises ``ValueError`` if ``text`` and ``words`` are both missing, for a layer, a head or a number that is not
    allowed, for a blank text, for a model without a vocabulary, and as ``words_map`` does.
    """
    if text is None and not words:
        raise ValueError("text: missing; give a text, words for a map, or both")
    if top < 1 or candidates < 0:
        raise ValueError(f"top: {top}, candidates: {candidates}: not allowed; use 1 or more, and 0 or more")
    notes: list[str] = []
    reading = _Reading(loaded, text, notes)
    chosen = reading.checked_head(layer, head)
    kept = reading.kept_tokens()
    random = _random_parameters(loaded)
    nearest = reading.nearest(kept, top, candidates)
    if len(words) > _MOST_WORDS:
        notes.append(f"The map shows the first {_MOST_WORDS} of {len(words):,} words.")
    of_random = nearest and reading.nearest_of(random, kept, 1, candidates)
    of_words = words_map(loaded, words[:_MOST_WORDS]) if words else None
    data: dict[str, Json] = {
        "tokens": list(reading.tokens[:kept]), "special": list(reading.special[:kept]), "read": len(reading.tokens),
        "layer": chosen[0], "head": chosen[1], **reading.numbers(random),
        "nearest": _nearest_data(nearest, of_random) if nearest and of_random else None,
        "map": None if of_words is None else _map_data(of_words, words_map(random, of_words.words)),
    }  # fmt: skip
    shown = " / ".join(text) if isinstance(text, tuple | list) else text or ""
    summary = [line.strip() for line in repr(loaded).partition("): ")[2].splitlines()]
    title = f"Attention and words of {Path(loaded.name).name}"
    return Picture(
        html=page(title, summary, shown, notes, data, reading.values(kept)),
        tokens=reading.tokens, attentions=reading.attentions, rollout=reading.rollout, entropy=reading.entropy,
        distance=reading.distance, nearest=nearest, map=of_words, notes=tuple(notes),
    )  # fmt: skip


class _Reading:
    """A text as the model reads it; ``text`` None: no tokens."""

    def __init__(self, loaded: "LoadedModel", text: "Text | None", notes: list[str]) -> None:
        self.loaded, self.text, self.notes = loaded, text, notes
        self.ids: list[int] = []
        self.attentions: np.ndarray | None = None
        tokenizer = loaded.need_tokenizer()
        if text is not None:
            parts = [text] if isinstance(text, str) else list(text)
            if not all(isinstance(part, str) and part.strip() for part in parts):
                raise ValueError(f"text: {text!r} is not allowed; give a text that is not blank, or a pair of them")
            self.ids = list(loaded.model_inputs([text])[0].ids)
            first, *second = tokenizer.encode_batch(parts)
            whole = len(tokenizer.build_inputs(first, second[0] if second else None)[0])
            if whole > len(self.ids):
                notes.append(f"The text has {whole:,} tokens; the model reads the first {len(self.ids):,}.")
            self._attend()
        self.tokens = [_label(loaded, one) for one in self.ids]
        self.special = [bool(tokenizer.special[one]) for one in self.ids]

    def _attend(self) -> None:
        config = self.loaded.config
        if not config.has_attention:
            self.notes.append(f"The encoder of this model ({config.encoder}) has no attention to show.")
        elif len(set(config.heads_by_layer)) > 1:
            counts = ", ".join(map(str, config.heads_by_layer))
            self.notes.append(f"Attention is not shown: the layers have different numbers of heads ({counts}).")
        else:
            self.attentions = self.loaded.attentions([self.text or ""])[0]

    @functools.cached_property
    def rollout(self) -> np.ndarray | None:
        return None if self.attentions is None else rollout(self.attentions)

    @functools.cached_property
    def entropy(self) -> np.ndarray | None:
        return None if self.attentions is None else entropy(self.attentions)

    @functools.cached_property
    def distance(self) -> np.ndarray | None:
        return None if self.attentions is None else mean_distance(self.attentions)

    def checked_head(self, layer: int, head: int) -> tuple[int, int]:
        """Return layer and head. Raises ``ValueError`` if the network lacks them."""
        if self.attentions is not None:
            for name, value, most in zip(("layer", "head"), (layer, head), self.attentions.shape[:2], strict=True):
                if not 1 <= value <= most:
                    raise ValueError(f"{name}: {value} is not allowed; use 1 to {most}")
        return layer, head

    def kept_tokens(self) -> int:
        """Return the number of tokens that the page shows, with a note if it is cut."""
        count, most = len(self.ids), _MOST_TOKENS
        if self.attentions is not None:
            layers, heads = self.attentions.shape[:2]
            most = math.isqrt(_ATTENTION_BYTES * 3 // 4 // (layers * (heads + 1)))
        if count <= most:
            return count
        numbers = "" if self.attentions is None else "; entropy and distance are those of all tokens"
        self.notes.append(f"The page shows the first {most} of {count:,} tokens, so that it stays small{numbers}.")
        return most

    def values(self, kept: int) -> np.ndarray:
        """Return the attention and, as a last head, the rollout of the first tokens: uint8[L, A + 1, T, T]."""
        if self.attentions is None or self.rollout is None:
            return np.zeros(0, np.uint8)
        both = np.concatenate([self.attentions[..., :kept, :kept], self.rollout[:, None, :kept, :kept]], axis=1)
        return np.rint(np.sqrt(both) * 255).astype(np.uint8)

    def numbers(self, random: "LoadedModel") -> dict[str, Json]:
        """Return the numbers of the heads, with those of equal attention and of the network ``random`` to compare
        with."""
        if self.attentions is None or self.entropy is None or self.distance is None:
            return {"layers": 0, "heads": 0}
        on_special = special_share(self.attentions, self.special)
        own = np.stack([self.entropy, self.distance, on_special], axis=-1).round(4)
        equal = equal_attention(self.attentions)
        equal_on_special = special_share(equal, self.special)
        means_of_equal = [entropy(equal), mean_distance(equal), equal_on_special]
        of_equal: Json = np.stack(means_of_equal, axis=-1)[:, 0].round(4).tolist()
        windows = list(self.loaded.config.layer_windows)
        layers, heads = own.shape[:2]
        of_random = place_heads(random.attentions([self.text or ""])[0], self.special)
        means = {one.place: one.mean for one in of_random}
        patterns: Json = [[*one, means[one.place]] for one in place_heads(self.attentions, self.special)]
        numbers: Json = own.tolist()
        return {
            "layers": layers, "heads": heads, "numbers": numbers, "equal": of_equal, "windows": windows,
            "patterns": patterns,
        }  # fmt: skip

    def nearest(self, kept: int, top: int, candidates: int) -> NearestWords | None:
        if not self.ids or not candidates:
            return None
        try:
            return self.nearest_of(self.loaded, kept, top, candidates)
        except ValueError as error:
            self.notes.append(f"Nearest words are not shown: {error}.")
            return None

    def nearest_of(self, loaded: "LoadedModel", kept: int, top: int, candidates: int) -> NearestWords:
        """Return the nearest words in ``loaded``, which has the network of the model."""
        hidden = loaded.hidden_states([self.text or ""])[0][:, :kept]
        return nearest_words(loaded, self.ids[:kept], hidden, top, candidates)


def _random_parameters(loaded: "LoadedModel") -> "LoadedModel":
    """Return the network of ``loaded`` with randomly initialized parameters, which shows what training changed. It
    uses the programs of ``loaded``, which take the parameters as an argument."""
    return dataclasses.replace(loaded, params=jax.jit(lambda: initial_params(loaded.model, seed=0))())


def _label(loaded: "LoadedModel", token: int) -> str:
    """Return a token as it is shown: its piece or, for pieces of bytes, its characters if they are complete."""
    tokenizer = loaded.need_tokenizer()
    (piece,) = tokenizer.pieces([token])
    if tokenizer.kind in ("wordpiece", "sentencepiece") or tokenizer.special[token]:
        return piece
    characters = tokenizer.decode([token])
    return piece if "\ufffd" in characters else characters.strip() or "␣"


def _nearest_data(found: NearestWords, random: NearestWords) -> Json:
    """Return the nearest words for the page: only the words that occur, and cosines in hundredths; ``random`` are
    those of the network with random parameters."""
    used, indices = np.unique(found.indices, return_inverse=True)
    return {
        "candidates": len(found.words),
        "words": [found.words[i] for i in used.tolist()],
        "sources": list(found.sources),
        "indices": indices.reshape(found.indices.shape).tolist(),
        "cosines": np.rint(found.cosines * 100).astype(int).tolist(),
        "above": above_random(found, random).tolist(),
        "medians": np.rint(found.medians * 100).astype(int).tolist(),
        "random": np.rint(np.stack([random.cosines[..., 0], random.medians], axis=-1) * 100).astype(int).tolist(),
    }


def _map_data(found: WordsMap, random: WordsMap) -> Json:
    return {
        "words": list(found.words), "points": found.points.round(5).tolist(), "variance": list(found.variance),
        "random_variance": sum(random.variance),
    }  # fmt: skip
