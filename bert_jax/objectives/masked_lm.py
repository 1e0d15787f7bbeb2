"""Masked language model and sentence-pair loss (Devlin et al. 2018; google-research/bert
``run_pretraining.py``)."""

import html
import itertools
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from bert_jax.batch import PretrainSource
from bert_jax.config import PretrainConfig
from bert_jax.model import BertForPretraining, BertModel, BertOutput
from bert_jax.model.bert import bert_output, present
from bert_jax.model.canonical import Params
from bert_jax.model.dropout import DropoutKey
from bert_jax.model.flops import training_flops_per_sequence
from bert_jax.objectives.display import Column, Display, Examples, MaskSample, Panel, ReportData, Sample, Tile
from bert_jax.objectives.objective import (
    Aux,
    Batch,
    PretrainObjective,
    Summed,
    Sums,
    padding_sums,
    weighted_cross_entropy,
    z_loss,
)
from bert_jax.tokenization import Tokenizer

# The reference adds this to the MLM weight, so that the loss of a batch without masked positions is 0.
MLM_EPSILON = 1e-5
# Samples of a held-out batch: number of rows, of masked words per row, and of predictions per word.
SAMPLE_ROWS, SAMPLE_MASKS, SAMPLE_PIECES = 8, 3, 5
_BASELINES = ("unigram_cross_entropy", "nsp_constant_accuracy")
SENTENCE_ENDS = (".", "!", "?", "。")


def _sections(data: ReportData) -> list[Examples]:
    masks = data.get("filled_masks")
    if not masks:
        return []
    note = "The best guess is filled in: green if it is the original word, yellow if not. Below: the original word"
    texts = [str(item.get("text", "")) for item in masks]
    return [Examples("Filled masks", f"{note} and the guesses.", texts, [*map(_filled_masks, masks)])]


COLUMNS = (
    Column("mlm {}", "mlm_loss", accuracy="mlm_accuracy"),
    Column("nsp {}", "nsp_loss", accuracy="nsp_accuracy"),
)
PANELS = (
    Panel("masked-token loss (nats)", "mlm_loss", baseline=("unigram_loss", "unigram")),
    Panel("masked-token accuracy", "mlm_accuracy", percent=True),
    Panel("sentence-pair loss (nats)", "nsp_loss"),
    Panel(
        "sentence-pair accuracy", "nsp_accuracy", percent=True, baseline=("constant_accuracy", "constant answer")
    ),
)


class MaskedLm(PretrainObjective):
    """Cross-entropy of masked tokens, plus cross-entropy of sentence pairs unless ``data.next_sentence`` is
    none."""

    display = Display(
        keys=("mlm_loss", "nsp_loss", "mlm_accuracy", "nsp_accuracy"),
        columns=COLUMNS,
        panels=PANELS,
        tiles=(
            Tile("held-out masked-token loss", "mlm_loss", ("unigram_loss", "by word frequencies alone (unigram)")),
            Tile("held-out masked-token accuracy", "mlm_accuracy"),
            Tile("held-out sentence-pair accuracy", "nsp_accuracy", ("constant_accuracy", "by a constant answer")),
        ),
        sections=_sections,
    )

    @staticmethod
    def make_model(config: PretrainConfig, mesh: Mesh | None) -> BertModel:
        return BertForPretraining(config.model, config.execution, config.has_nsp, mesh)

    def denominators(self, batch: Batch) -> dict[str, jax.Array]:
        denominators = {"mlm_loss": jnp.sum(batch["mlm_weights"]) + MLM_EPSILON}
        if self.config.objective.z_loss:
            denominators["mlm_z_loss"] = denominators["mlm_loss"]
        if self.model.heads.nsp:
            denominators["nsp_loss"] = jnp.maximum(jnp.sum(batch["nsp_weights"]), MLM_EPSILON)
        return denominators

    def sums(self, params: Params, aux: Aux, batch: Batch, key: DropoutKey | None, *, axis: str | None) -> Summed:
        output = self.model.apply({"params": params}, batch, key)
        with jax.named_scope("mlm_loss"):  # so that a plan attributes its time to the head
            sums = weighted_cross_entropy("mlm", output.mlm_logits, batch["mlm_labels"], batch["mlm_weights"])
            sums |= z_loss("mlm", self.config.objective.z_loss, output.mlm_logits, batch["mlm_weights"])
        return sums | self.sequence_sums(output, batch) | padding_sums(batch["sequence_ids"]), aux.carried

    def sequence_sums(self, output: BertOutput, batch: Batch) -> Sums:
        """Return (sum, weight) of the losses and metrics of whole sequences."""
        if output.nsp_logits is None:
            return {}
        return weighted_cross_entropy("nsp", output.nsp_logits, batch["nsp_labels"], batch["nsp_weights"])

    def flops_per_sequence(self) -> float:
        shape = self.row_shape
        of_row = training_flops_per_sequence(
            self.config.model,
            seq_length=shape.seq_length,
            max_predictions=shape.max_predictions,
            has_nsp=self.config.has_nsp,
        )
        return of_row / shape.sequences

    def evaluation(self, totals: Mapping[str, np.ndarray]) -> dict[str, float]:
        values = super().evaluation(totals)
        values["loss"] = values.get("mlm_loss", 0.0) + values.get("nsp_loss", 0.0)
        values["targets"] = int(totals["mlm_loss"][1]) if "mlm_loss" in totals else 0
        return values

    def baselines(self, source: PretrainSource) -> dict[str, float | None]:
        values = {"unigram_cross_entropy": source.unigram_cross_entropy()}
        return values | ({"nsp_constant_accuracy": source.constant_accuracy()} if self.config.has_nsp else {})

    def samples(self, params: Params, tokenizer: Tokenizer, batch: Mapping[str, np.ndarray]) -> list[Sample]:
        """Return predictions of a few masked words in the first rows of ``batch``, computed on one device.

        All other masks are undone, so that the texts are readable. For each row, the result contains ``text``, its
        sentences with [MASK]s, and ``masks``: for each mask the best pieces with their probabilities, and the
        answer.
        """
        features = {name: np.array(values[:SAMPLE_ROWS]) for name, values in batch.items()}
        whole = self.config.data.mask_unit != "token"
        choices = [_undo_masks(features, row, tokenizer, whole) for row in range(len(features["input_ids"]))]
        probabilities, ids = top_pieces(
            self.model.clone(mesh=None), params, features, SAMPLE_PIECES, tokenizer.vocab_size
        )
        texts = list[Sample]()
        for row, answers in enumerate(choices):
            if not answers:
                continue
            masks = list[MaskSample]()
            for slot, answer in enumerate(answers):
                words = [tokenizer.decode([token]).strip() for token in ids[row, slot].tolist()]
                best = list(zip(words, probabilities[row, slot].tolist(), strict=True))
                masks.append({"predictions": best, "answer": tokenizer.decode([answer]).strip()})
            length = int((features["sequence_ids"][row] > 0).sum())
            text = tokenizer.decode(_whole_sentences(features["input_ids"][row, :length].tolist(), tokenizer))
            texts.append({"text": text, "masks": masks})
        return texts

    def result_lines(self, final: Mapping[str, float], samples: Sequence[Sample]) -> list[str]:
        lines = []
        if final and "mlm_loss" not in final:  # a student that learns no masked words
            lines.append(f"held-out: loss {final['loss']:.4f}")
        elif final:
            lines.append(
                f"held-out: MLM loss {final['mlm_loss']:.4f} nats on {final['targets']:,} targets, "
                f"accuracy {final['mlm_accuracy']:.4f}"
            )
            unigram = final.get("unigram_cross_entropy")
            if unigram is not None:
                ahead = unigram - final["mlm_loss"]
                lines.append(
                    f"unigram distribution of the training targets: {unigram:.4f} nats on the same targets; "
                    f"the model is {abs(ahead):.4f} nats {'better' if ahead >= 0 else 'worse'}"
                )
            if "nsp_accuracy" in final:
                constant = final.get("nsp_constant_accuracy")
                beside = "" if constant is None else f"; the constant answer has accuracy {constant:.4f}"
                pairs = f"sentence pairs: accuracy {final['nsp_accuracy']:.4f}, loss {final['nsp_loss']:.4f}"
                lines.append(pairs + beside)
        for sample in samples[:5]:
            lines.append(sample["text"])
            for mask in sample["masks"]:
                best = ", ".join(f"{piece} {probability:.2f}" for piece, probability in mask["predictions"][:3])
                lines.append(f"    [MASK] was {mask['answer']!r}; predicted: {best}")
        return lines

    def report_data(self, final: Mapping[str, float], samples: Sequence[Sample]) -> ReportData:
        evaluation = {name: value for name, value in final.items() if name not in ("step", "split", *_BASELINES)}
        return {
            "summary": self.result_lines(final, ()),  # the filled masks have their own section
            "evaluation": evaluation,
            "unigram_loss": final.get("unigram_cross_entropy"),
            "constant_accuracy": final.get("nsp_constant_accuracy"),
            "filled_masks": list(samples),
        }


def _undo_masks(features: dict[str, np.ndarray], row: int, tokenizer: Tokenizer, whole: bool) -> list[int]:
    """Restore the masked tokens of ``row`` in place, except for at most SAMPLE_MASKS places spread over the row: of
    one token each, which are complete words if possible, or with ``whole`` of all tokens that are masked side by
    side. Return the original id of each token that remains masked, and change the first entries of
    ``mlm_positions`` in the row to the positions of these tokens."""
    tokens, positions = features["input_ids"][row], features["mlm_positions"][row]
    masked = features["mlm_weights"][row] > 0
    labels = features["mlm_labels"][row][masked]
    answers = dict(sorted(zip(positions[masked].tolist(), labels.tolist(), strict=True)))
    for position, answer in answers.items():
        tokens[position] = answer
    if whole:
        starts = [position for position in answers if position - 1 not in answers]
        places = [list(itertools.takewhile(answers.__contains__, itertools.count(start))) for start in starts]
    else:
        following = np.append(tokenizer.continuation[tokens[1:]], False)
        words = [
            position
            for position, answer in answers.items()
            if not (tokenizer.continuation[answer] or following[position])
            and tokenizer.decode([answer]).strip().isalpha()
        ]
        places = [[position] for position in words or answers]
    spread = places[:: max(1, len(places) // SAMPLE_MASKS)][:SAMPLE_MASKS]
    chosen = [position for place in spread for position in place]
    tokens[chosen] = tokenizer.mask_id
    positions[: len(chosen)] = chosen
    return [answers[position] for position in chosen]


def _whole_sentences(ids: list[int], tokenizer: Tokenizer) -> list[int]:
    """Return the token ids from the start of the sentence with the first mask to the end of the sentence with the
    last mask, without [CLS] and [SEP]."""
    ids = [token for token in ids if token not in (tokenizer.cls_id, tokenizer.sep_id)]
    masks = [place for place, token in enumerate(ids) if token == tokenizer.mask_id]
    ends = [place + 1 for place, token in enumerate(ids) if tokenizer.decode([token]).strip() in SENTENCE_ENDS]
    start = max((end for end in ends if end <= masks[0]), default=0)
    return ids[start : min((end for end in ends if end > masks[-1]), default=len(ids))]


def top_pieces(
    model: BertModel, params: Params, features: Mapping[str, np.ndarray], count: int, pieces: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return (probabilities float32[B, M, count], ids int32[B, M, count]) of the most probable pieces at the masked
    positions, best first.

    Only the first ``pieces`` ids are considered, because the embedding table may have more rows than the vocabulary
    has pieces.
    """
    count = min(count, pieces)

    @jax.jit
    def run(params: Params, features: Batch) -> tuple[jax.Array, jax.Array]:
        logits = present(bert_output(model.apply({"params": params}, features, None)).mlm_logits)[..., :pieces]
        return jax.lax.top_k(jax.nn.softmax(logits, axis=-1), count)

    probabilities, ids = run(jax.tree.map(jnp.asarray, params), dict(features))
    return np.asarray(probabilities), np.asarray(ids)


def _filled_masks(item: Sample) -> str:
    """Return the HTML of a text with the best predictions filled in (green if correct), followed by a list of all
    predictions."""
    pieces = str(item.get("text", "")).split("[MASK]")
    masks = list(item.get("masks") or ())
    sentence, details = html.escape(pieces[0]), []
    for index, tail in enumerate(pieces[1:]):
        mask = masks[index] if index < len(masks) else None
        predictions, answer = (mask["predictions"], mask["answer"]) if mask is not None else ([], None)
        best = str(predictions[0][0]) if predictions else "[MASK]"
        right = " right" if best == answer else ""
        sentence += f'<span class="mask{right}">{html.escape(best)}</span>{html.escape(tail)}'
        guesses = " ".join(
            f'<span class="guess"><bdi>{html.escape(str(piece))}</bdi> {probability:.0%}</span>'
            for piece, probability in predictions
        )
        original = f"<bdi><b>{html.escape(str(answer))}</b></bdi>: " if answer is not None else ""
        details.append(f'<div class="soft">{original}{guesses}</div>')
    return f'<div dir="auto">{sentence}</div>{"".join(details)}'
