"""Commands about words: nearest words, and probes of the layers."""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from bert_jax.commands.options import (
    BATCH_TOKENS,
    Command,
    load_model,
    model,
    option,
    run_options,
    say,
    text_of,
    whole_numbers,
)
from bert_jax.io.text_lines import Each
from bert_jax.json_values import Json

if TYPE_CHECKING:
    from bert_jax.contrib.analysis.word_neighbors import Neighbor
    from bert_jax.inference.loaded import LoadedModel

_OUTPUT = option(
    "--output",
    type=Path,
    metavar="FILE",
    help="file for JSON lines (default: readable text is printed)",
)


def neighbors_command(arguments: argparse.Namespace) -> None:
    """Print the words nearest to each WORD by cosine. Without --in, words are compared by their input embeddings,
    so a word has the same vector in all texts. With --in, the vector of the WORD in this text is compared with the
    vectors of all words in the texts of --corpus. With --in and without --corpus, this vector is compared with
    vocabulary words that are each encoded without context, which is less informative for a word with several
    meanings."""
    from bert_jax.contrib.analysis import word_neighbors
    from bert_jax.inference.text_files import write_json_lines

    _check_neighbors(arguments)
    loaded = load_model(arguments)
    rows: list[tuple[dict[str, Json], str, list[Neighbor]]] = []
    if arguments.text is None:
        queries = word_neighbors.terms_of(arguments.words)
        names = arguments.words if len(queries) == len(arguments.words) else [" ".join(arguments.words)]
        found = word_neighbors.static_neighbors(loaded, queries, arguments.top)
        for name, own in zip(names, found, strict=True):
            rows.append((word_neighbors.neighbor_line(name, own), f"{name} (input embeddings)", own))
    else:
        rows = _contextual(arguments, loaded)
    if arguments.output is not None:
        write_json_lines((line for line, _, _ in rows), arguments.output)
        return
    for _, title, own in rows:
        print(title)
        for one in own:
            print(word_neighbors.printed(one))


def _check_neighbors(arguments: argparse.Namespace) -> None:
    for name in ("corpus", "layer", "occurrence", "candidates"):
        if arguments.text is None and getattr(arguments, name) is not None:
            raise ValueError(f"--{name}: requires --in; add --in with a text that contains the word")
    if arguments.text is not None and {"+", "-"} & set(arguments.words):
        raise ValueError("--in cannot be combined with + and -")
    if arguments.candidates is not None and arguments.corpus is not None:
        raise ValueError("--candidates cannot be combined with --corpus, whose words are the candidates")
    for name in ("top", "candidates"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name}: {value} is not allowed; use 1 or more")


def _contextual(
    arguments: argparse.Namespace, loaded: "LoadedModel"
) -> "list[tuple[dict[str, Json], str, list[Neighbor]]]":
    from bert_jax.contrib.analysis import word_neighbors
    from bert_jax.contrib.analysis.word_vectors import checked_layers, hidden_layers
    from bert_jax.inference.text_files import read_texts

    layer = word_neighbors.default_layer(loaded) if arguments.layer is None else arguments.layer
    (layer,) = checked_layers(loaded, (layer,))
    batches = run_options(arguments)
    queries = word_neighbors.find_occurrences(
        loaded, arguments.words, arguments.text, layer, 1 if arguments.occurrence is None else arguments.occurrence
    )
    if arguments.corpus is not None:
        texts = Each(read_texts((), arguments.corpus, False), text_of)
        found = word_neighbors.corpus_neighbors(
            loaded, queries, arguments.text, texts, layer, arguments.top, batches=batches
        )
    else:
        candidates = 5000 if arguments.candidates is None else arguments.candidates
        found = list(
            word_neighbors.vocabulary_neighbors(
                loaded, queries, layer, arguments.top, candidates=candidates, batches=batches
            )
        )
    rows = []
    for query, own in zip(queries, found, strict=True):
        begin, end = query.span
        line = word_neighbors.neighbor_line(query.word, own, text=arguments.text, start=begin, end=end, layer=layer)
        shown = f"{arguments.text[:begin]}[{arguments.text[begin:end]}]{arguments.text[end:]}"
        rows.append((line, f"{query.word} in {shown!r} (layer {layer} of {hidden_layers(loaded) - 1})", own))
    return rows


def probe_command(arguments: argparse.Namespace) -> None:
    """For each layer, train a linear classifier that predicts a property of words from their vectors, and print its
    accuracy on test data with 95% intervals. The task pos predicts the part of speech of a word. deprel predicts
    the relation of a word to its head from the vectors of both words. For these two tasks, the accuracy on a
    control task (a random label per word; Hewitt and Liang 2019) is also printed, and the selectivity, which is the
    difference between the two accuracies. sense predicts the sense of a word, with one classifier per word. length
    predicts the number of words in a sentence, in six bins, from the mean of the word vectors. heads reads
    attention instead of vectors: for each relation, it prints the attention head that most often finds the
    syntactic head of a word, and the best fixed offset (Clark et al. 2019)."""
    from bert_jax.inference.text_files import write_json_lines

    for name in ("limit", "seed"):
        if getattr(arguments, name) < 0:
            raise ValueError(f"--{name}: {getattr(arguments, name)} is not allowed; use 0 or more")
    if arguments.task == "sense":
        arguments.test = arguments.test or arguments.train
    elif arguments.test is None:
        raise ValueError(f"--test: required with --task {arguments.task}; give a CoNLL-U file")
    for name in ("classifier", "layers"):
        if arguments.task == "heads" and getattr(arguments, name) is not None:
            raise ValueError(f"--{name} cannot be combined with --task heads, which reads no vectors")
    rows = _heads(arguments) if arguments.task == "heads" else _probed(arguments)
    if arguments.output is not None:
        write_json_lines((line for line, _ in rows), arguments.output)
        return
    for _, shown in rows:
        print(shown, flush=True)


def _probed(arguments: argparse.Namespace) -> Iterator[tuple[dict[str, Json], str]]:
    from bert_jax.contrib.analysis.probe_tasks import read_examples
    from bert_jax.contrib.analysis.probing import Probe, printed, row_line
    from bert_jax.contrib.analysis.word_vectors import checked_layers

    layers = None if arguments.layers is None else whole_numbers("--layers", arguments.layers)
    batches = run_options(arguments)
    parts = read_examples(arguments.task, arguments.train, arguments.test, arguments.limit)
    probe = Probe(*parts, classifier=arguments.classifier or "linear", seed=arguments.seed)
    loaded = load_model(arguments)
    # Before the first result is printed.
    loaded.need_tokenizer()
    checked_layers(loaded, (0,) if layers is None else layers)
    counts = " and ".join(f"{len(own):,}" for own in parts)
    say(f"{arguments.task}: {counts} examples of training and test, {len(probe.labels.names)} classes")
    for row in probe.baselines():
        yield row_line(arguments.task, row), printed(row)
    for row in probe.layers(loaded, layers, batches=batches):
        yield row_line(arguments.task, row), printed(row)


def _heads(arguments: argparse.Namespace) -> Iterator[tuple[dict[str, Json], str]]:
    from bert_jax.contrib.analysis.attention_heads import attended, best_heads, printed, relation_line
    from bert_jax.io.conll import read_treebank

    batches = run_options(arguments)
    files = [list(read_treebank(path)) for path in (arguments.train, arguments.test)]
    loaded = load_model(arguments)
    parts = [attended(loaded, own, arguments.limit, batches=batches) for own in files]
    for name, own in zip(("training", "test"), parts, strict=True):
        skipped = f", {own.skipped:,} of them too long and omitted" if own.skipped else ""
        say(f"{name}: {own.sentences:,} sentences{skipped}, {len(own.relations):,} words with a head")
    train, test = parts
    for one in best_heads(train, test, seed=arguments.seed):
        yield relation_line(one), printed(one)


COMMANDS = (
    Command("neighbors", "find the words nearest to a word, alone or in a text", neighbors_command, (
        option(
            "words", nargs="+", metavar="WORD",
            help="words, or an analogy: words with + and - between them",
        ),
        model(required=True, with_labels=False),
        option(
            "--in", dest="text", metavar="TEXT",
            help="text that contains the words and determines their vectors",
        ),
        option(
            "--occurrence", type=int, metavar="N",
            help="with --in: use the N-th occurrence of the word (default: 1)"
        ),
        option(
            "--layer", type=int, metavar="I",
            help="with --in: layer whose vectors are used; 0: the embeddings, 1: the first layer, -1: the last "
            "layer (default: the layer at three quarters of the depth, which is printed)",
        ),
        option(
            "--corpus", metavar="FILE",
            help="with --in: file of texts, one per line, or .jsonl; every occurrence of every word in these texts "
            "is a candidate",
        ),
        option(
            "--candidates", type=int, metavar="N",
            help="with --in, without --corpus: number of vocabulary words to compare with, beginning with the "
            "lowest ids (default: 5000)",
        ),
        option("--batch_tokens", type=int, metavar="N", help=BATCH_TOKENS),
        option(
            "--top", type=int, default=10, metavar="K",
            help="number of neighbors per word (default: 10)",
        ),
        _OUTPUT,
    ), group="export and inspect", example='bank --in "he sat on the bank of the river" --model DIR'),
    Command("probe", "measure which properties of words a linear classifier reads from each layer", probe_command, (
        model(required=True, with_labels=False),
        option(
            "--task", required=True, choices=("pos", "deprel", "sense", "length", "heads"),
            help="what to probe, as described above",
        ),
        option(
            "--train", required=True, type=Path, metavar="FILE",
            help="training data: a CoNLL-U file, plain or .gz; for sense, a folder in the layout of CoarseWSD-20",
        ),
        option(
            "--test", type=Path, metavar="FILE",
            help="test data, in the same format (default for sense: the folder of --train)",
        ),
        option(
            "--limit", type=int, default=2000, metavar="N",
            help="number of evenly spaced sentences to use from each file or, for sense, for each word; 0: all "
            "(default: 2000)",
        ),
        option(
            "--layers", metavar="0,-1",
            help="layers to read, separated by commas; 0: the embeddings, 1: the first layer, -1: the last layer "
            "(default: all)",
        ),
        option(
            "--classifier", choices=("linear", "centroid"),
            help="linear: logistic regression, whose L2 penalty is selected on a tenth of the training sentences; "
            "centroid: the class whose mean vector has the highest cosine (default: linear)",
        ),
        option(
            "--seed", type=int, default=0, metavar="N",
            help="seed of the control labels and of the intervals (default: 0)"
        ),
        option("--batch_tokens", type=int, metavar="N", help=BATCH_TOKENS),
        _OUTPUT,
    ), group="export and inspect", example="--task pos --train train.conllu --test test.conllu --model DIR"),
)  # fmt: skip
