"""Continuation of texts by a causal language model, token by token, with cached keys and values.

Shapes: B rows, P columns of the prompts, C columns of the cache, V vocabulary.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bert_jax.inference.engine import Engine, checked_texts, not_finite
from bert_jax.inference.score import with_output_layer
from bert_jax.model import BertModel
from bert_jax.model.canonical import Params
from bert_jax.model.layers import CACHE

# The columns of prompts and caches are multiples of this number, so that few programs are compiled.
_COLUMNS = 32


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """Choice of the next token. Filters apply in the order temperature, top_k, top_p."""

    # Divisor of the logits; 0: the most probable token (the first of equal ones).
    temperature: float = 0.0
    # Draw from the tokens with the highest logits; 0: from all.
    top_k: int = 0
    # Draw from the fewest most probable tokens whose probabilities sum to at least top_p (Holtzman et al. 2020).
    top_p: float = 1.0
    # Sampling seed. The random numbers for a token depend only on the seed, the text number and the token number.
    seed: int = 0

    def __post_init__(self) -> None:
        for name, is_allowed, allowed in (
            ("temperature", 0 <= self.temperature < float("inf"), "0 (greedy) or more"),
            ("top_k", self.top_k >= 0, "0 (all tokens) or more"),
            ("top_p", 0 < self.top_p <= 1, "above 0, at most 1 (all tokens)"),
            ("seed", 0 <= self.seed < 1 << 32, "0 to 4294967295"),
        ):
            if not is_allowed:
                raise ValueError(f"{name}: {getattr(self, name)} is not allowed; use {allowed}")


@dataclasses.dataclass(frozen=True)
class Continuation:
    """A prompt, the text after it, the ids of this text, and whether it ended with the end token (which the ids
    exclude)."""

    prompt: str
    text: str
    ids: tuple[int, ...]
    ended: bool


def generate(
    loaded: Engine,
    texts: Iterable[str],
    *,
    max_new_tokens: int = 50,
    sampling: Sampling | None = None,
    batch_size: int = 8,
) -> Iterator[Continuation]:
    """Yield the continuation of each text, in order; ``texts`` may be endless.

    A continuation ends before the end token, the separator of the tokenizer (<|endoftext|> of GPT-2), or after
    ``max_new_tokens`` tokens. An empty text starts with the first token of the tokenizer. Raises ``ValueError`` for
    a model that is not a causal language model, and for a text that together with ``max_new_tokens`` exceeds the
    positions of the model.
    """
    tokenizer, texts = loaded.need_tokenizer(), iter(checked_texts(texts))
    language_model(loaded)
    if batch_size < 1:
        raise ValueError(f"batch_size: {batch_size} is not allowed; use 1 or more")
    pieces = min(tokenizer.vocab_size, loaded.spec.model.vocab_size)
    first = 0
    while part := list(itertools.islice(texts, batch_size)):
        prompts = []
        for ids in tokenizer.encode_batch(part):
            framed = tokenizer.build_inputs(ids)[0]
            prompts.append(framed[:-1] if len(framed) > len(ids) else framed or [tokenizer.cls_id])
        rows = generate_ids(
            loaded, prompts, max_new_tokens=max_new_tokens, sampling=sampling, end_id=tokenizer.sep_id,
            pieces=pieces, rows=batch_size, first=first,
        )  # fmt: skip
        for text, (ids, ended) in zip(part, rows, strict=True):
            yield Continuation(text, tokenizer.decode(ids), tuple(ids), ended)
        first += len(part)


def generate_ids(
    loaded: Engine,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    sampling: Sampling | None = None,
    end_id: int | None = None,
    pieces: int | None = None,
    rows: int = 0,
    first: int = 0,
) -> list[tuple[list[int], bool]]:
    """Return the ids after each prompt, and True if they end because ``end_id`` (None: no id) followed.

    Ids from ``pieces`` on are never chosen. The batch has at least ``rows`` rows. ``first`` is the number of the
    first prompt for the draws. Raises ``ValueError`` as :func:`generate` does, and for an empty prompt.
    """
    sampling, limit = sampling or Sampling(), loaded.spec.model.max_length
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens: {max_new_tokens} is not allowed; use 1 or more")
    for i, prompt in enumerate(prompts):
        if not prompt or len(prompt) + max_new_tokens > limit:
            what = f"{len(prompt)} tokens and {max_new_tokens} new ones"
            allowed = f"one or more tokens, and at most {limit} together"
            raise ValueError(f"text {first + i}: {what} are not allowed (max_new_tokens); use {allowed}")
    batch = max(rows, len(prompts))
    columns = _rounded(max(map(len, prompts)))
    ids_BxP, mask_BxP = np.zeros((2, batch, columns), np.int32)
    for row, prompt in enumerate(prompts):
        ids_BxP[row, columns - len(prompt) :] = prompt
        mask_BxP[row, columns - len(prompt) :] = 1
    capacity = _rounded(columns + max_new_tokens)
    cache_ids_BxC = np.pad(mask_BxP, ((0, 0), (0, capacity - columns)), constant_values=1)
    prefill, step = _programs(loaded, pieces or loaded.spec.model.vocab_size)
    numbers_B = np.arange(first, first + batch, dtype=np.uint32)
    settings = tuple(
        map(np.asarray, (np.float32(sampling.temperature), sampling.top_k, np.float32(sampling.top_p)))
    )
    draws = (numbers_B, np.uint32(sampling.seed), *settings)
    cache, tokens_B = prefill(loaded.params, ids_BxP, mask_BxP, cache_ids_BxC, *draws)
    found: list[list[int]] = [[] for _ in prompts]
    open_rows = set(range(len(prompts)))
    lengths_B = mask_BxP.sum(1)
    for made in range(max_new_tokens):
        chosen = np.asarray(tokens_B)
        for row in sorted(open_rows):
            if chosen[row] < 0:
                raise not_finite(loaded, f"text {first + row}")
            if chosen[row] == end_id:
                open_rows.remove(row)
            else:
                found[row].append(int(chosen[row]))
        if not open_rows or made + 1 == max_new_tokens:
            break
        place = np.int32(columns + made), np.int32(made + 1), np.int32(lengths_B + made)
        cache, tokens_B = step(loaded.params, cache, tokens_B, *place, cache_ids_BxC, *draws)
    return [(ids, row not in open_rows) for row, ids in enumerate(found)]


def _rounded(columns: int) -> int:
    return -(-columns // _COLUMNS) * _COLUMNS


def language_model(loaded: Engine) -> BertModel:
    """Return the network with its output layer (:func:`with_output_layer`). Raises ``ValueError`` for a model that
    is not a causal language model, or whose keys cannot be cached."""
    model = loaded.spec.model
    if not model.is_causal:
        raise ValueError(
            f"{loaded.name}: a bidirectional model cannot generate text (model.encoder {model.encoder}, "
            f"model.attention {model.attention}); use a causal language model, or bert-jax fill-mask"
        )
    if model.relative_positions != "none" or model.shared_layers:
        option = "shared_layers" if model.shared_layers else "relative_positions"
        value = f"model.{option} {getattr(model, option)}"
        raise ValueError(f"{loaded.name}: generation does not support {value}; use a model without it")
    return with_output_layer(loaded)


def _programs(loaded: Engine, pieces: int) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return the programs of the first token, from the prompts, and of each later one, from the token before it.
    Both return the cache and int32[B]."""
    network = language_model(loaded)

    def prefill(
        params: Params, ids_BxP: jax.Array, mask_BxP: jax.Array, cache_ids_BxC: jax.Array, *draws: jax.Array
    ) -> tuple[Params, jax.Array]:
        positions_BxP = jnp.maximum(jnp.cumsum(mask_BxP, axis=1) - 1, 0)
        logits_BxV, cache = cached_logits(
            network, params, {}, ids_BxP, mask_BxP, positions_BxP, cache_ids_BxC, jnp.int32(0)
        )
        return cache, choose(logits_BxV[:, :pieces], jnp.int32(0), *draws)

    def step(
        params: Params,
        cache: Params,
        tokens_B: jax.Array,
        start: jax.Array,
        number: jax.Array,
        positions_B: jax.Array,
        cache_ids: jax.Array,
        *draws: jax.Array,
    ) -> tuple[Params, jax.Array]:
        logits_BxV, cache = cached_logits(
            network, params, cache, tokens_B[:, None], jnp.ones_like(tokens_B)[:, None], positions_B[:, None],
            cache_ids, start,
        )  # fmt: skip
        return cache, choose(logits_BxV[:, :pieces], number, *draws)

    return (
        loaded.program(("generate", "prefill", pieces), prefill),
        loaded.program(("generate", "step", pieces), step, donated=(1,)),
    )


def cached_logits(
    network: BertModel,
    params: Params,
    cache: Params,
    ids_BxS: jax.Array,
    mask_BxS: jax.Array,
    positions_BxS: jax.Array,
    cache_ids_BxC: jax.Array,
    start: jax.Array,
) -> tuple[jax.Array, Params]:
    """Return the logits after the last of the S columns, float32[B, V], and the cache with the keys and values of
    these columns, the first of which is the column ``start`` of the cache. An empty ``cache`` is created."""
    last_Bx1 = jnp.full((ids_BxS.shape[0], 1), ids_BxS.shape[1] - 1, jnp.int32)
    features = {
        "input_ids": ids_BxS, "token_type_ids": jnp.zeros_like(ids_BxS), "position_ids": positions_BxS,
        "sequence_ids": mask_BxS, "mlm_positions": last_Bx1, "cache_ids": cache_ids_BxC, "cache_start": start,
    }  # fmt: skip
    variables = {"params": params} | ({CACHE: cache} if cache else {})
    output, changed = network.apply(variables, features, mutable=[CACHE])
    return output.mlm_logits[:, 0], changed[CACHE]


def choose(
    logits_BxV: jax.Array,
    number: jax.Array,
    numbers_B: jax.Array,
    seed: jax.Array,
    temperature: jax.Array,
    top_k: jax.Array,
    top_p: jax.Array,
) -> jax.Array:
    """Return the token ``number`` of each text, int32[B], -1 if its logits are not finite; ``numbers`` are
    the text numbers, and the other arguments the fields of :class:`Sampling`."""
    greedy_B = jnp.argmax(logits_BxV, axis=-1).astype(jnp.int32)

    def draw() -> jax.Array:
        key = jax.random.fold_in(jax.random.PRNGKey(seed), number)
        keys_B = jax.vmap(lambda text: jax.random.fold_in(key, text))(numbers_B)
        kept_BxV = filtered(logits_BxV / temperature, top_k, top_p)
        return jax.vmap(jax.random.categorical)(keys_B, kept_BxV).astype(jnp.int32)

    tokens_B = jax.lax.cond(temperature > 0, draw, lambda: greedy_B)
    return jnp.where(jnp.isfinite(logits_BxV).all(axis=-1), tokens_B, -1)


def filtered(logits_BxV: jax.Array, top_k: jax.Array, top_p: jax.Array) -> jax.Array:
    """Return the logits with -inf for the tokens that ``top_k`` and then ``top_p`` exclude (:class:`Sampling`).
    Tokens with a logit equal to the last one that ``top_k`` keeps stay."""
    vocabulary = logits_BxV.shape[-1]
    order_BxV = jnp.argsort(-logits_BxV, axis=-1)
    sorted_BxV = jnp.take_along_axis(logits_BxV, order_BxV, axis=-1)
    last = jnp.clip(jnp.where(top_k > 0, top_k, vocabulary), 1, vocabulary) - 1
    least_Bx1 = jnp.take(sorted_BxV, last, axis=-1)[:, None]
    sorted_BxV = jnp.where(sorted_BxV >= least_Bx1, sorted_BxV, -jnp.inf)
    shares_BxV = jax.nn.softmax(sorted_BxV, axis=-1)
    before_BxV = jnp.cumsum(shares_BxV, axis=-1) - shares_BxV
    sorted_BxV = jnp.where((before_BxV < top_p) | (top_p >= 1), sorted_BxV, -jnp.inf)
    return jnp.take_along_axis(sorted_BxV, jnp.argsort(order_BxV, axis=-1), axis=-1)
