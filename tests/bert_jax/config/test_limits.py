"""Limits of options, which stand beside their fields."""

import dataclasses
from dataclasses import dataclass, field
from typing import get_type_hints

import pytest

from bert_jax.config.finetune import FinetuneConfig
from bert_jax.config.loader import load_config
from bert_jax.config.options import all_options
from bert_jax.config.pretrain import PretrainConfig
from bert_jax.config.schema import SET, Limit, Range, Section, check_limits, limited

CONFIGS = (PretrainConfig, FinetuneConfig)


@dataclass(frozen=True, kw_only=True)
class Oven(Section, prefix="oven."):
    grill: bool = False
    heat: int = limited(
        180, Limit(Range("200 or more", lambda value: value >= 200), {"oven.grill": (True,)}, ", which browns")
    )
    pan: str = limited("steel", Limit(("steel", "iron"), {"dish.fat": SET}), Limit(("steel",), {"dish.fat": (0,)}))


@dataclass(frozen=True, kw_only=True)
class Dish(Section, prefix="dish."):
    fat: int = 0


@dataclass(frozen=True, kw_only=True)
class Kitchen:
    oven: Oven = field(default_factory=Oven)
    dish: Dish = field(default_factory=Dish)

    def __post_init__(self):
        check_limits(self)


def test_a_section_checks_limits_between_its_own_options():
    Oven(grill=True, heat=200), Oven(heat=50)
    with pytest.raises(ValueError, match=r"^oven.heat: 180 is not .*: 200 or more with oven.grill, which browns$"):
        Oven(grill=True)


def test_a_config_checks_limits_between_sections():
    iron = Oven(pan="iron")  # alone, the section does not know the dish
    Kitchen(oven=iron, dish=Dish(fat=3))
    with pytest.raises(ValueError, match=r"^oven.pan: 'iron' is not allowed; allowed: steel without dish.fat$"):
        Kitchen(oven=iron)
    with pytest.raises(
        ValueError, match=r"^oven.pan: 'glass' is not allowed; allowed: steel or iron with dish.fat$"
    ):
        Kitchen(oven=Oven(pan="glass"), dish=Dish(fat=3))


@pytest.mark.parametrize(
    ("recipe", "words", "expected"),
    [
        ("dev_fraction: 0.1", "--data.dev d.csv", (("d.csv",), 0.0)),
        ("dev: [d.csv]", "--data.dev_fraction 0.2", ((), 0.2)),
        ("dev: [d.csv]", "--data.dev_fraction 0", (("d.csv",), 0.0)),
        ("dev_fraction: 0.1", "--data.dev", ((), 0.1)),
    ],
)
def test_a_dev_split_of_the_command_replaces_that_of_the_recipe(recipe, words, expected, tmp_path):
    (tmp_path / "recipe.yaml").write_text(f"data: {{{recipe}}}\n")
    config = load_config(FinetuneConfig, ["--config", str(tmp_path / "recipe.yaml"), *words.split()])
    assert (config.data.dev, config.data.dev_fraction) == expected


@pytest.mark.parametrize("recipe", ["dev: [d.csv], dev_fraction: 0.1", ""])
def test_two_dev_splits_of_one_source_are_refused(recipe, tmp_path):
    (tmp_path / "recipe.yaml").write_text(f"data: {{{recipe}}}\n")
    both = [] if recipe else ["--data.dev", "d.csv", "--data.dev_fraction", "0.1"]
    with pytest.raises(ValueError, match=r"data.dev_fraction: 0.1 is not allowed; allowed: 0 with data.dev$"):
        load_config(FinetuneConfig, ["--config", str(tmp_path / "recipe.yaml"), *both])


def limits():
    for config in CONFIGS:
        for section, hint in get_type_hints(config).items():
            for one in dataclasses.fields(hint) if dataclasses.is_dataclass(hint) else ():
                for limit in one.metadata.get("limits", ()):
                    yield f"{section}.{one.name}", hint, limit


def test_conditions_name_options_and_their_sections_check_them():
    """A condition on an option that no config has would be ignored."""
    known = {key for config in CONFIGS for key in all_options(config)}
    found = list(limits())
    assert len(found) > 15
    for key, section, limit in found:
        assert issubclass(section, Section) and key.startswith(section.prefix), key
        assert {*limit.when} <= known, (key, limit)
