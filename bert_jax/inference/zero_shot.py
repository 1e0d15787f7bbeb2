"""Classification with labels that the model was not trained on, by entailment or by the words at a mask.

* Entailment (Yin et al. 2019, arXiv:1909.00161): a model trained on natural language inference reads the text
  together with a hypothesis for every label.
* Prompts (Schick and Schütze 2021, arXiv:2001.07676): a masked-LM model reads the text in a pattern with a mask;
  the score of a label follows from the logits of its words (its verbalizer) at the mask. No parameter is trained.

Shapes: B rows, C sequences per row, N classes of the head, W words of all labels.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from bert_jax.inference.batching import BatchOptions, DeviceOutputs, Outputs
from bert_jax.inference.engine import WINDOW, Engine, checked_texts
from bert_jax.inference.predict import task_of, task_program
from bert_jax.json_values import Json
from bert_jax.metrics.classification import classification_scores, multi_label_scores
from bert_jax.metrics.resampling import Interval, confidence_intervals
from bert_jax.model.bert import bert_output, present
from bert_jax.model.canonical import Params
from bert_jax.tasks.task import ModelInput, Prediction
from bert_jax.tasks.text_classification import class_predictions, multi_label_predictions, probability_table
from bert_jax.tasks.truncation import cut_text

HYPOTHESIS = "This text is about {}."
_LABEL, _TEXT = "{}", "{text}"
# Logits over the vocabulary are large, so fewer texts are processed together.
_PROMPT_WINDOW = 1024
_SCORES = ("accuracy", "f1_macro", "auroc", "mean_average_precision")

Labels = Mapping[str, Sequence[str]] | Sequence[str]
# For every text: the logit of each word, float64[W], and True if the text was truncated.
Logits = Iterator[tuple[np.ndarray, bool]]


def zero_shot(
    loaded: Engine,
    texts: Iterable[str],
    labels: Labels,
    *,
    template: str | None = None,
    multi_label: bool = False,
    entailment: str | None = None,
    batches: BatchOptions = BatchOptions(),
) -> Iterator[Prediction]:
    """Yield one JSON-serializable object per text, in order, with the fields that ``predict`` yields for a sequence
    head; ``texts`` may be endless.

    The logit of a label is the mean over its words; ``label``, ``score`` and ``probabilities`` follow from a
    softmax over the labels. The form of the template defines the logit of a word:

    * "... {} ...": the logit of entailment of the hypothesis with the word in place of {}. With ``multi_label`` it
      is the logit of entailment against contradiction (against all other classes if the model has no contradiction
      class), ``probabilities`` are sigmoids, and ``labels`` are those with a probability of at least 0.5.
    * "... {text} ... [MASK] ...": the logit of the word at the mask.

    A text that is too long is truncated (of an inference model as in its run, else at the end), and ``truncated``
    is true.

    Args:
        labels: a mapping from each label to its words, or a sequence of labels, each of which is its own word.
        template: hypothesis or prompt; None: :data:`HYPOTHESIS`.
        entailment: name of the class of entailment; None: the class whose name begins with "entail".
        batches: see ``BatchOptions``.

    Raises ``ValueError`` for a model without the head or class, a template that has another form or leaves no room
    for a text, and words for a mask that are not one piece of the vocabulary.
    """
    words = _words_of(labels, multi_label)
    flat = [word for words_of_label in words.values() for word in words_of_label]
    template = HYPOTHESIS if template is None else template
    places = template.count(_LABEL), template.count(_TEXT)
    if places == (1, 0):
        logits = _by_entailment(loaded, texts, flat, template, multi_label, entailment, batches)
    elif places == (0, 1):
        if multi_label or entailment is not None:
            what = "several labels per text require" if multi_label else "an entailment class requires"
            needed = f"{what} a hypothesis, with {{}} in place of the label"
            raise ValueError(f"template: {template!r} has a mask, but {needed}")
        logits = _by_prompt(loaded, texts, flat, template, batches)
    else:
        allowed = "a hypothesis with one {} for the label, or a prompt with one {text} and a mask"
        raise ValueError(f"template: {template!r} is not allowed; use {allowed}")
    ends = np.cumsum([len(words_of_label) for words_of_label in words.values()])[:-1]
    decode = multi_label_predictions if multi_label else class_predictions

    def prediction(row_W: np.ndarray, truncated: bool) -> Prediction:
        means = np.array([[part.mean() for part in np.split(row_W, ends)]])
        return {**decode([*words], means)[0], **({"truncated": True} if truncated else {})}

    return (prediction(row_W, truncated) for row_W, truncated in logits)


def _words_of(labels: Labels, multi_label: bool) -> dict[str, Sequence[str]]:
    """Return the words of every label, in order; raise ``ValueError`` for labels that cannot be distinguished."""
    pairs = [*(labels.items() if isinstance(labels, Mapping) else ((label, (label,)) for label in labels))]
    least = 1 if multi_label else 2
    if len(pairs) < least:
        given = ", ".join(label for label, _ in pairs) or "none"
        raise ValueError(f"labels: too few labels ({given}); give {least} or more")
    seen: dict[str, str] = {}
    for label, words in pairs:
        if isinstance(words, str) or not words or not all(word.strip() for word in words):
            raise ValueError(f"labels: {label!r} has the words {words!r}; give a list of non-empty words")
        for word in words:
            if word in seen:
                raise ValueError(f"labels: {word!r} belongs to {seen[word]!r} and {label!r}; use each word once")
            seen[word] = label
    return dict(pairs)


# ------------------------------------------------------------------ entailment


def _by_entailment(
    loaded: Engine,
    texts: Iterable[str],
    words: Sequence[str],
    template: str,
    multi_label: bool,
    entailment: str | None,
    batches: BatchOptions,
) -> Logits:
    yes, no = _entailment(loaded, entailment)
    decoder, tokenizer = task_of(loaded, "sequence"), loaded.need_tokenizer()
    settings = decoder.settings
    hypotheses = tokenizer.encode_batch([template.replace(_LABEL, word) for word in words])
    # The longest hypothesis determines the length of the text, so that all labels are compared on the same text.
    taken = max(map(len, hypotheses)) + len(tokenizer.build_inputs([], [])[0])
    room = _room(settings.max_length, taken, template)

    def featurize(part: list[str]) -> list[ModelInput]:
        units = []
        for number, (text, ids) in enumerate(zip(part, tokenizer.encode_batch(part), strict=True)):
            kept = cut_text(text, ids, room, settings, tokenizer)[0]
            for hypothesis in hypotheses:
                orders = ((kept, hypothesis), (hypothesis, kept))[: decoder.sequences_per_unit]
                pairs = tuple(loaded.build(*order, settings.max_length) for order in orders)
                units.append(ModelInput(number, pairs, extra=len(ids) > room))
        return units

    windows = loaded.windows(
        checked_texts(texts), featurize, task_program(loaded, decoder, "sequence"), sequences=decoder.sequences_of,
        window=max(1, WINDOW // len(words)), batches=batches,
    )  # fmt: skip

    def rows(units: Sequence[ModelInput], outputs: Sequence[Outputs]) -> Logits:
        logits = np.stack([output["logits"] for output in outputs]).astype(np.float64)
        scores = logits[:, yes] - np.logaddexp.reduce(logits[:, no], axis=1) if multi_label else logits[:, yes]
        return zip(scores.reshape(-1, len(words)), [unit.extra for unit in units[:: len(words)]], strict=True)

    return (row for _, units, outputs in windows for row in rows(units, outputs))


def _entailment(loaded: Engine, entailment: str | None) -> tuple[int, list[int]]:
    """Return the index of the entailment class, and the indices of the contradiction class or, if the model has no
    such class, of all other classes."""
    heads = loaded.spec.heads
    names = [name.lower() for name in heads.sequence_labels]
    if len(names) < 2 or heads.problem != "single_label":
        present = ", ".join(heads.present()) or "none"
        needed = "a model of natural language inference, or a template with {text} and a mask"
        raise ValueError(f"{loaded.name}: no head with classes (heads: {present}); use {needed}")
    wanted = [name for name in names if name.startswith("entail")] if entailment is None else [entailment.lower()]
    yes = [i for i, name in enumerate(names) if name in wanted]
    if len(yes) != 1:
        what = "no single class of entailment" if entailment is None else f"no class {entailment!r}"
        raise ValueError(f"{loaded.name}: {what}; set --entailment to one of {', '.join(heads.sequence_labels)}")
    others = [i for i in range(len(names)) if i != yes[0]]
    return yes[0], [i for i in others if names[i].startswith("contradict")] or others


def _room(limit: int, taken: int, template: str) -> int:
    """Return the number of tokens that remain for the text if the template has ``taken`` of at most ``limit``
    tokens. Raises ``ValueError`` if none remain."""
    if taken >= limit:
        room = f"leaves no room for a text, because it has {taken} of {limit} tokens"
        raise ValueError(f"template: {template!r} {room}; shorten the template or the words of the labels")
    return limit - taken


# ------------------------------------------------------------------ prompts


def _by_prompt(
    loaded: Engine, texts: Iterable[str], words: Sequence[str], template: str, batches: BatchOptions
) -> Logits:
    if not loaded.spec.heads.mlm:
        raise ValueError(f"{loaded.name}: no masked-LM head; use a template without a mask, or another model")
    tokenizer, model = loaded.need_tokenizer(), loaded.model.clone(sentence=None)
    tokenizer.require_mask(loaded.name)
    parts = tokenizer.mask_pattern.split(template)
    mask = tokenizer.pieces([tokenizer.mask_id])[0]
    if len(parts) != 2:
        raise ValueError(f"template: {template!r} contains {mask} {len(parts) - 1} times; write it once")
    written_apart = template[: template.index(mask)][-1:].isspace()
    ids_W = np.array([_piece(loaded, word, written_apart) for word in words], np.int32)

    def prompts(part: Sequence[str]) -> list[list[int]]:
        # The two sides are encoded separately, because "[MASK]" in a text is plain text.
        before, after = (tokenizer.encode_batch([side.replace(_TEXT, text) for text in part]) for side in parts)
        return [[*a, tokenizer.mask_id, *b] for a, b in zip(before, after, strict=True)]

    special = len(tokenizer.build_inputs([])[0])
    _room(loaded.spec.max_length, len(prompts([""])[0]) + special, template)
    limit = loaded.spec.max_length - special

    def cut(text: str, ids: list[int]) -> list[int]:
        """Return the prompt with the longest prefix of ``text`` that fits. The text is truncated between
        characters, not tokens, because it is encoded together with the template."""
        if len(ids) <= limit:
            return ids
        ends = [end for _, end in tokenizer.encode_with_offsets(text)[1]]
        while len(ids) > limit:
            ends = ends[: limit - len(ids)]
            (ids,) = prompts([text[: ends[-1]] if ends else ""])
        return ids

    def featurize(part: list[str]) -> list[ModelInput]:
        return [
            ModelInput(number, (loaded.build(cut(text, ids)),), extra=len(ids) > limit)
            for number, (text, ids) in enumerate(zip(part, prompts(part), strict=True))
        ]

    def run(params: Params, batch: dict[str, jax.Array], ids_W: jax.Array) -> DeviceOutputs:
        # Every sequence has one mask, and the masks of a row are in the order of their slots.
        is_mask_BxS = (batch["input_ids"] == tokenizer.mask_id).astype(jnp.int32)
        count = min(batch["cls_positions"].shape[1], is_mask_BxS.shape[1])
        _, positions_BxC = jax.lax.top_k(is_mask_BxS, count)
        output = bert_output(model.apply({"params": params}, {**batch, "mlm_positions": positions_BxC}))
        return {"unit": {"logits": present(output.mlm_logits)[..., ids_W]}}

    windows = loaded.windows(
        checked_texts(texts), featurize, loaded.program("prompt", run), ids_W,
        window=_PROMPT_WINDOW, batches=batches,
    )  # fmt: skip
    return (
        (output["logits"].astype(np.float64), unit.extra)
        for _, units, outputs in windows
        for unit, output in zip(units, outputs, strict=True)
    )


def _piece(loaded: Engine, word: str, written_apart: bool) -> int:
    """Return the id of ``word``, which must be one piece. With ``written_apart``, the word is encoded with a
    leading space."""
    tokenizer = loaded.need_tokenizer()
    ids = tokenizer.encode(f" {word}" if written_apart else word)
    if len(ids) != 1 or ids[0] == tokenizer.unk_id:
        pieces = " ".join(tokenizer.pieces(ids))
        what = f"is not one piece of the vocabulary but {len(ids)}" if len(ids) != 1 else "is not in the vocabulary"
        raise ValueError(f"labels: {word!r} {what} ({pieces}); choose another word")
    return ids[0]


# ------------------------------------------------------------------ right answers


def right_answer(value: Json, labels: Sequence[str], multi_label: bool) -> str | list[str] | None:
    """Return the ``label`` of an input or, with ``multi_label``, its ``labels``; None if the input has none.

    Raises ``ValueError`` for a value that is not in ``labels``.
    """
    name = "labels" if multi_label else "label"
    right = value.get(name) if isinstance(value, Mapping) else None
    if right is None:
        return None
    names = [str(one) for one in right] if multi_label and isinstance(right, list) else [str(right)]
    for one in names:
        if one not in labels:
            allowed = f"{', '.join(labels)} (use LABEL=WORD to set other words for a label)"
            raise ValueError(f"{str(value)[:80]}: {name}: {one!r} is not allowed; use {allowed}")
    return names if multi_label else names[0]


def scores(
    right: Sequence[str | list[str]], rows: Sequence[Prediction], labels: Sequence[str], multi_label: bool
) -> dict[str, Interval]:
    """Return accuracy, f1_macro, auroc and, with ``multi_label``, mean_average_precision, each with a 95%
    confidence interval. ``rows`` are the predictions, and ``right`` are the correct answers. Undefined scores are
    omitted.

    auroc and mean_average_precision depend on the order of the probabilities only, so they can be high even if one
    word is more likely than another for every text.
    """
    probabilities = probability_table(rows, labels)
    if multi_label:
        found = (right, [row["labels"] for row in rows])
        gold, marked = (np.array([[label in one for label in labels] for one in each], int) for each in found)
        all_scores = multi_label_scores(gold, marked, labels, probabilities)
    else:
        both = (right, [row["label"] for row in rows])
        gold, predicted = (np.array([labels.index(one) for one in answers]) for answers in both)
        all_scores = classification_scores(gold, predicted, labels, probabilities)
    chosen = [score for score in all_scores if score.name in _SCORES]
    intervals = confidence_intervals(chosen, len(right), seed=0)
    named = {score.name: interval for score, interval in zip(chosen, intervals, strict=True)}
    return {name: interval for name, interval in named.items() if not np.isnan(interval.value)}
