"""What the tests of question answering share: a tokenizer of one piece per letter, tasks, records, outputs."""

import dataclasses
import json
import re
import string

import numpy as np

from bert_jax.config import TaskSettings
from bert_jax.config.finetune import FinetuneConfig
from bert_jax.records import Answer, Record
from bert_jax.tasks.question_answering import QaTask
from bert_jax.tokenization import SPECIAL_PIECES, WordPieceTokenizer

CHINESE = "天地玄黄宇宙洪荒日月盈昃辰宿列张"
LETTERS = string.ascii_lowercase
TOKENIZER = WordPieceTokenizer(
    [*SPECIAL_PIECES, *LETTERS, *(f"##{letter}" for letter in LETTERS), *"0123456789.,?'()。，", *CHINESE],
    lower_case=True,
)


def make_task(tokenizer=TOKENIZER, max_length=64, type_vocab_size=2, **qa):
    config = FinetuneConfig()
    config = dataclasses.replace(
        config,
        task=dataclasses.replace(config.task, kind="qa", max_length=max_length),
        model=dataclasses.replace(config.model, vocab_size=tokenizer.vocab_size, type_vocab_size=type_vocab_size),
        qa=dataclasses.replace(config.qa, **qa),
    )
    return QaTask(config, tokenizer)


def settings(max_length=64, **options):
    return TaskSettings(kind="qa", max_length=max_length, **options)


def record(question, passage, *answers, labelled=True, source="file: id 7"):
    """``answers``: (text, start)."""
    given = tuple(Answer(text=text, start=start) for text, start in answers) if labelled else None
    return Record(id="7", source=source, text=question, text_pair=passage, answers=given)


def perfect(units):
    """Logits of a model that has learned the targets by heart."""
    outputs = []
    for unit in units:
        both = {name: np.zeros(unit.length, np.float32) for name in ("start", "end")}
        for name, logits in both.items():
            if unit.weight:
                logits[unit.targets[name]] = 9
        outputs.append({f"{name}_logits": logits for name, logits in both.items()})
    return outputs


def stands_alone(passage, start, end):
    """Whether no word goes on before ``start`` or after ``end``."""
    return not any(passage[max(at - 1, 0) : at + 1].isalnum() and 0 < at < len(passage) for at in (start, end))


def read_squad(path, move=False):
    """Records of a file in SQuAD's JSON. ``move``: an answer inside a word is moved to its first occurrence as
    words, for files whose starts were rebuilt as the first occurrence of any kind."""
    records = []
    for article in json.loads(path.read_text(encoding="utf-8"))["data"]:
        for paragraph in article["paragraphs"]:
            passage = paragraph["context"]
            for entry in paragraph["qas"]:
                answers = [(answer["text"], answer["answer_start"]) for answer in entry["answers"]]
                if move:
                    answers = [(text, _moved(passage, text, start)) for text, start in answers]
                source = f"{path.name}: id {entry['id']}"
                records.append(record(entry["question"], passage, *answers, source=source))
    return records


def _moved(passage, text, start):
    if start >= 0 and stands_alone(passage, start, start + len(text)):
        return start
    spans = [match.span() for match in re.finditer(re.escape(text), passage)]
    return next((begin for begin, end in spans if stands_alone(passage, begin, end)), start)
