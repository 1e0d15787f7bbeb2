"""Real data sets are read to the last record, with exact counts; skipped where they are not beside the checkout."""

from collections import Counter
from pathlib import Path

import pytest

from bert_jax.config.task import TaskDataConfig
from data_pipeline.tasks import read_splits

DATA = Path(__file__).resolve().parents[4] / "shared" / "data"
pytestmark = pytest.mark.skipif(not DATA.is_dir(), reason=f"the data sets are not in {DATA}")

FILES = {"train": ("train.tsv",), "dev": ("dev.tsv",)}
SENTENCES = ("id=index", "text=sentence1", "text_pair=sentence2", "label=label")
SICK = ("id=pair_ID", "text=sentence_A", "text_pair=sentence_B")
ARC = ("id=video-id", "text=sent1", "choice_prefix=sent2", *(f"choice=ending{i}" for i in range(4)), "label=label")

# Folder, kind, the rest of the data section, counts.
SETS = [
    ("glue/CoLA", "classification", FILES | {"columns": ("text=4", "label=2")}, {"train": 8551, "dev": 1043}),
    (
        "glue/SST-2",
        "classification",
        FILES | {"columns": ("text=sentence", "label=label")},
        {"train": 67349, "dev": 872},
    ),
    ("glue/RTE", "classification", FILES | {"columns": SENTENCES}, {"train": 2490, "dev": 277}),
    ("glue/WNLI", "classification", FILES | {"columns": SENTENCES}, {"train": 635, "dev": 71}),
    (
        "glue/STS-B",
        "regression",
        FILES | {"columns": (*SENTENCES[:3], "label=score")},
        {"train": 5749, "dev": 1500},
    ),
    (
        "glue/QNLI",
        "classification",
        {"dev": ("dev.tsv",), "columns": ("id=index", "text=question", "text_pair=sentence", "label=label")},
        {"train": 0, "dev": 5463},
    ),
    (
        "sts_zh",
        "regression",
        {"train": ("train.csv",), "dev": ("dev.csv",), "columns": ("text=1", "text_pair=2", "label=3")},
        {"train": 5749, "dev": 1500},
    ),
    (
        "nli_sick",
        "classification",
        FILES | {"columns": (*SICK, "label=entailment_judgment")},
        {"train": 8927, "dev": 1000},
    ),
    (
        "nli_sick",
        "regression",
        FILES | {"columns": (*SICK, "label=relatedness_score")},
        {"train": 8927, "dev": 1000},
    ),
    ("intent_slot/snips", "joint", {"train": ("train",), "dev": ("valid",)}, {"train": 13084, "dev": 700}),
    (
        "langid",
        "classification",
        FILES | {"columns": ("text=sentence", "label=label")},
        {"train": 66000, "dev": 30833},
    ),
    ("zh_reviews", "classification", FILES, {"train": 15712, "dev": 1745}),
    (
        "clinc150",
        "classification",
        {
            "train": ("data_full.json:train+oos_train",),
            "dev": ("data_full.json:val+oos_val",),
            "test": ("data_full.json:test+oos_test",),
        },
        {"train": 15100, "dev": 3100, "test": 5500},
    ),
    ("ner_wnut17", "tagging", {"train": ("train.txt",), "dev": ("dev.txt",)}, {"train": 3394, "dev": 1009}),
    (
        "squad",
        "qa",
        {"train": ("train-v1.1.json",), "dev_fraction": 0.1, "group_by": "article"},
        {"train": 6522, "dev": 699},
    ),
    ("squad", "qa", {"train": ("train-v2.0.json",)}, {"train": 9030}),
    ("xquad", "qa", {"dev": ("xquad.en.json", "xquad.zh.json")}, {"train": 0, "xquad.en": 1190, "xquad.zh": 1190}),
    ("zh_qa", "qa", {"train": ("DRCD_dev.json",), "dev": ("cmrc2018_dev.json",)}, {"train": 3524, "dev": 3219}),
    (
        "long_movie_reviews",
        "classification",
        {"train": ("train.tsv",), "dev_fraction": 0.1},
        {"train": 1620, "dev": 180},
    ),
    (
        "multiple_choice",
        "choice",
        {"train": ("easy_train.csv",), "dev": ("challenge_train.csv",), "columns": ARC},
        {"train": 2147, "dev": 1096},
    ),
]


def splits_of(folder, kind, options):
    return read_splits(TaskDataConfig(dir=str(DATA / folder), **options), kind)


@pytest.mark.parametrize(
    ("folder", "kind", "options", "counts"), SETS, ids=[f"{folder}-{kind}" for folder, kind, *_ in SETS]
)
def test_counts(folder, kind, options, counts):
    splits = splits_of(folder, kind, options)
    assert {name: len(records) for name, records in splits.items()} == counts
    for record in (record for records in splits.values() for record in records):
        assert record.text or record.words
        assert kind == "tagging" or kind == "qa" or record.label not in (None, "")
        assert kind != "qa" or (record.text_pair and record.answers is not None)
        assert kind not in ("tagging", "joint") or len(record.tags) == len(record.words)
        assert kind != "choice" or (len(record.choices) == 4 and record.choices[int(record.label)])


def set_called(folder, number=0):
    return splits_of(*[entry for entry in SETS if entry[0] == folder][number][:3])


def test_choices_may_be_empty():
    splits = set_called("multiple_choice")
    assert [sum("" in r.choices for r in records) for records in splits.values()] == [5, 1]


def test_classes():
    expected = {"glue/CoLA": 2, "glue/RTE": 2, "nli_sick": 3, "langid": 11, "clinc150": 151, "intent_slot/snips": 7}
    for folder, count in expected.items():
        for records in set_called(folder).values():
            assert len({record.label for record in records}) == count, folder
    wnut = set_called("ner_wnut17")
    assert [len({tag for r in records for tag in r.tags}) for records in wnut.values()] == [13, 13]
    assert [sum(len(r.words) for r in records) for records in wnut.values()] == [62730, 15733]


def test_answers():
    for number, without in ((0, 0), (1, 4443)):
        records = [record for part in set_called("squad", number).values() for record in part]
        assert sum(not record.answers for record in records) == without
        for record in records:
            for answer in record.answers:
                assert record.text_pair[answer.start :].startswith(answer.text)
    chinese = set_called("zh_qa")
    for name, elsewhere in (("train", 0), ("dev", 200)):
        answers = [(r.text_pair, answer) for r in chinese[name] for answer in r.answers]
        assert sum(a.start < 0 or not passage[a.start :].startswith(a.text) for passage, a in answers) == elsewhere
    assert Counter(answer.start for r in chinese["dev"] for answer in r.answers)[-1] == 193


def test_the_sentence_split_of_sick_tears_no_sentence_apart():
    options = {"train": ("train.tsv",), "columns": (*SICK, "label=entailment_judgment")}
    splits = splits_of("nli_sick", "classification", options | {"dev_fraction": 0.1, "group_by": "sentence"})
    texts = [{text for r in records for text in (r.text, r.text_pair)} for records in splits.values()]
    assert not texts[0] & texts[1] and 800 < len(splits["dev"]) <= 893
