"""Every recipe under configs/finetune/: loads, is headed, and reads files as its header says they are. The example
of docs/finetuning.md trains."""

import dataclasses
import json
import re
import shlex
from pathlib import Path

import pytest
import yaml
from finetune_cases import PIECES, SPLITS, results, run, saved_model

from bert_jax.commands.finetune import FinetuneRunOptions
from bert_jax.config import RunOptions
from bert_jax.config.finetune import FinetuneConfig
from bert_jax.config.loader import build_config, dump_yaml, load_config, take_options
from bert_jax.config.options import field_types, options_of
from bert_jax.records import Record
from bert_jax.start.plan import plan_start
from bert_jax.tasks.registry import TASKS, task_class
from bert_jax.tokenization.wordpiece import WordPieceTokenizer
from data_pipeline.tasks import read_splits, split_names

REPOSITORY = Path(__file__).resolve().parents[3]
FOLDER = REPOSITORY / "configs" / "finetune"
RECIPES = sorted(path.stem for path in FOLDER.glob("*.yaml"))
EXAMPLE = REPOSITORY / "docs" / "examples" / "keyword_task.py"


def header(name):
    """The comment block at the head of a recipe, without the comment signs."""
    lines = (FOLDER / f"{name}.yaml").read_text().splitlines()
    end = next(i for i, line in enumerate(lines) if not line.startswith("#"))
    return "\n".join(line[1:].removeprefix(" ") for line in lines[:end])


def command(name):
    """Arguments of the first run_finetune.py command of the header."""
    (found, *_) = re.findall(r"^ *python run_finetune\.py (.*)$", header(name), re.MULTILINE)
    return shlex.split(found)


def loaded(name, *arguments):
    return load_config(FinetuneConfig, ["--config", str(FOLDER / f"{name}.yaml"), *arguments])


@pytest.mark.parametrize("name", RECIPES)
def test_it_loads_and_its_command_too(name):
    config = loaded(name)
    assert config.task.name == name
    options, rest = take_options(RunOptions, command(name))
    assert options.config == (f"configs/finetune/{name}.yaml",) and options.init_from
    data = dataclasses.replace(build_config(FinetuneConfig, rest.all).data, dir="")
    assert dataclasses.replace(data, train=config.data.train) == config.data


@pytest.mark.parametrize("name", RECIPES)
def test_header_names_data_hardware_time_and_result(name):
    for word in ("Data:", "Hardware:", "Time:", "Result:"):
        assert re.search(rf"^{word} +\S", header(name), re.MULTILINE), f"the header lacks {word}"


@pytest.mark.parametrize("name", RECIPES)
def test_values_stand_in_the_order_of_the_schema(name):
    given = yaml.safe_load((FOLDER / f"{name}.yaml").read_text())
    full: dict[str, list[str]] = {}
    for key in field_types(FinetuneConfig):
        section, option = key.split(".")
        full.setdefault(section, []).append(option)
    assert list(given) == [section for section in full if section in given]
    for section, values in given.items():
        assert list(values) == [key for key in full[section] if key in values]


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", RECIPES)
def test_no_value_is_the_default(name):
    options = options_of(FinetuneConfig)
    found = yaml.safe_load(dump_yaml(loaded(name)))
    for section, values in yaml.safe_load((FOLDER / f"{name}.yaml").read_text()).items():
        for key in values:
            assert found[section][key] != options[f"{section}.{key}"].default, f"{section}.{key}"


# ------------------------------------------------------------------ files

PASSAGE = {"context": "It was in Rome.", "qas": [
    {"id": "q", "question": "Where?", "answers": [{"text": "Rome", "answer_start": 10}]}
]}  # fmt: skip
SQUAD = json.dumps({"data": [{"title": "a", "paragraphs": [PASSAGE]}]})
WORDS = "-DOCSTART- -X- -X- O\n\nRome NNP B-NP B-LOC\nis VBZ B-VP O\n\nhe PRP B-NP O\n"
INTENT = {"seq.in": "play it\nstop \n", "seq.out": "O B-thing\nO\n", "label": "play\nstop\n"}
CLINC = json.dumps({part: [["hi", "greet"]] for part in ("train", "val", "test")} | {
    f"oos_{part}": [["so", "oos"]] for part in ("train", "val", "test")
})  # fmt: skip
SWAG = ",video-id,fold-ind,startphrase,sent1,sent2,gold-source,ending0,ending1,ending2,ending3,label\n"
SWAG_LINES = SWAG + "0,v,1,He sits. He,He sits.,He,gold,a,b,c,d,2\n1,v,1,He sits. He,He sits.,He,gold,a,b,c,d,0\n"
STSB = "index\tsentence1\tsentence2\tscore\n0\tA.\tB.\t5.000\n1\tC.\tD.\t1.5\n"
SICK = "pair_ID\tsentence_A\tsentence_B\trelatedness_score\tentailment_judgment\n1\tA\tB\t1.3\tNEUTRAL\n"
XNLI = "premise\thypo\tlabel\nA\tB\tneutral\n"
NLI = '{"gold_label": "neutral", "sentence1": "A", "sentence2": "B", "pairID": "1"}\n'
ABSA = "sentence\taspect\tsentiment\n" + "".join(
    f"text {i}\t{aspect}\tpositive\n" for i in range(10) for aspect in ("food", "service")
)
LONG = "id\tlabel\ttext\n" + "".join(f"r{i}\t{i % 2}\ttext {i}\n" for i in range(10))

# Recipe -> content of each file, and what the first training record is. GLUE: tests/data_pipeline/tasks.
FILES = {
    "stsb": ({"train.tsv": STSB, "dev.tsv": STSB}, ("A.", "B.", "5.000")),
    "sbert_sts": ({"train.tsv": STSB, "dev.tsv": STSB}, ("A.", "B.", "5.000")),
    "sbert_nli": ({"nli.jsonl": NLI, "sts_dev.tsv": STSB}, ("A", "B", "neutral")),
    "xnli": (dict.fromkeys(("train.tsv", "dev.tsv"), XNLI), ("A", "B", "neutral")),
    "sick": (dict.fromkeys(("train.tsv", "dev.tsv"), SICK), ("A", "B", "NEUTRAL")),
    "sts_zh": (dict.fromkeys(("train.csv", "dev.csv"), '"A, b",B,3.8\r\n'), ("A, b", "B", "3.8")),
    "squad1": (dict.fromkeys(("train-v1.1.json", "dev-v1.1.json"), SQUAD), ("Where?", "It was in Rome.", None)),
    "squad2": (dict.fromkeys(("train-v2.0.json", "dev-v2.0.json"), SQUAD), ("Where?", "It was in Rome.", None)),
    "cmrc": (
        dict.fromkeys(("cmrc2018_train.json", "cmrc2018_dev.json"), SQUAD),
        ("Where?", "It was in Rome.", None),
    ),
    "drcd": (dict.fromkeys(("DRCD_training.json", "DRCD_dev.json"), SQUAD), ("Where?", "It was in Rome.", None)),
    "conll2003": (dict.fromkeys(("eng.train", "eng.testa", "eng.testb"), WORDS), ("Rome is", None, None)),
    "wnut17": (dict.fromkeys(("train.txt", "dev.txt"), "Rome B-location\n. O\n"), ("Rome .", None, None)),
    "swag": (dict.fromkeys(("train.csv", "val.csv"), SWAG_LINES), ("He sits.", None, "2")),
    "snips": ({f"{part}/{name}": text for part in ("train", "valid") for name, text in INTENT.items()},
              ("play it", None, "play")),
    "atis": ({f"{part}/{name}": text for part in ("train", "valid") for name, text in INTENT.items()},
             ("play it", None, "play")),
    "clinc150": ({"data_full.json": CLINC}, ("hi", None, "greet")),
    "langid": (dict.fromkeys(("train.tsv", "dev.tsv"), "sentence\tlabel\nHallo\tde\n"), ("Hallo", None, "de")),
    "zh_reviews": (dict.fromkeys(("train.tsv", "dev.tsv"), "label\ttext\n1\tgut\n"), ("gut", None, "1")),
    "absa": ({"train.tsv": ABSA}, None),
    "long_reviews": ({"train.tsv": LONG}, None),
    "csv": ({"train.csv": "text,label\n" + '"a, b",x\nc,y\n' * 5}, None),
}  # fmt: skip


def splits_of(folder, name, *arguments):
    config = loaded(name, "--data.dir", str(folder), *arguments)
    splits = read_splits(config.data, config.task.kind)
    return task_class(config).from_data(config, splits), splits


def write(folder, files):
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(content, newline="")


@pytest.mark.parametrize("name", FILES)
def test_files_in_the_recipes_format(tmp_path, name):
    files, expected = FILES[name]
    write(tmp_path, files)
    config = loaded(name, "--data.dir", str(tmp_path))
    splits = read_splits(config.data, config.task.kind)
    dev, test = split_names(config.data)
    assert list(splits) == ["train", *dev, *test] and all(splits.values())
    first = splits["train"][0]
    if expected:
        assert (first.text or " ".join(first.words), first.text_pair, first.label) == expected
    for record in (record for split in ("train", *dev) for record in splits[split]):
        assert task_class(config).is_labelled(record)
        if config.data.labels and config.task.kind == "classification":
            assert record.label in config.data.labels


def test_recipes_without_a_file_here_are_glues():
    assert set(RECIPES) - set(FILES) == {"cola", "sst2", "mrpc", "qqp", "mnli", "qnli", "rte", "wnli"}


def test_endings_of_swag(tmp_path):
    write(tmp_path, FILES["swag"][0])
    config, splits = splits_of(tmp_path, "swag")
    assert splits["train"][0].choices == ("He a", "He b", "He c", "He d")
    assert config.data.labels == ("0", "1", "2", "3")


def test_relatedness_of_sick(tmp_path):
    """The flags of the header."""
    write(tmp_path, FILES["sick"][0])
    (flags,) = re.findall(r"^ +(--task\.kind regression(?:.|\\\n)*?score)$", header("sick"), re.MULTILINE)
    config, splits = splits_of(tmp_path, "sick", *shlex.split(flags.replace("\\\n", " ")))
    assert config.task.kind == "regression" and splits["dev"][0].label == "1.3"


def test_languages_without_a_model(tmp_path):
    """The second command of the header."""
    (tmp_path / "vocab.txt").write_text("\n".join(PIECES) + "\n")
    _, words = re.findall(r"^ +python run_finetune\.py ((?:.*\\\n)*.*)$", header("langid"), re.MULTILINE)
    words = shlex.split(words.replace("\\\n", " ").replace("vocab.txt", str(tmp_path / "vocab.txt")))
    options, rest = take_options(RunOptions, words)
    start = plan_start(FinetuneConfig, options, tmp_path, rest.all)
    config = build_config(FinetuneConfig, [*rest.all, *start.settings])
    assert (config.model.hidden_size, config.model.vocab_size) == (128, len(PIECES))


def test_aspects_of_a_sentence_stay_together(tmp_path):
    write(tmp_path, FILES["absa"][0])
    _, splits = splits_of(tmp_path, "absa", "--data.labels", "positive", "negative")
    texts = [{record.text for record in records} for records in splits.values()]
    assert len(splits["dev"]) == 2 and not texts[0] & texts[1]


@pytest.mark.parametrize("name", ["squad1", "squad2"])
def test_without_a_dev_file(name):
    (flags,) = re.findall(r"Without a dev file:\n +(.*)$", header(name), re.MULTILINE)
    data = loaded(name, *shlex.split(flags)).data
    assert (data.dev, data.dev_fraction, data.group_by) == ((), 0.1, "article")


# ------------------------------------------------------------------ docs/finetuning.md

GUIDE = (REPOSITORY / "docs" / "finetuning.md").read_text()


@pytest.mark.parametrize(("kind", "line"), re.findall(r"^\| `(\w+)` \| `(\{.*\})` \|", GUIDE, re.MULTILINE))
def test_lines_of_json_in_the_guide(tmp_path, kind, line):
    write(tmp_path, {"train.jsonl": line + "\n"})
    arguments = ["--task.kind", kind, "--data.dir", str(tmp_path), "--data.train", "train.jsonl"]
    config = load_config(FinetuneConfig, arguments)
    (record,) = read_splits(config.data, kind)["train"]
    assert task_class(config).is_labelled(record)
    for role in json.loads(line):
        assert getattr(record, {"negative": "negatives"}.get(role, role))


def test_commands_of_the_guide():
    """Their options are known, and all kinds of tasks have a line."""
    for found in re.findall(r"^(?:\$F|python run_finetune\.py) +(.*?)(?: +#.*)?$", GUIDE, re.MULTILINE):
        _, rest = take_options(FinetuneRunOptions, shlex.split(found))
        build_config(FinetuneConfig, rest.all)
    assert set(re.findall(r"^\| `(\w+)` \| `\{", GUIDE, re.MULTILINE)) == set(TASKS)


@pytest.mark.slow
def test_the_example_task_trains(tmp_path):
    negated = [dataclasses.replace(record, text=f"{record.text} not") for record in SPLITS["dev"][:12]]
    splits = {"train": SPLITS["train"], "dev": [*negated, *SPLITS["dev"][12:]]}
    options = f"--task.module {EXAMPLE} --task.metric accuracy/keywords --training.num_epochs 8"
    run(saved_model(tmp_path / "model"), tmp_path / "w", options, splits)
    found = results(tmp_path / "w")["dev"]["metrics"]
    predictions = [json.loads(line) for line in (tmp_path / "w" / "predictions_dev.jsonl").open()]
    right = [one["label"] == one["gold"] for one in predictions]
    assert found["accuracy/keywords"]["value"] == pytest.approx(sum(right[:12]) / 12)
    assert found["accuracy"]["value"] == pytest.approx(sum(right) / 21) and sum(right) >= 18


def test_the_example_task_reads_the_keywords():
    """They stand behind the text, as a text of their own."""
    config = load_config(FinetuneConfig, ["--task.module", str(EXAMPLE), "--data.labels", "0", "1"])
    pieces = [*PIECES, "not"]
    tokenizer = WordPieceTokenizer(pieces, lower_case=False)
    record = Record(id="0", source="x", text="w1 not good", label="1")
    (unit,) = task_class(config)(config, tokenizer).featurize([record], training=True)
    (found,) = unit.sequences
    assert [pieces[i] for i in found.ids] == ["[CLS]", "w1", "not", "good", "[SEP]", "not", "[SEP]"]
    assert list(found.types) == [0, 0, 0, 0, 0, 1, 1]
