"""Extractive question answering (google-research/bert ``run_squad.py``; Devlin et al. 2018, sections 4.2, 4.3)."""

import functools
import re
from collections.abc import Mapping, Sequence
from typing import ClassVar

import jax
import numpy as np

from bert_jax.config import HeadsConfig
from bert_jax.config.finetune import FinetuneConfig
from bert_jax.metrics import Score
from bert_jax.metrics.chinese_qa import chinese_answer_scores
from bert_jax.metrics.squad import squad_scores
from bert_jax.model.bert import BertOutput, present
from bert_jax.objectives.objective import Sums
from bert_jax.objectives.span import span_loss
from bert_jax.records import Answer, Record
from bert_jax.tasks.spans import Passage, PassageWindow, Span, SpanPiece, best_spans, span_inputs
from bert_jax.tasks.task import Constant, Level, ModelInput, Outputs, Prediction, Target, Task

# The end of a sentence: a mark, with white space after it in languages with spaces between words.
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+|(?<=[\u3002\uff01\uff1f])|\n")
# A word or, in Chinese text, a character.
_WORD = re.compile(r"[\u3400-\u9fff]|[^\W\u3400-\u9fff]+")
# Token span that is in no window, for a question without an answer.
NOWHERE = (-1, -1)


class QaTask(Task):
    """Question answering: ``Record.text`` is the question, ``Record.text_pair`` the passage.

    A unit is one window of the passage. The targets of a window that contains the complete answer are the first and
    the last token of the answer. In every other window, and for a question without an answer, both targets are the
    first token ([CLS]). An answer that begins or ends inside a piece is extended to include that entire piece (in
    the reference: the entire word, delimited by white space). Training uses the first listed answer that occurs in
    the passage; the scores use all answers.
    """

    targets: ClassVar[Mapping[str, Target]] = dict.fromkeys(("start", "end"), Target("position", np.int32))
    gold = ("answers",)
    logs_loss = True

    @property
    def heads(self) -> HeadsConfig:
        return HeadsConfig(span=True, pooler=False)

    def featurize(self, records: Sequence[Record], *, training: bool) -> list[ModelInput]:
        questions = self.tokenizer.encode_batch([record.text for record in records])
        passages: dict[str, Passage] = {}  # many questions share a passage
        units = []
        for number, (record, question) in enumerate(zip(records, questions, strict=True)):
            if record.text_pair is None:
                raise ValueError(
                    f"{record.source}: the question has no passage; add one, or check data.columns (role text_pair)"
                )
            if record.text_pair not in passages:
                passages[record.text_pair] = Passage.of(self.tokenizer, record.text_pair)
            passage = passages[record.text_pair]
            answer = self._answer(record, passage, training)
            if training and answer is None:
                continue
            for encoded in span_inputs(self.tokenizer, question, passage, self.settings):
                targets = {} if answer is None else _targets(encoded.extra, *answer)
                units.append(ModelInput(number, (encoded,), targets, float(answer is not None), encoded.extra))
        if training and records and not units:
            raise ValueError(_lost_line(records, len(records))[0].removeprefix("WARNING: "))
        return units

    def _answer(self, record: Record, passage: Passage, training: bool) -> tuple[int, int] | None:
        """Return the indices of the first and the last token of the answer in the passage, or ``NOWHERE`` for a
        question without an answer. Return None if the answers are unknown or not found in the passage
        (:func:`find_answer`). Raise ``ValueError``, with ``training``, for unknown answers and for answers without
        pieces, and for a question without an answer unless ``qa.no_answer`` is set."""
        if record.answers is None:
            if training:
                raise ValueError(
                    f"{record.source}: the question has no answers, which training requires; add the field "
                    "answers, or map a column to answers in data.columns"
                )
            return None
        if not record.answers:
            if not self.settings.no_answer:
                raise ValueError(
                    f"{record.source}: the question has no answer; set qa.no_answer=true or remove the question"
                )
            return NOWHERE
        spans = [find_answer(passage.text, answer) for answer in record.answers]
        tokens = [found for span in spans if span and (found := passage.tokens(*span))]
        if training and any(spans) and not tokens:
            raise ValueError(
                f"{record.source}: the answer {record.answers[0].text[:40]!a} has no pieces in the vocabulary; "
                "correct it, or remove the question"
            )
        return tokens[0] if tokens else None

    @classmethod
    def notes(cls, config: FinetuneConfig, splits: Mapping[str, Sequence[Record]]) -> list[str]:
        train = splits["train"]
        return super().notes(config, splits) + _lost_line([one for one in train if _is_lost(one)], len(train))

    def loss(self, output: BertOutput, batch: Mapping[str, jax.Array], *, axis: str | None) -> Sums:
        return span_loss(
            present(output.start_logits), present(output.end_logits), batch["sequence_ids"], batch["start"],
            batch["end"], batch["weights"],
        )  # fmt: skip

    def outputs(self, output: BertOutput, batch: Mapping[str, jax.Array]) -> dict[str, tuple[Level, jax.Array]]:
        start, end = present(output.start_logits), present(output.end_logits)
        return {"start_logits": ("token", start), "end_logits": ("token", end)}

    def decode(self, records: Sequence[Record], units: Sequence[ModelInput], outputs: Outputs) -> list[Prediction]:
        """Return for each question ``answer`` ("" for no answer), its character offsets ``start`` and ``end``
        (exclusive) in the passage, the ``score`` of the best span, and ``no_answer_score``. With ``qa.no_answer``,
        also return ``best_answer``, the text of the best span."""
        questions: list[list[SpanPiece]] = [[] for _ in records]
        for unit, output in zip(units, outputs, strict=True):
            questions[unit.record].append(SpanPiece(output["start_logits"], output["end_logits"], unit.extra))
        return [self._prediction(span) for span in best_spans(questions, self.settings)]

    def _prediction(self, span: Span) -> Prediction:
        qa = self.settings
        answer: Prediction = {"answer": span.text, "start": span.start, "end": span.end}
        if qa.no_answer and span.null_score - span.score > qa.null_threshold:
            answer = {"answer": "", "start": 0, "end": 0}
        answer |= {"score": span.score, "no_answer_score": span.null_score}
        return {**answer, "best_answer": span.text} if qa.no_answer else answer

    def scores(self, records: Sequence[Record], predictions: Sequence[Prediction]) -> list[Score]:
        """Return f1 and exact. With ``qa.no_answer``, also return the other scores of :func:`squad_scores`;
        f1/best_threshold_value and exact/best_threshold_value are the values of ``qa.null_threshold`` with the best
        f1 and the best exact on these records."""
        references = [[answer.text for answer in record.answers or ()] for record in records]
        qa = self.settings
        if qa.no_answer:
            spans = [prediction["best_answer"] for prediction in predictions]
            odds = [prediction["no_answer_score"] - prediction["score"] for prediction in predictions]
            scores = squad_scores(spans, references, odds, qa.null_threshold)
        else:
            score = chinese_answer_scores if qa.answer_scoring == "chinese" else squad_scores
            scores = score([prediction["answer"] for prediction in predictions], references)
        return sorted(scores, key=lambda score: score.name != "f1")

    def constant(self, train: Sequence[Record]) -> Constant | None:
        # The score of no answer is above every threshold.
        none: Prediction = {"answer": "", "best_answer": "", "score": 0.0, "no_answer_score": 1e300}
        return ("no answer for all", lambda one: {**one, **none}) if self.settings.no_answer else None

    def plain_answer(self, record: Record) -> str | None:
        """Return the sentence of the passage with the most words of the question, the first one if several have as
        many."""
        words = {*_WORD.findall(record.text.lower())}
        sentences = _sentences(record.text_pair or "")
        return max(sentences, key=lambda one: len(words & one[1]))[0] if sentences else None


@functools.lru_cache(maxsize=64)  # many questions share a passage
def _sentences(passage: str) -> list[tuple[str, frozenset[str]]]:
    """Return each sentence of ``passage`` with its words in lower case."""
    texts = filter(None, map(str.strip, filter(None, _SENTENCE_END.split(passage))))
    return [(text, frozenset(_WORD.findall(text.lower()))) for text in texts]


def find_answer(passage: str, answer: Answer) -> tuple[int, int] | None:
    """Return the character offsets (start, end), ``end`` exclusive, of an answer in the passage, or None if the
    passage does not contain it.

    The span begins at ``answer.start`` if the answer occurs there. Otherwise, it is the only occurrence, or the
    first occurrence if ``answer.start`` is -1; the amount and kind of white space between words may then differ. An
    answer that occurs several times, but not at ``answer.start``, is not found: any of them may be meant.
    """
    words = answer.text.split()
    if not words:
        return None
    if answer.start >= 0 and passage.startswith(answer.text, answer.start):
        return answer.start, answer.start + len(answer.text)
    pattern = r"\s+".join(map(re.escape, words))
    occurrences = [match.span(1) for match in re.finditer(f"(?=({pattern}))", passage)]
    meant = [span for span in occurrences if span[0] == answer.start] or occurrences
    return meant[0] if len(meant) == 1 or (meant and answer.start < 0) else None


def _is_lost(record: Record) -> bool:
    """Return True if ``record`` has answers, none of which is found in the passage."""
    answers = record.answers or ()
    return bool(answers) and not any(find_answer(record.text_pair or "", answer) for answer in answers)


def _lost_line(lost: Sequence[Record], count: int) -> list[str]:
    if not lost:
        return []
    ids = ", ".join(record.id for record in lost[:5]) + (", ..." if len(lost) > 5 else "")
    return [
        f"WARNING: {len(lost):,} of {count:,} training questions are excluded: their answers occur neither "
        f"at answer_start (in characters) nor exactly once in the passage (ids {ids})"
    ]


def _targets(window: PassageWindow, first: int, last: int) -> dict[str, int]:
    if not (window.begin <= first and last < window.begin + window.count):
        return {"start": 0, "end": 0}
    shift = window.first - window.begin
    return {"start": first + shift, "end": last + shift}
