"""The official GLUE layouts, with small made-up files: what a config says for each task and what is read."""

import pytest
from task_files import write

from bert_jax.config.task import TaskDataConfig
from data_pipeline.tasks import read_splits

MNLI_HEADER = (
    "index\tpromptID\tpairID\tgenre\tsentence1_binary_parse\tsentence2_binary_parse\tsentence1_parse\t"
    "sentence2_parse\tsentence1\tsentence2"
)
MNLI_LINE = "31193\t31193n\tgovernment\t( a )\t( b )\t(ROOT a)\t(ROOT b)"
MNLI_DEV = f"{MNLI_HEADER}\tlabel1\tlabel2\tlabel3\tlabel4\tlabel5\tgold_label\n"
MNLI_DEV_LINE = (
    f'0\t{MNLI_LINE}\tThe d.\tA "d\t{"neutral" + chr(9)}{"entailment" + chr(9)}' + "neutral\t" * 3 + "neutral\n"
)
STS_HEADER = "index\tgenre\tfilename\tyear\told_index\tsource1\tsource2\tsentence1\tsentence2"
MRPC = "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String"
QQP = "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate"
QNLI = "index\tquestion\tsentence"
SENTENCES = "index\tsentence1\tsentence2"

# Columns, files, and (id, text, text_pair, label) of the first record of each split.
LAYOUTS = {
    "CoLA": (
        ("text=4", "label=2", "test:id=index", "test:text=sentence"),
        {
            "train.tsv": 'gj04\t1\t\tThey sang.\ngj04\t0\t*\tSang "they.\n',
            "dev.tsv": "gj04\t0\t*\tOf it.\n",
            "test.tsv": "index\tsentence\n0\tBill whistled.\n",
        },
        {
            "train": ("0", "They sang.", None, "1"),
            "dev": ("0", "Of it.", None, "0"),
            "test": ("0", "Bill whistled.", None, None),
        },
    ),
    "SST-2": (
        ("text=sentence", "label=label", "test:id=index", "test:text=sentence"),
        {
            "train.tsv": "sentence\tlabel\nhide new secretions \t0\n",
            "dev.tsv": "sentence\tlabel\na charming journey . \t1\n",
            "test.tsv": "index\tsentence\n0\tuneasy mishmash .\n",
        },
        {
            "train": ("0", "hide new secretions ", None, "0"),
            "dev": ("0", "a charming journey . ", None, "1"),
            "test": ("0", "uneasy mishmash .", None, None),
        },
    ),
    "MRPC": (
        (
            "text=#1 String",
            "text_pair=#2 String",
            "label=Quality",
            "test:id=index",
            "test:text=#1 String",
            "test:text_pair=#2 String",
        ),
        {
            "train.tsv": f'\ufeff{MRPC}\r\n1\t702876\t702977\t"He said\tSaid "he" .\r\n',
            "dev.tsv": f"{MRPC}\n0\t1\t2\ta\tb\n",
            "test.tsv": "index\t#1 ID\t#2 ID\t#1 String\t#2 String\n0\t1\t2\tc\td\n",
        },
        {
            "train": ("0", '"He said', 'Said "he" .', "1"),
            "dev": ("0", "a", "b", "0"),
            "test": ("0", "c", "d", None),
        },
    ),
    "STS-B": (
        ("id=index", "text=sentence1", "text_pair=sentence2", "label=score"),
        {
            "train.tsv": f"{STS_HEADER}\tscore\n0\tcaptions\tMSRvid\t2012\t0001\tnone\tnone\tA.\tB.\t5.000\n",
            "dev.tsv": f"{STS_HEADER}\tscore\n7\tm\tM\t2012\t0000\tnone\tnone\tC.\tD.\t0.25\n",
            "test.tsv": f"{STS_HEADER}\n0\tm\tM\t2012\t0024\tnone\tnone\tE.\tF.\n",
        },
        {"train": ("0", "A.", "B.", "5.000"), "dev": ("7", "C.", "D.", "0.25"), "test": ("0", "E.", "F.", None)},
    ),
    "QQP": (
        ("id=id", "text=question1", "text_pair=question2", "label=is_duplicate"),
        {
            "train.tsv": f"{QQP}\n133273\t213221\t213222\tHow?\tWhy?\t0\n",
            "dev.tsv": f"{QQP}\n201359\t303345\t303346\tA?\tB?\t1\n",
            "test.tsv": "id\tquestion1\tquestion2\n0\tC?\tD?\n",
        },
        {
            "train": ("133273", "How?", "Why?", "0"),
            "dev": ("201359", "A?", "B?", "1"),
            "test": ("0", "C?", "D?", None),
        },
    ),
    "QNLI": (
        ("id=index", "text=question", "text_pair=sentence", "label=label"),
        {
            "train.tsv": f"{QNLI}\tlabel\n0\tWhen?\tThen.\tnot_entailment\n",
            "dev.tsv": f"{QNLI}\tlabel\n3\tWho?\tShe.\tentailment\n",
            "test.tsv": f"{QNLI}\n0\tWhat?\tThat.\n",
        },
        {
            "train": ("0", "When?", "Then.", "not_entailment"),
            "dev": ("3", "Who?", "She.", "entailment"),
            "test": ("0", "What?", "That.", None),
        },
    ),
    "RTE": (
        ("id=index", "text=sentence1", "text_pair=sentence2", "label=label"),
        {
            "train.tsv": f"{SENTENCES}\tlabel\n0\tA.\tB.\tnot_entailment\n",
            "dev.tsv": f"{SENTENCES}\tlabel\n0\tC.\tD.\tentailment\n",
            "test.tsv": f"{SENTENCES}\n0\tE.\tF.\n",
        },
        {
            "train": ("0", "A.", "B.", "not_entailment"),
            "dev": ("0", "C.", "D.", "entailment"),
            "test": ("0", "E.", "F.", None),
        },
    ),
    "WNLI": (
        ("id=index", "text=sentence1", "text_pair=sentence2", "label=label"),
        {
            "train.tsv": f"{SENTENCES}\tlabel\n0\tA.\tB.\t1\n",
            "dev.tsv": f"{SENTENCES}\tlabel\n0\tC.\tD.\t0\n",
            "test.tsv": f"{SENTENCES}\n0\tE.\tF.\n",
        },
        {"train": ("0", "A.", "B.", "1"), "dev": ("0", "C.", "D.", "0"), "test": ("0", "E.", "F.", None)},
    ),
    # Dev files have four columns more than train, and AX (the diagnostic set) is predicted with the same model.
    "MNLI": (
        ("id=index", "text=sentence1", "text_pair=sentence2", "label=gold_label"),
        {
            "train.tsv": f"{MNLI_HEADER}\tlabel1\tgold_label\n0\t{MNLI_LINE}\tCream.\tMilk.\tneutral\tentailment\n",
            "dev_matched.tsv": MNLI_DEV + MNLI_DEV_LINE,
            "dev_mismatched.tsv": MNLI_DEV + MNLI_DEV_LINE.replace("neutral\n", "contradiction\n"),
            "test_matched.tsv": f"{MNLI_HEADER}\n9847\t{MNLI_LINE}\tHe.\tShe.\n",
            "AX.tsv": f"{SENTENCES}\n0\tThe cat.\tThe dog.\n",
        },
        {
            "train": ("0", "Cream.", "Milk.", "entailment"),
            "dev_matched": ("0", "The d.", 'A "d', "neutral"),
            "dev_mismatched": ("0", "The d.", 'A "d', "contradiction"),
            "test_matched": ("9847", "He.", "She.", None),
            "AX": ("0", "The cat.", "The dog.", None),
        },
    ),
}


@pytest.mark.parametrize("task", LAYOUTS)
def test_a_layout(tmp_path, task):
    columns, files, expected = LAYOUTS[task]
    for name, content in files.items():
        write(tmp_path / name, content)
    data = TaskDataConfig(
        dir=str(tmp_path),
        columns=columns,
        train=("train.tsv",),
        dev=tuple(name for name in files if name.startswith("dev")),
        test=tuple(name for name in files if name.startswith(("test", "AX"))),
    )
    splits = read_splits(data, "regression" if task == "STS-B" else "classification")
    assert {name: (r[0].id, r[0].text, r[0].text_pair, r[0].label) for name, r in splits.items()} == expected
