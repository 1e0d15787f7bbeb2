"""Sizes that a hostile file may state: each is refused in one line before anything is allocated, or read.

    python benchmarks/hostile_sizes.py [--only FAMILY ...] [--seconds 0.2] [--read_only]

Makes one small model of each family of Hugging Face folders and of each other format, replaces each number in its
JSON files by 2^31-1, 2^63-1, -1, 0 and 1e308, and reads the folder in this process, whose address space is limited
to 4 GB. A model that was read with a huge size then runs on 8 tokens, unless --read_only. Prints a table: family,
keys, refused, read, the slowest of each; then the values that were read. Exit code 3 if a case ends otherwise (a
traceback, memory, more than one line), or if a refusal takes longer than --seconds of the processors. To read a
model takes as long as JAX needs to trace it.
"""

import argparse
import collections
import copy
import dataclasses
import gc
import json
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from harness import ROOT

sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

VALUES = (2**31 - 1, 2**63 - 1, -1, 0, 1e308)
ADDRESS_SPACE = 4 << 30
# Numbers that are no sizes: ids of tokens, versions, facts about the run that made the model.
NO_SIZES = ("_token_id", "id2label", "label2id", "separator_id", "format", "ignore_index")


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The end of one case: refused or read, or the problem."""

    family: str
    key: str
    value: float
    end: str
    seconds: float

    def is_good(self, most: float) -> bool:
        """Return True for a model that was read, or refused in at most ``most`` seconds."""
        return self.end == "read" or (self.end == "refused" and self.seconds <= most)


def folders(place: Path, only: list[str]) -> dict[str, tuple[Path, Path, str]]:
    """Write a model of each family and format, or of those in ``only``; return family -> (path to read, folder,
    names of its files)."""
    import family_folders
    import hf_folders
    from builders import drawn, tiny_model, words

    from bert_jax.config import HeadsConfig, ModelConfig, ModelSpec, SentenceConfig, SentenceModule, TokenizerConfig
    from bert_jax.config.spec import TaskSettings
    from bert_jax.contrib.ancestors.encoders.characters import CHARACTER_IDS, stored_ids
    from bert_jax.contrib.ancestors.formats.allennlp import write_allennlp
    from bert_jax.interop.hf.sentence_transformers import write_sentence_transformers
    from bert_jax.interop.npz import write_npz
    from bert_jax.interop.saved_model import write_saved
    from bert_jax.interop.tf1.checkpoint import PREFIX, write_tf1

    found = dict[str, tuple[Path, Path, str]]()

    def add(family: str, files: str, write: Callable[..., Any], *given: Any, file: str = "", package: bool = False):
        """Add the model that ``write(folder, *given)`` writes, which is read by its ``file``. ``package``: the
        writer needs an optional one, without which the model is left out."""
        folder = place / family.replace(" ", "_")
        if not only or family in only:
            folder.mkdir()
            try:
                write(folder, *given)
                found[family] = folder / file, folder, files
            except ValueError as error:
                if not package:
                    raise
                print(f"{family}: left out ({error})", file=sys.stderr)

    for file in sorted((ROOT / "tests/golden/fixtures/families").glob("*.npz")):
        told = json.loads(file.with_suffix(".json").read_text())
        name = next(iter(told))
        if isinstance(told[name], dict) and "config" in told[name]:
            add(file.stem, "config.json", family_folders.make_folder, file.stem, name)
    for name in ("BertForPreTraining", "RobertaForMaskedLM"):
        add(name, "config.json", hf_folders.make_folder, name)

    def model(heads: HeadsConfig, **more: Any) -> Any:
        return drawn(ModelSpec(model=tiny_model(40), heads=heads, tokenizer=tokenizer, **more), 0.1, words(35))

    tokenizer, pooled = TokenizerConfig(max_length=20), HeadsConfig(pooler=True)
    classifier = HeadsConfig(pooler=True, sequence_labels=("a", "b"))
    task = TaskSettings(kind="classification", max_length=20, labels=("a", "b"))
    sentence = SentenceConfig(modules=(SentenceModule(kind="dense", features=4),))
    add("saved model", "model.json", write_saved, model(classifier))
    add("npz", "model.json", write_npz, model(classifier, task=task))
    files = "config.json 1_Pooling/config.json 2_Dense/config.json sentence_bert_config.json tokenizer_config.json"
    exact = dataclasses.replace(model(pooled, sentence=sentence), exact_tokenizer=True)
    add("sentence-transformers", files, write_sentence_transformers, exact)
    pieces = words(4)
    elmo = ModelConfig.of(
        vocab_size=len(pieces), encoder="bidirectional_lstm", num_layers=1, hidden_size=8, embedding_size=4,
        lstm_cells=4, character_filters=(1, 4), character_size=4, max_characters=8, highway_layers=1,
        position_embeddings="none", type_vocab_size=0, embedding_norm="no", final_norm="no", mlm_layer="none",
    )  # fmt: skip
    weights = drawn(ModelSpec(model=elmo, heads=HeadsConfig(), tokenizer=TokenizerConfig()), 0.1, pieces)
    weights.params[CHARACTER_IDS] = stored_ids(pieces, len(pieces), elmo.max_characters)
    add("saved ELMo", "model.json", write_saved, weights)
    add("ELMo", "options.json", write_allennlp, weights, package=True)

    def write_foreign_tf1(folder: Path) -> None:
        write_tf1(folder, model(pooled))
        (folder / "bert_jax.json").unlink()

    add("TF1", "bert_config.json", write_foreign_tf1, file=PREFIX, package=True)
    return found


def numbers(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of each whole number in a JSON value; of a list, that of its first number only."""
    if isinstance(value, dict):
        for key, one in value.items():
            yield from numbers(one, (*path, key))
    elif isinstance(value, list):
        for i, one in enumerate(value):
            if not isinstance(one, int) or i == 0:
                yield from numbers(one, (*path, i))
    elif type(value) is int:
        yield path


def changed(content: Any, path: tuple[Any, ...], value: Any) -> Any:
    """Return a copy of ``content`` with ``value`` at ``path``."""
    content = copy.deepcopy(content)
    at = content
    for step in path[:-1]:
        at = at[step]
    at[path[-1]] = value
    return content


def attempt(read: Callable[[Path], Any], path: Path, runs: bool) -> tuple[str, float]:
    """Read ``path``; return how that ended, and the processor seconds until then. A model that was read with
    a huge size also runs."""
    from bert_jax.inference.loaded import prepare

    began, seconds = time.process_time(), None
    try:
        weights = read(path)
        seconds, end = time.process_time() - began, "read"
        if runs:
            prepare(weights).forward({"input_ids": np.ones((1, 8), np.int32)})
    except ValueError as error:
        text = str(error)
        end = "refused" if "\n" not in text and len(text) < 2000 else f"{len(text)} characters: {text[:60]}"
    except BaseException as error:  # a MemoryError, an error of XLA: what the table is for
        end = f"{type(error).__name__}: {str(error)[:60]}"
    return end, time.process_time() - began if seconds is None else seconds


def cases(family: str, path: Path, folder: Path, files: str, runs: bool) -> Iterator[Outcome]:
    """Yield the outcome of each value of each number in the ``files`` of a model."""
    from bert_jax.config import ModelConfig
    from bert_jax.interop.readers import read_weights

    for name in files.split():
        file = folder / name
        if not file.is_file():
            continue
        original = file.read_text()
        content = json.loads(original)
        keys = list(numbers(content))
        if name == "config.json" and "model_type" in content:
            from bert_jax.interop.hf.families import FAMILIES

            own = FAMILIES[content["model_type"]].keys.items()
            sizes = [key for key, entry in own if type(getattr(ModelConfig(), entry.field)) is int]
            keys += [(key,) for key in (*sizes, "num_labels") if (key,) not in keys]
        for key in keys:
            shown = ".".join(map(str, key))
            if any(word in shown for word in NO_SIZES):
                continue
            for value in VALUES:
                new = changed(content, key, value)
                file.write_text(json.dumps(new))
                yield Outcome(
                    family, f"{name}: {shown}", value, *attempt(read_weights, path, runs and value > 1 << 30)
                )
                gc.collect(0)
        file.write_text(original)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], metavar="FAMILY")
    parser.add_argument("--seconds", type=float, default=0.2)
    parser.add_argument("--read_only", action="store_true")
    options = parser.parse_args()
    from bert_jax.interop.readers import read_weights

    outcomes: dict[str, list[Outcome]] = {}
    with tempfile.TemporaryDirectory() as place:
        for family, (path, folder, files) in folders(Path(place), options.only).items():
            read_weights(path)  # sound, and everything imported
            resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, resource.getrlimit(resource.RLIMIT_AS)[1]))
            outcomes[family] = []
            for one in cases(family, path, folder, files, not options.read_only):
                outcomes[family].append(one)
                if not one.is_good(options.seconds):
                    shown = f"{one.family} {one.key} = {one.value}: {one.end}, {one.seconds:.2f} s"
                    print(shown, file=sys.stderr, flush=True)
    print("| family | keys | refused | slowest, s | read | slowest, s | other |\n|---|---|---|---|---|---|---|")
    failed = 0
    for family, own in outcomes.items():
        count = collections.Counter(one.end if one.end in ("read", "refused") else "other" for one in own)
        failed += sum(not one.is_good(options.seconds) for one in own)
        row = [family, str(len({one.key for one in own}))]
        for end in ("refused", "read"):
            row += [str(count[end]), f"{max((one.seconds for one in own if one.end == end), default=0):.3f}"]
        print(f"| {' | '.join(row)} | {count['other']} |")
    print("\nread:")
    for family, own in outcomes.items():
        by_key = collections.defaultdict(list)
        for one in own:
            if one.end == "read":
                by_key[one.key].append(f"{one.value:g}" if isinstance(one.value, float) else str(one.value))
        for key, values in by_key.items():
            print(f"{family}: {key} = {', '.join(values)}")
    return 3 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
