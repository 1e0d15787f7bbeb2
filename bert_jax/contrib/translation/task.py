"""The task of ``task.kind translation``: pairs of texts to batches, loss, search, decoding, metrics.

A record has the source as ``text`` and its translation as ``label``. Shapes: B rows, S tokens per row, U units per
row, K hypotheses, T most tokens of a translation, V vocabulary.
"""

from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from bert_jax.config import HeadsConfig, TaskSettings
from bert_jax.config.finetune import FinetuneConfig
from bert_jax.contrib.translation.config import options_of
from bert_jax.contrib.translation.metrics import corpus_score, require_sacrebleu, signatures
from bert_jax.contrib.translation.network import (
    END_ID,
    LENGTH_PENALTY,
    MOST_TOKENS,
    OUTPUT_IDS,
    SOURCE_MASK,
    TARGET_IDS,
)
from bert_jax.metrics import Score
from bert_jax.model.bert import BertOutput, present
from bert_jax.objectives.objective import Sums, denominator, log_normalizer
from bert_jax.records import Record
from bert_jax.tasks.classes import Splits
from bert_jax.tasks.task import Encoded, Level, ModelInput, Outputs, Prediction, Prepared, Target, Task
from bert_jax.tasks.text_classification import round_significant
from bert_jax.tokenization import Tokenizer

# A translation has at most this many times the tokens of its source, and so many more.
_TIMES, _MORE = 2, 10
_LABELS, _LABEL_MASK = "labels", "label_mask"


class TranslationTask(Task):
    """Translation of single texts."""

    def __init__(
        self, config: FinetuneConfig | TaskSettings, tokenizer: Tokenizer, records: Sequence[Record] = ()
    ) -> None:
        super().__init__(config, tokenizer, records)
        self.smoothing = 0.0 if isinstance(config, TaskSettings) else options_of(config).label_smoothing
        settings = self.settings
        self.targets = {  # type: ignore[misc]
            TARGET_IDS: Target("token", np.int32),
            SOURCE_MASK: Target("token", np.int32),
            _LABELS: Target("token", np.int32),
            _LABEL_MASK: Target("token", np.float32),
            OUTPUT_IDS: Target("unit", np.int32, (settings.beams, settings.max_length)),
            END_ID: Target("unit", np.int32),
            MOST_TOKENS: Target("unit", np.int32),
            LENGTH_PENALTY: Target("unit", np.float32),
        }

    @classmethod
    def prepare(cls, config: FinetuneConfig, splits: Splits, tests: Sequence[str]) -> Prepared:
        """Check that the training records are pairs, and that the others can be scored; see ``Task.prepare``."""
        for record in splits["train"]:
            if record.label is None or not record.label.strip() or not record.text.strip():
                raise ValueError(f"{record.source}: no text or no translation; remove the record")
        scored = [one for split in splits if split != "train" for one in splits[split] if one.label is not None]
        if not scored:
            return config, dict(splits), []
        require_sacrebleu()
        return config, dict(splits), signatures([record.label or "" for record in scored])

    @property
    def heads(self) -> HeadsConfig:
        return HeadsConfig()

    # ------------------------------------------------------------------ records to units

    def featurize(self, records: Sequence[Record], *, training: bool) -> list[ModelInput]:
        tokenizer, most = self.tokenizer, self.settings.max_length
        sources = tokenizer.encode_batch([record.text for record in records])
        targets = tokenizer.encode_batch([record.label or "" for record in records])
        units = []
        for i, (record, source_ids, target_ids) in enumerate(zip(records, sources, targets, strict=True)):
            source, _ = tokenizer.build_inputs(source_ids, None, most)
            cut = len(source_ids) + 2 > most
            target = [*target_ids[: most - 1], tokenizer.end_id] if self.is_labelled(record) else []
            unit = self._unit(i, source, target, for_search=not training)
            units.append(ModelInput(i, unit.sequences, unit.targets, unit.weight, extra=cut))
        return units

    def _unit(self, record: int, source: Sequence[int], target: Sequence[int], *, for_search: bool) -> ModelInput:
        """Return the unit of a source and its translation, as ids; an empty translation is unknown."""
        tokenizer, settings = self.tokenizer, self.settings
        length = max(len(source), len(target))

        def padded(values: Sequence[int], fill: int = 0) -> np.ndarray:
            return np.array([*values, *[fill] * (length - len(values))], np.int32)

        inputs = [tokenizer.cls_id, *target[:-1]] if target else []
        arrays: dict[str, np.ndarray | float] = {
            SOURCE_MASK: padded([1] * len(source)),
            TARGET_IDS: padded(inputs, tokenizer.pad_id),
            _LABELS: padded(target),
            _LABEL_MASK: padded([1] * len(target)).astype(np.float32),
        }
        if for_search:
            shape = settings.beams, settings.max_length
            arrays |= {
                OUTPUT_IDS: np.full(shape, tokenizer.cls_id, np.int32), END_ID: tokenizer.end_id,
                MOST_TOKENS: min(settings.max_length, _TIMES * len(source) + _MORE),
                LENGTH_PENALTY: settings.length_penalty,
            }  # fmt: skip
        ids = Encoded(padded(source, tokenizer.pad_id), np.zeros(length, np.int32))
        return ModelInput(record, (ids,), arrays, float(bool(target)))

    # ------------------------------------------------------------------ on the device

    def denominators(self, batch: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """Return the number of tokens of the translations in the global batch."""
        return {"loss": denominator(batch[_LABEL_MASK])}

    def loss(self, output: BertOutput, batch: Mapping[str, jax.Array], *, axis: str | None) -> Sums:
        """Return ``loss``, the cross-entropy of the next token with label smoothing (the share is spread over the
        whole vocabulary), and ``nll`` and ``accuracy`` without it."""
        weights_BxS = batch[_LABEL_MASK]
        nll_BxS, uniform_BxS, is_right_BxS = _token_losses(present(output.mlm_logits), batch[_LABELS])
        smooth_BxS = (1 - self.smoothing) * nll_BxS + self.smoothing * uniform_BxS if self.smoothing else nll_BxS
        total = jnp.sum(weights_BxS)
        values = {"loss": smooth_BxS, "nll": nll_BxS, "accuracy": is_right_BxS.astype(jnp.float32)}
        return {name: (jnp.sum(value * weights_BxS), total) for name, value in values.items()}

    def outputs(self, output: BertOutput, batch: Mapping[str, jax.Array]) -> dict[str, tuple[Level, jax.Array]]:
        nll_BxS, *_ = _token_losses(present(output.mlm_logits), batch[_LABELS])
        return {
            "ids": ("unit", present(output.translations)),
            "nll": ("token", nll_BxS * batch[_LABEL_MASK]),
        }

    # ------------------------------------------------------------------ outputs to predictions and metrics

    def decode(self, records: Sequence[Record], units: Sequence[ModelInput], outputs: Outputs) -> list[Prediction]:
        """Return for each record ``label``, its translation, and with a reference ``gold`` and ``score``, the
        log-probability of the reference in nats."""
        pieces, predictions = self.tokenizer.vocab_size, list[Prediction]()
        for record, unit, output in zip(records, units, outputs, strict=True):
            ids = [int(i) for i in output["ids"] if 0 <= i < pieces and not self.tokenizer.special[i]]
            one: Prediction = {"label": self.tokenizer.decode(ids)}
            if self.is_labelled(record):
                one |= {"gold": record.label or "", "score": round_significant(-output["nll"].sum())}
            if unit.extra:
                one["truncated"] = True
            predictions.append(one)
        return predictions

    def scores(self, records: Sequence[Record], predictions: Sequence[Prediction]) -> list[Score]:
        translations, references = [one["label"] for one in predictions], [record.label or "" for record in records]
        sums = np.array([one["score"] for one in predictions])
        lengths = [min(len(ids) + 1, self.settings.max_length) for ids in self.tokenizer.encode_batch(references)]
        counts = np.array(lengths)

        def nll(indices: np.ndarray) -> float:
            return float(-sums[indices].sum() / counts[indices].sum())

        found = [corpus_score(name, translations, references) for name in ("bleu", "chrf")]
        return [*found, Score("nll", nll, higher_is_better=False)]


def _token_losses(logits_BxSxV: jax.Array, labels_BxS: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the negative log-likelihood of the labels, its mean over all tokens of the vocabulary, and whether the
    label is the most probable token, each [B, S]."""
    is_label = jnp.arange(logits_BxSxV.shape[-1]) == labels_BxS[..., None]
    of_label_BxS = jnp.sum(jnp.where(is_label, logits_BxSxV, 0.0), axis=-1)
    log_sum_BxS, largest_BxS = log_normalizer(logits_BxSxV)
    return log_sum_BxS - of_label_BxS, log_sum_BxS - jnp.mean(logits_BxSxV, axis=-1), of_label_BxS >= largest_BxS
