"""docs/options.md: every option that no recipe sets, with a test that covers it."""

import re
from pathlib import Path

import yaml

from bert_jax.config.finetune import FinetuneConfig
from bert_jax.config.options import all_options, extended
from bert_jax.config.pretrain import PretrainConfig

REPOSITORY = Path(__file__).resolve().parents[3]
ROWS = re.findall(
    r"^\| `(.+?)` \| (.+?) \| `(.+?)` \|$", (REPOSITORY / "docs" / "options.md").read_text(), re.MULTILINE
)


def set_by_recipes(folder, config_type):
    """Options of ``config_type`` that a recipe in ``folder`` sets."""
    recipes = [yaml.safe_load(path.read_text()) for path in (REPOSITORY / folder).glob("*.yaml")]
    keys = {f"{section}.{name}" for recipe in recipes for section, values in recipe.items() for name in values}
    return keys & all_options(config_type).keys()


def test_the_table_holds_every_option_that_no_recipe_sets():
    known = all_options(PretrainConfig).keys() | all_options(extended(FinetuneConfig)).keys()
    folders = ("configs", "configs/distil", "configs/story")
    used = set.union(*(set_by_recipes(folder, PretrainConfig) for folder in folders))
    for folder in ("configs/finetune", "configs/translation"):
        used |= set_by_recipes(folder, extended(FinetuneConfig))
    listed = [key for key, _, _ in ROWS]
    assert sorted(listed) == sorted(known - used)


def test_each_option_is_in_its_test():
    for key, _, path in ROWS:
        text = (REPOSITORY / "tests" / path).read_text()
        assert re.search(rf"\b{key.rpartition('.')[2]}\b", text), f"{path} does not name {key}"
