"""Check that docs/articles.md and docs/articles.zh-CN.md name only what the programs take.

    python studies/articles/check.py [--only NAME]

Every command of the pages is run in its short form on a tiny model, or asked for its help if it is long or needs
other hardware or files. Every option and value is looked up. Exit code 1 if one fails. About a minute of one core.
"""

import argparse
import contextlib
import io
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import bert_jax
from bert_jax import registry
from bert_jax.commands import data, main
from bert_jax.commands.finetune import FinetuneRunOptions
from bert_jax.config import FinetuneConfig, PretrainConfig, RunOptions
from bert_jax.config.options import all_options, extended, options_of

REPOSITORY = Path(__file__).resolve().parents[2]
PAGES = {name: REPOSITORY / "docs" / name for name in ("articles.md", "articles.zh-CN.md")}
TINY = {
    "model.vocab_size": 150, "model.hidden_size": 32, "model.num_layers": 2, "model.num_attention_heads": 2,
    "model.intermediate_size": 64, "data.num_shards": 1, "data.workers": 1, "data.dupe_factor": 2,
    "optimizer.warmup_steps": 1, "loggers": [],
}  # fmt: skip
MASKED = '"the [MASK] of the united states"'
# Words of a command on the pages -> what completes them. BASE and NLI are tiny models; the files are those of
# ``prepare``. HELP: the command is long, or needs hardware or files that are not here.
HELP = "HELP"
COMPLETED = {
    "bert-data inspect": "BASE/shards",
    "bert-data vocab --corpus wiki/ --vocab_size 8000 --output vocab.txt": HELP,
    "bert-data vocab": "--corpus texts.txt --vocab_size 120 --output vocab.txt",
    "bert-data vocab --kind bpe": "--corpus texts.txt --vocab_size 60 --output bpe.model",
    "bert-data vocab --kind words --word_segmenter jieba": "--corpus chinese.txt --vocab_size 30 --output words.txt",
    "bert-data wikipedia": HELP,
    "bert-jax anisotropy": "--model BASE --input texts.txt",
    "bert-jax augment": "--model BASE --input pairs.jsonl --copies 1 --output more.jsonl",
    "bert-jax benchmark-inference": HELP,
    "bert-jax calibrate": "--model NLI --to calibrated --examples pairs.jsonl",
    "bert-jax cluster --clusters 150": "--model BASE --input many.txt",
    "bert-jax compare": "NLI OTHER --split dev",
    "bert-jax doctor": HELP,
    "bert-jax embed --pooling": "max --model BASE --input texts.txt --output vectors.npy",
    "bert-jax fill-mask": f"--model BASE {MASKED}",
    f"bert-jax fill-mask {MASKED}": "--model BASE",
    "bert-jax finetune --help_all": "",
    "bert-jax generate": '--model BASE --prompt "the house"',
    "bert-jax mine": "--model BASE --pairs pairs.jsonl --corpus texts.txt --count 1 --output mined.jsonl",
    'bert-jax neighbors bank --in "he sat on the bank of the river"': "--model BASE --corpus texts.txt",
    'bert-jax picture MODEL "a text"': "--output page.html",
    "bert-jax plan": HELP,
    "bert-jax pretrain --config quickstart": HELP,
    "bert-jax predict": "--model NLI --input pairs.jsonl",
    "bert-jax pretrain --config bert_base_phase1 --print_config": "",
    "bert-jax probe": "--task pos --train words.conllu --test words.conllu --model BASE",
    "bert-jax prune --importance gradient": "--model NLI --to small --heads 0.5 --examples pairs.jsonl",
    "bert-jax score": "--model BASE --input texts.txt",
    "bert-jax search --whiten": "--model BASE --corpus texts.txt --top 1",
    "bert-jax submission": HELP,
    'bert-jax zero-shot --labels sport politics --template "This text is about {}."': '--model NLI "What a goal!"',
}
REFUSED = {"bert-jax generate"}  # exit code 2: a model that reads both sides does not continue texts
# Words between backquotes that are neither commands nor options nor values: columns, names in Python, files.
OTHER = {"text", "text_pair", "config.yaml", "decay_mask", "tokenization.py", "tok:zh", *dir(bert_jax.LoadedModel)}


def spans(text: str) -> list[str]:
    """Return the different words between backquotes of a page, without its blocks of code."""
    return sorted({*re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL))})


def is_command(span: str) -> bool:
    """Return True if ``span`` is a command line."""
    return span.startswith(("bert-jax ", "bert-data ", "python "))


def _allowed(kind: Any) -> set[str]:
    """Return the values of a type of options that are names."""
    found = {one for one in get_args(kind) if isinstance(one, str)}
    return found.union(*map(_allowed, (one for one in get_args(kind) if not isinstance(one, str))))


def unknown(span: str) -> str:
    """Return what is wrong with ``span``, which is no command: an option or a value that does not exist."""
    sections = [all_options(one) for one in (PretrainConfig, extended(FinetuneConfig))]
    runs = [options_of(extended(one)) for one in (RunOptions, FinetuneRunOptions)]
    types: dict[str, list[Any]] = {}
    for options in (*sections, *runs):
        for name, option in options.items():
            types.setdefault(name, []).append(option.type)
    values = set().union(*(_allowed(kind) for kinds in types.values() for kind in kinds))
    values |= {name for kind in ("encoders", "objectives") for name in registry.names(kind)}  # type: ignore[arg-type]
    # Of bert-data vocab and bert-jax cluster, whose commands are run; and that of files with an encoder.
    parsers = {"--kind", "--labels", registry.MODULE}
    if not span.startswith("--") and not re.match(r"[a-z]+\.\w+( |$)", span):
        return "" if span in values | OTHER else f"{span}: neither an option nor a value"
    for name, value in re.findall(r"(?:--)?([\w.]+)(?: ([^-\s]\S*))?", span):
        if name not in types and f"--{name}" not in parsers and span not in OTHER:
            return f"{name}: no option"
        allowed = set().union(*map(_allowed, types.get(name, [])))
        if value and allowed and value not in allowed:
            return f"{name} {value}: allowed: {', '.join(sorted(allowed))}"
    return ""


def prepare(folder: Path) -> dict[str, str]:
    """Write small files into ``folder`` and train tiny models; return the names that stand for their folders."""
    nouns = ["house", "river", "bank", "goal", "law", "film", "city", "song", "tree", "road"]
    texts = [f"he saw the {noun} of the {other} near the bank" for noun in nouns for other in nouns if noun != other]
    (folder / "texts.txt").write_text("\n".join(texts) + "\n")
    (folder / "many.txt").write_text("\n".join(f"{text} {end}" for text in texts for end in ("again", "then")) + "\n")
    (folder / "chinese.txt").write_text("我们在北京学习语言模型。\n她喜欢读中国历史。\n" * 20, encoding="utf-8")
    labels = ("entailment", "neutral", "contradiction")
    rows = [{"text": a, "text_pair": b, "label": labels[i % 3]} for i, (a, b) in enumerate(zip(texts, texts[1:]))]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tags = {"he": "PRON", "saw": "VERB", "the": "DET", "of": "ADP", "near": "ADP"}
    sentences = (
        "".join(
            f"{i + 1}\t{word}\t{word}\t{tags.get(word, 'NOUN')}\t_\t_\t{2 if i != 1 else 0}\tdep\t_\t_\n"
            for i, word in enumerate(text.split())
        )
        for text in texts[:40]
    )
    (folder / "words.conllu").write_text("\n".join(sentences) + "\n")
    quiet = {"report": None, "max_length": 32, "batch_size": 8, "num_steps": 2}
    corpus = [" .\n".join(texts[i : i + 9]) + " ." for i in range(0, len(texts), 9)]
    options = TINY | {"data.shards": str(folder / "base" / "shards"), "data.eval_fraction": 0.2}
    bert_jax.pretrain("quickstart_bert", corpus=corpus, workdir=folder / "base", options=options, **quiet)
    for seed, name in enumerate(("nli", "other")):
        bert_jax.finetune(
            folder / "base", train=str(folder / "pairs.jsonl"), dev=0.2, workdir=folder / name, seed=seed,
            options={"loggers": []}, **quiet,
        )  # fmt: skip
    return {"BASE": "base", "MODEL": "base", "NLI": "nli", "OTHER": "other"}


def completed(span: str, names: dict[str, str]) -> list[str]:
    """Return the words of the command that is run for ``span``."""
    rest = COMPLETED[span]
    words = shlex.split(span) + (["--help"] if rest == HELP else shlex.split(rest))
    return [re.sub(r"\b[A-Z]{3,}\b", lambda found: names.get(found[0], found[0]), word) for word in words]


def run(words: Sequence[str]) -> tuple[int, str]:
    """Run a command in this process; return its exit code and what it printed."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        try:
            program = {"bert-jax": main.main, "bert-data": data.main}[words[0]]
            code = program(list(words[1:]))
        except SystemExit as ended:  # help
            code = int(ended.code or 0)
    return code, out.getvalue()


def check(only: str = "") -> list[str]:
    """Return the failures of all commands, options and values of the pages whose text contains ``only``."""
    found = sorted({span for page in PAGES.values() for span in spans(page.read_text(encoding="utf-8"))})
    found = [span for span in found if only in span]
    failures = [wrong for span in found if not is_command(span) and (wrong := unknown(span))]
    commands = [span for span in found if is_command(span) and not span.startswith("python ")]
    failures += [f"{span}: no short form in COMPLETED" for span in commands if span not in COMPLETED]
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        names = prepare(Path(folder))
        for span in commands:
            if span not in COMPLETED:
                continue
            words = completed(span, names)
            code, printed = run(words)
            fits = code == (2 if span in REFUSED else 0)
            print(f"{'ok    ' if fits else 'FAILED'} {shlex.join(words)}", flush=True)
            if not fits:
                failures.append(f"{shlex.join(words)}: exit code {code}\n{printed[-1500:]}")
    scripts = [line for page in PAGES.values() for line in re.findall(r"^python (.*)", page.read_text("utf-8"), re.M)]
    for line in sorted({*scripts}):
        words = [sys.executable, *shlex.split(line)]
        if "MODEL" in words:  # needs a model and files
            words = [*words[:3], "--help"]
        ended = subprocess.run(words, cwd=REPOSITORY, capture_output=True, text=True)
        print(f"{'FAILED' if ended.returncode else 'ok    '} python {shlex.join(words[1:])}", flush=True)
        if ended.returncode:
            failures.append(f"{line}: exit code {ended.returncode}\n{ended.stderr[-1500:]}")
    return failures


def command_line() -> None:
    """Check the pages and print the failures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="only commands and options that contain this")
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    failures = check(parser.parse_args().only)
    print("\n".join(failures) if failures else "all commands and options of the pages are those of the programs")
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    command_line()
