"""The commands, manifests and images of docs/guides and docker/ say only what the programs take."""

import configparser
import re
import shlex
from pathlib import Path

import pytest
import yaml

from bert_jax.config import PretrainConfig, RunOptions
from bert_jax.config.loader import Setting, build_config, take_options
from bert_jax.config.options import extended
from bert_jax.contrib.planner.topology import parse_topology
from bert_jax.process import exits
from bert_jax.process.discovery import configured

REPOSITORY = Path(__file__).resolve().parents[1]
GUIDES = sorted((REPOSITORY / "docs" / "guides").glob("*.md"))
IMAGES = sorted((REPOSITORY / "docker").glob("*.Dockerfile"))
COMMAND = re.compile(r"(run_pretrain\.py|bert-jax pretrain|bert-jax plan|bert-data shards) ([^#;&|\n`]*)")


def blocks(path, language):
    return re.findall(rf"```{language}\n(.*?)```", path.read_text(encoding="utf-8"), re.DOTALL)


def commands():
    """(guide, program, words) of every command in a code block."""
    for path in GUIDES:
        for block in blocks(path, "bash"):
            for program, words in COMMAND.findall(block.replace("\\\n", " ")):
                yield pytest.param(program, shlex.split(words), id=f"{path.stem}: {program} {words}"[:80])


def check_recipe(words):
    """``run_pretrain.py`` takes these words: every recipe is there, every option and value allowed."""
    options, rest = take_options(extended(RunOptions), words)
    # The positions of a long model follow from --to_long, without the model that becomes long.
    rows = [Setting("--to_long", "model.max_position_embeddings", str(options.to_long))] if options.to_long else []
    build_config(PretrainConfig, [*rest.all, *rows])
    return options


@pytest.mark.parametrize(("program", "words"), list(commands()))
def test_commands_are_understood(program, words, monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    if program == "bert-jax plan":
        for name in ("--topology", "--price_per_chip_hour"):
            if name in words:
                at = words.index(name)
                assert name != "--topology" or parse_topology(words[at + 1]).shape
                del words[at : at + 2]
    check_recipe(words)


def test_the_tpu_manifest(monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    manifest = yaml.safe_load(blocks(REPOSITORY / "docs/guides/gke.md", "yaml")[0])
    job = manifest["spec"]["replicatedJobs"][0]["template"]["spec"]
    container = job["template"]["spec"]["containers"][0]
    assert check_recipe(container["args"]).workdir.startswith("gs://")
    (rule,) = job["podFailurePolicy"]["rules"]
    final = {exits.USER_ERROR, exits.VERIFICATION_FAILED, exits.DATA_BUDGET, exits.NON_FINITE}
    assert set(rule["onExitCodes"]["values"]) == final and rule["onExitCodes"]["containerName"] == container["name"]
    assert rule["action"] == "FailJob" and job["backoffLimit"] == 0
    assert manifest["spec"]["failurePolicy"]["rules"] == [
        {"action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
    ]
    selector = job["template"]["spec"]["nodeSelector"]["cloud.google.com/gke-tpu-topology"]
    chips = container["resources"]["limits"]["google.com/tpu"] * job["parallelism"]
    assert len(parse_topology(f"v5e:{selector}").shape) == 2 and chips == 16
    assert job["parallelism"] == job["completions"]


def test_the_environment_of_gpu_pods(monkeypatch):
    text = (REPOSITORY / "docs/guides/gke.md").read_text()
    for name, value in re.findall(r'\{name: (\w+), value: "(.*?)"\}', text):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "3")
    assert configured(RunOptions()) == ("bert-node-0-0.bert:8482", 4, 3)


@pytest.mark.parametrize("image", IMAGES, ids=lambda path: path.stem)
def test_images_copy_what_is_there_and_install_what_is_named(image):
    text = image.read_text()
    sent = {line[1:] for line in (REPOSITORY / ".dockerignore").read_text().split() if line.startswith("!")}
    copied = {name for line in re.findall(r"^COPY (.*)", text, re.MULTILINE) for name in line.split()[:-1]}
    assert copied == sent and all((REPOSITORY / name).exists() for name in copied)
    setup = configparser.ConfigParser()
    setup.read(REPOSITORY / "setup.cfg")
    (extras,) = re.findall(r"'\.\[(.*?)\]'", text)
    assert set(extras.split(",")) <= set(setup["options.extras_require"])
    assert re.search(r"^USER (?!root)", text, re.MULTILINE) and 'ENTRYPOINT ["python", "run_pretrain.py"]' in text
