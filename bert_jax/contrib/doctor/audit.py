"""Checks of rows: vocabulary, masks, labels, positions, pairs, repetitions, padding, held-out text. Only numpy is
needed.

Shapes: N rows, S tokens per row, M predictions per row, C sequences per row.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise

import numpy as np

from bert_jax.batch import PretrainSource
from bert_jax.config.pretrain import DataConfig
from bert_jax.contrib.doctor.findings import Finding, finding
from bert_jax.tokenization import Tokenizer

# Rows of a sample, at most, and their tokens, at most.
MOST_ROWS, MOST_TOKENS = 8192, 1 << 20
# Held-out rows from which the loss of the unigram distribution is computed.
COUNTED = 2048
# Shares of unknown tokens, of a vocabulary of pieces and of whole words, for LOOK and FAIL.
UNKNOWN, UNKNOWN_OF_WORDS = (0.01, 0.03), (0.2, 0.5)
# Share of the pairs of neighboring tokens inside words that decoding and encoding keeps.
KEPT_PAIRS = (0.985, 0.95)
# Share of predicted tokens with which FAIL is certain, and the part of the configured share below which LOOK is.
MOST_PREDICTED, LEAST_OF_SHARE = 0.5, 0.7
# Tokens of a window, the share of the windows (by their hash) that is counted, and the share of repetitions.
WINDOW, ONE_OF, REPEATED = 13, 8, (0.15, 0.35)
# Documents with sentence pairs.
DOCUMENTS = (100, 20)
RANDOM_PAIRS = (0.3, 0.8)
PADDING = 0.5
# Share of the rows that are copies of other rows, for LOOK and FAIL, and fewest tokens of such a row.
COPIED, LEAST_COPIED = (0.01, 0.1), 13
# Share of the predicted tokens with the same input from which on this is the mask, whatever its id.
STANDS_IN = 0.3
# Distinct tokens of a window that can show that two rows have the same text, and its occurrences in a pass over the
# training text from which on it is boilerplate.
VARIED, BOILERPLATE = 7, 20
# Part of the distance from the expected share of labels that equal their tokens to 1, from which on they equal them
# too often, and fewest tokens from which this is known.
TOO_OFTEN, LEAST_SEEN = 0.5, 50
# Share of the held-out rows whose text is also in training rows, and the least share of the training text that must
# be in the sample.
LEAKED, LEAST_COVERED = (0.1, 0.3), 0.1
# Probability that a pair of neighbors shares more than a random pair, and fewest pairs of each kind.
NEIGHBORS, LEAST_PAIRS = 0.55, 200

Rows = Mapping[str, np.ndarray]


def sample(batches: Iterable[Rows], most: int = MOST_ROWS) -> dict[str, np.ndarray]:
    """Return the features of the first rows of ``batches``: at most ``most`` rows and ``MOST_TOKENS`` tokens, and
    at least one batch. Blank rows, which replace damaged records, are omitted."""
    taken: list[Rows] = []
    count = 0
    for batch in batches:
        taken.append(batch)
        count += len(batch["input_ids"])
        if count >= min(most, MOST_TOKENS // batch["input_ids"].shape[1]):
            break
    rows = {name: np.concatenate([batch[name] for batch in taken]) for name in taken[0]}
    used = (rows["sequence_ids"] > 0).any(axis=1)
    return {name: values[used] for name, values in rows.items()}


def held_out_rows(source: PretrainSource, train: Rows, most: int = COUNTED) -> Rows:
    """Return held-out rows or, without held-out data, ``train`` itself, the training rows."""
    batches = source.held_out(256, list(range(256)), -(-most // 256))
    return sample(batches, most) if batches is not None else train


def unigram_loss(train: Rows, held_out: Rows, vocab_size: int, *, predicts_masks: bool) -> float | None:
    """Return the loss per held-out target of the unigram distribution of the training targets, with add-one
    smoothing; None without targets."""

    def counts(rows: Rows) -> np.ndarray:
        if predicts_masks:
            targets = rows["mlm_labels"][rows["mlm_weights"] > 0]
        else:
            ids, sequence = original_ids(rows), rows["sequence_ids"]
            targets = ids[:, 1:][(sequence[:, 1:] > 0) & (sequence[:, 1:] == sequence[:, :-1])]
        return np.bincount(targets, minlength=vocab_size)

    known, asked = 1 + counts(train), counts(held_out)
    return float(-(asked @ np.log(known / known.sum())) / asked.sum()) if asked.any() else None


def original_ids(rows: Rows) -> np.ndarray:
    """Return the token ids before masking, int32[N, S]."""
    ids = rows["input_ids"].copy()
    row, slot = np.nonzero(rows["mlm_weights"] > 0)
    ids[row, rows["mlm_positions"][row, slot]] = rows["mlm_labels"][row, slot]
    return ids


def audit(
    data: DataConfig, tokenizer: Tokenizer, rows: Rows, *, predicts_masks: bool, documents: int | None = None
) -> list[Finding]:
    """Return the results of all checks of training ``rows``.

    Args:
        rows: features of ``bert_jax.batch.PRETRAIN_FEATURES``, [N, ...].
        predicts_masks: True if the objective predicts the masked tokens.
        documents: number of training documents; None if it is unknown.
    """
    ids = original_ids(rows)
    found = [
        vocabulary(tokenizer, rows, ids),
        unknown_tokens(tokenizer, rows, ids),
        position_ids(rows),
        repeated_text(data, tokenizer, rows, ids),
        copied_rows(data, rows, ids),
        padding_share(data, rows),
    ]
    if predicts_masks:
        found += [masks(data, tokenizer, rows), labels(data, tokenizer, rows)]
    if data.next_sentence != "none":
        found.append(sentence_pairs(rows))
    if data.next_sentence == "nsp":
        found += sentence_order(tokenizer, rows, ids)
        if documents is not None:
            found.append(few_documents(documents))
    return found


# ------------------------------------------------------------------ text and vocabulary


def _texts(tokenizer: Tokenizer, rows: Rows, ids: np.ndarray) -> Iterator[list[int]]:
    """Yield the ids of each run of whole words between special and unknown tokens and padding. The first word after
    a border and the last word before one may be cut, and are omitted."""
    stops = tokenizer.special | (np.arange(tokenizer.vocab_size) == tokenizer.unk_id)
    for own, used in zip(ids, rows["sequence_ids"] > 0, strict=True):
        ends = np.flatnonzero(stops[own] | ~used)
        for start, stop in zip([0, *(ends + 1)], [*ends, len(own)], strict=True):
            starts = start + np.flatnonzero(~tokenizer.continuation[own[start:stop]])
            if len(starts) > 2:
                yield own[starts[1] : starts[-1]].tolist()


def vocabulary(tokenizer: Tokenizer, rows: Rows, ids: np.ndarray, most: int = 256) -> Finding:
    """Decode the tokens and encode the text again: with the vocabulary of the shards, nearly all pairs of
    neighboring tokens inside words remain; with another one, pieces join to words that it splits elsewhere."""
    kept = total = 0
    joins = tokenizer.continuation
    has_joins = bool(joins.any())

    def pairs_of(ids: list[int]) -> Counter[tuple[int, int]]:
        return Counter(pair for pair in pairwise(ids) if joins[pair[1]] or not has_joins)

    texts = list(_texts(tokenizer, {"sequence_ids": rows["sequence_ids"][:most]}, ids[:most]))
    again = tokenizer.encode_batch([tokenizer.decode(one) for one in texts])
    for before, after in zip(texts, again, strict=True):
        pairs = pairs_of(before)
        kept += (pairs & pairs_of(after)).total()
        total += pairs.total()
    share = kept / total if total else 1.0
    return finding(
        "vocabulary", f"{share:.1%} of the pairs of pieces remain when text is decoded and encoded",
        f"{KEPT_PAIRS[0]:.1%} or more",
        "the shards were built with another vocabulary; set data.vocab to it, or build them again",
        fail=share < KEPT_PAIRS[1], look=share < KEPT_PAIRS[0], number=share,
    )  # fmt: skip


def unknown_tokens(tokenizer: Tokenizer, rows: Rows, ids: np.ndarray) -> Finding:
    """Return the share of unknown tokens in the text."""
    text = (rows["sequence_ids"] > 0) & ~tokenizer.special[ids]
    share = float((ids[text] == tokenizer.unk_id).mean()) if text.any() else 0.0
    look, fail = UNKNOWN if tokenizer.continuation.any() or tokenizer.kind != "wordpiece" else UNKNOWN_OF_WORDS
    pieces = [piece for piece in tokenizer.pieces(range(tokenizer.vocab_size)) if piece[:1] != "["]
    has_capitals = any(piece != piece.lower() for piece in pieces)
    advice = "use a vocabulary of this text, or a larger one (data.vocab)"
    if not getattr(tokenizer, "lower_case", True) and not has_capitals:
        advice = "the vocabulary has no capital letters: set data.lower_case true and build the shards again"
    return finding(
        "unknown tokens", f"{share:.2%} of the tokens", f"at most {look:.0%}", advice,
        fail=share > fail, look=share > look, number=share,
    )  # fmt: skip


def repeated_text(data: DataConfig, tokenizer: Tokenizer, rows: Rows, ids: np.ndarray) -> Finding:
    """Return the share of the windows of ``WINDOW`` tokens in first segments that occur in more rows than there are
    passes over the text (``data.dupe_factor``). Random second segments are drawn with repetition, so they do not
    count."""
    hashes, inside = _windows(tokenizer, rows, ids)
    is_first = rows["token_type_ids"][:, : inside.shape[1]] == 0
    chosen = inside & is_first & (hashes % np.uint64(ONE_OF) == 0)
    _, counts = np.unique(hashes[chosen], return_counts=True)
    share = float(np.maximum(counts - data.dupe_factor, 0).sum() / counts.sum()) if len(counts) else 0.0
    return finding(
        "repeated text", f"{share:.1%} of the windows of {WINDOW} tokens are repetitions",
        f"at most {REPEATED[0]:.0%}", "remove repeated documents: bert-jax data clean",
        fail=share > REPEATED[1], look=share > REPEATED[0], number=share,
    )  # fmt: skip


def copied_rows(data: DataConfig, rows: Rows, ids: np.ndarray) -> Finding:
    """Return the share of the rows that equal another row in text and masks (static masking) or in text and keys
    (dynamic masking). Each pass over the text makes rows with masks and keys of their own, also of text that is
    repeated."""
    own = rows["mlm_positions"] if data.masking == "static" else rows["sequence_keys"]
    long = (rows["sequence_ids"] > 0).sum(axis=1) >= LEAST_COPIED
    whole = np.concatenate([ids, own.astype(ids.dtype)], axis=1)[long]
    different = len({row.tobytes() for row in whole})
    share = 1 - different / len(whole) if len(whole) else 0.0
    look, fail = COPIED
    return finding(
        "copied rows", f"{share:.1%} of the rows are copies of other rows, with the same masks or keys",
        f"at most {look:.0%}",
        "the folder of the shards has the same shard under several names, or several workers built the same one; "
        "build the shards again",
        fail=share > fail, look=share > look, number=share,
    )  # fmt: skip


def _windows(tokenizer: Tokenizer, rows: Rows, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the hash of the ``WINDOW`` tokens from each place on, uint64[N, S - WINDOW + 1], and whether they are
    text of one sequence, bool[N, S - WINDOW + 1]."""
    length = max(ids.shape[1] - WINDOW + 1, 0)
    hashes = np.zeros((len(ids), length), np.uint64)
    inside = np.ones((len(ids), length), bool)
    of_text = (rows["sequence_ids"] > 0) & ~tokenizer.special[ids]
    for offset in range(WINDOW if length else 0):
        part = slice(offset, offset + length)
        hashes = hashes * np.uint64(0x9E3779B97F4A7C15) + ids[:, part].astype(np.uint64) + np.uint64(1)
        inside &= of_text[:, part] & (rows["sequence_ids"][:, part] == rows["sequence_ids"][:, :length])
    return hashes ^ hashes >> np.uint64(29), inside


def held_out_text(
    data: DataConfig, tokenizer: Tokenizer, rows: Rows, held_out: Rows, training_rows: int
) -> list[Finding]:
    """Return the share of the held-out rows that training rows contain, that is, more than half of their windows of
    ``WINDOW`` tokens.

    Windows with unknown tokens or fewer than ``VARIED`` distinct tokens, and boilerplate, which is often in the
    training rows, do not count. ``rows`` are a sample of ``training_rows`` rows, so the share is divided by the
    part of the text in the sample. Returns [] if this part is under ``LEAST_COVERED``.
    """
    covered = 1 - (1 - min(len(rows["input_ids"]) / max(training_rows, 1), 1.0)) ** data.dupe_factor
    known, own = _windows(tokenizer, rows, original_ids(rows))
    windows, times = np.unique(known[own], return_counts=True)
    boilerplate = windows[times > BOILERPLATE * data.dupe_factor]
    ids = original_ids(held_out)
    hashes, inside = _windows(tokenizer, held_out, ids)
    inside &= ~np.isin(hashes, boilerplate)
    row, start = np.nonzero(inside)
    tokens = np.sort(ids[row[:, None], start[:, None] + np.arange(WINDOW)], axis=1)
    is_varied = (np.diff(tokens, axis=1) > 0).sum(axis=1) + 1 >= VARIED
    inside[row, start] = is_varied & (tokens != tokenizer.unk_id).all(axis=1)
    counts = inside.sum(axis=1)
    if covered < LEAST_COVERED or not counts.any():
        return []
    both = (np.isin(hashes, windows) & inside).sum(axis=1)
    share = min(float((2 * both > counts)[counts > 0].mean()) / covered, 1.0)
    look, fail = LEAKED
    return [finding(
        "held-out text", f"about {share:.0%} of the held-out rows are also in the training text",
        f"at most {look:.0%}",
        "the held-out loss is too low; take held-out documents out of the training text, and remove repeated ones "
        "(bert-jax data clean)",
        fail=share > fail, look=share > look, number=share,
    )]  # fmt: skip


def padding_share(data: DataConfig, rows: Rows) -> Finding:
    """Return the share of padding in the rows."""
    share = float((rows["sequence_ids"] == 0).mean())
    return finding(
        "padding share", f"{share:.1%} of the positions are padding", f"at most {PADDING:.0%}",
        "set data.packing best_fit, or a smaller data.seq_length", look=share > PADDING, number=share,
    )  # fmt: skip


# ------------------------------------------------------------------ masks


def _predicted(rows: Rows) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return row, position and label of each predicted token, int[P] each."""
    row, slot = np.nonzero(rows["mlm_weights"] > 0)
    return row, rows["mlm_positions"][row, slot], rows["mlm_labels"][row, slot]


def _mask_in(tokenizer: Tokenizer, inputs: np.ndarray) -> int:
    """Return the id that stands at masked places: that of the mask token, or another one that is the input of more
    than ``STANDS_IN`` of the predicted tokens. ``inputs``: int[P]."""
    counts = np.bincount(inputs, minlength=tokenizer.vocab_size)
    return int(counts.argmax()) if counts.max() > STANDS_IN * counts.sum() else tokenizer.mask_id


def masks(data: DataConfig, tokenizer: Tokenizer, rows: Rows) -> Finding:
    """Compare the share of predicted tokens and their replacements with the options and with common practice."""
    row, position, label = _predicted(rows)
    wanted = data.final_masking[0] if data.final_masking else data.mask_fraction
    count = max(len(row), 1)
    share = len(row) / max(int((rows["sequence_ids"] > 0).sum()), 1)
    inputs = rows["input_ids"][row, position]
    masked = float((inputs == tokenizer.mask_id).sum() / count)
    special = float(tokenizer.special[label].sum() / count)
    value = f"{share:.1%} of the tokens are predicted, {masked:.1%} of them as {tokenizer.special_pieces[4]}"
    expected = f"{wanted:.0%} and {data.mask_token_share:.0%}"
    advice, fail, look = "", False, False
    is_dynamic = data.masking == "dynamic"
    found = _mask_in(tokenizer, inputs)
    if share > MOST_PREDICTED:
        expected, fail = "10% to 50%", True
        advice = "too little text remains to predict from; set data.mask_fraction 0.15 to 0.3"
    elif share > 1.15 * wanted + 0.01 or abs(masked - data.mask_token_share) > 0.05 + count**-0.5:
        advice, fail = "the shards have other masks than the options; build them again", True
        if is_dynamic:
            advice = "the code that masks rows when they are read does not follow the options"
        if found != tokenizer.mask_id:
            value += f", {(inputs == found).mean():.1%} as {tokenizer.pieces([found])[0]!r} (id {found})"
            advice = (
                f"the code that masks takes {found} for the id of {tokenizer.special_pieces[4]}, which is "
                f"{tokenizer.mask_id} in this vocabulary; correct it and mask again"
            )
    elif special > 0 and not data.mask_special_tokens:
        value += f"; {special:.1%} of them are special tokens"
        advice, fail = "the shards predict special tokens; build them again", True
        if is_dynamic:
            advice = "the code that masks rows when they are read predicts special tokens"
    elif share < LEAST_OF_SHARE * wanted:
        advice, look = f"data.max_predictions {data.max_predictions} limits it; raise it", True
    return finding("masks", value, expected, advice, fail=fail, look=look, number=share)


def labels(data: DataConfig, tokenizer: Tokenizer, rows: Rows) -> Finding:
    """Compare the labels with the tokens at their places: predicted tokens that remain in the text have their own
    id as the label, and the label is no more often the token beside it than in any text."""
    row, position, label = _predicted(rows)
    ids, length = rows["input_ids"], rows["input_ids"].shape[1]
    mask_id = _mask_in(tokenizer, ids[row, position])
    predicted = np.zeros(ids.shape, bool)
    predicted[row, position] = True

    def match(distance: int) -> float:
        other = position + distance
        fits = (other >= 0) & (other < length)
        own, at = row[fits], other[fits]
        seen = (ids[own, at] != mask_id) if not distance else ~predicted[own, at]
        return float((ids[own, at] == label[fits])[seen].mean()) if seen.any() else 0.0

    kept = 1 - data.mask_token_share - data.random_token_share
    # Without such places, nothing is known.
    has_kept = kept > 0.01 and bool((ids[row, position] != mask_id).any())
    own, beside = match(0), {distance: match(distance) for distance in (-1, 1)}
    expected = kept / (kept + data.random_token_share) if has_kept else 0.0
    nearest = max(beside, key=lambda distance: beside[distance])
    is_shifted = beside[nearest] > 0.5 > own
    seen = int((ids[row, position] != mask_id).sum())
    too_often = seen >= LEAST_SEEN and own > expected + TOO_OFTEN * (1 - expected)
    value, advice = f"{own:.0%} of the labels equal the token in the text", "the labels belong to other text"
    if is_shifted:
        side = "before" if nearest < 0 else "after"
        value = f"{beside[nearest]:.0%} of the labels equal the token {side} their place"
        advice = "they are shifted by one; subtract the shift where labels are made"
    if too_often:
        advice = "labels are read after tokens were replaced; read them before, from the text"
    return finding(
        "labels", value, f"about {expected:.0%}, at places that are not masked", advice,
        fail=is_shifted or too_often or own < 0.5 * expected, number=own,
    )  # fmt: skip


# ------------------------------------------------------------------ rows


def position_ids(rows: Rows) -> Finding:
    """Check that the positions count from 0 in each sequence of a row."""
    sequence = rows["sequence_ids"]
    used = sequence > 0
    starts = used.copy()
    starts[:, 1:] &= sequence[:, 1:] != sequence[:, :-1]
    column = np.arange(sequence.shape[1])
    first = np.maximum.accumulate(np.where(starts, column, 0), axis=1)
    wrong = float((rows["position_ids"] != column - first)[used].mean()) if used.any() else 0.0
    return finding(
        "position ids", f"{wrong:.1%} of the tokens have another position than their place in their sequence",
        "0%", "positions must restart at 0 in each sequence of a packed row", fail=wrong > 0, number=wrong,
    )  # fmt: skip


def sentence_pairs(rows: Rows) -> Finding:
    """Return the share of random or swapped pairs."""
    weights = rows["nsp_weights"] > 0
    share = float(rows["nsp_labels"][weights].mean()) if weights.any() else 0.0
    low, high = RANDOM_PAIRS
    return finding(
        "sentence pairs", f"{share:.1%} are random or swapped", f"{low:.0%} to {high:.0%}",
        "documents have too few sentences, or blank lines are between all of them; set data.line paragraph",
        look=not low <= share <= high, number=share,
    )  # fmt: skip


def sentence_order(tokenizer: Tokenizer, rows: Rows, ids: np.ndarray) -> list[Finding]:
    """Compare what the two segments of the first pair of a row share if the second one follows the first and if it
    is random.

    Neighbors in a text share more words, weighted by their rarity, than random segments do. The result is the
    probability that a pair of neighbors shares more than a random pair; equal pairs count half. Returns [] with
    fewer than ``LEAST_PAIRS`` pairs of a kind.
    """
    size, count = tokenizer.vocab_size, len(ids)
    is_pair, is_random = rows["nsp_weights"][:, 0] > 0, rows["nsp_labels"][:, 0] > 0
    neighbors, others = is_pair & ~is_random, is_pair & is_random
    if min(neighbors.sum(), others.sum()) < LEAST_PAIRS:
        return []
    words = (rows["sequence_ids"] == 1) & ~tokenizer.special[ids]
    keys = np.arange(count)[:, None] * size + ids
    first, second = (np.unique(keys[words & (rows["token_type_ids"] == kind)]) for kind in (0, 1))
    in_rows = np.bincount(np.union1d(first, second) % size, minlength=size)
    rarity = np.log(count / np.maximum(in_rows, 1))

    def weight(keys: np.ndarray) -> np.ndarray:
        return np.bincount(keys // size, rarity[keys % size], minlength=count)

    both = weight(np.intersect1d(first, second, assume_unique=True))
    shared = both / np.maximum(np.sqrt(weight(first) * weight(second)), 1e-9)
    low = np.sort(shared[others])
    below = np.searchsorted(low, shared[neighbors]) + np.searchsorted(low, shared[neighbors], side="right")
    chance = float(below.mean() / (2 * len(low)))
    return [finding(
        "sentence order", "a second segment shares more words with the first than a random one does in "
        f"{chance:.0%} of the comparisons", f"{NEIGHBORS:.0%} or more",
        "neighboring lines of the text are unrelated (shuffled or sorted), so pairs cannot be learned; use text "
        "in its order, or data.next_sentence none",
        look=chance < NEIGHBORS, number=chance,
    )]  # fmt: skip


def few_documents(documents: int) -> Finding:
    """Return the number of documents, which blank lines separate in plain text."""
    look, fail = DOCUMENTS
    return finding(
        "documents", f"{documents:,} training documents", f"{look} or more with data.next_sentence nsp",
        "separate the documents of the text by blank lines, use more documents, or set data.next_sentence none",
        fail=documents < fail, look=documents < look, number=float(documents),
    )  # fmt: skip
