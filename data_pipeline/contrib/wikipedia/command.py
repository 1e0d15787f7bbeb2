"""The command ``bert-data wikipedia``."""

from collections.abc import Sequence

from bert_jax.commands.data import DataCommand, report, take, whole_number
from bert_jax.io.storage import location
from bert_jax.process.signals import StopRequest


def wikipedia_command(words: Sequence[str]) -> None:
    """Extract the dumps that the arguments ``words`` name."""
    from data_pipeline.contrib.wikipedia.extract import STOPPED, extract_wikipedia

    own, dumps = take(words, output={"type": location}, workers={"type": whole_number, "default": 0})
    if unknown := [word for word in dumps if word.startswith("--")]:
        raise ValueError(f"bert-data wikipedia: {unknown[0]}: unknown option; allowed: --output, --workers")
    if own.output is None:
        raise ValueError("bert-data wikipedia: no --output; name the folder for the text: --output FOLDER")
    with StopRequest().at_once(STOPPED):
        counts = extract_wikipedia(
            [location(word) for word in dumps], own.output, workers=own.workers, report=report
        )
    for name, count in sorted(counts.items()):
        report(f"{name}: {count:,}")
    report(f"text in {own.output}; read it with --corpus {own.output}")


USAGE = """\
  wikipedia  extract the paragraphs of articles from MediaWiki XML dumps as text files, which --corpus reads
             bert-data wikipedia enwiki-latest-pages-articles.xml.bz2 --output wiki/ --workers 2
           --workers N sets the number of processes (default: one per processor)
"""
COMMAND = DataCommand(wikipedia_command, USAGE)
