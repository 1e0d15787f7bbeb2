"""Subcommands of ``bert-jax`` about words: nearest words."""

import argparse
from pathlib import Path
from typing import Any

from bert_jax.cli.options import Command, load_model, model, option, run_options

_OUTPUT = option("--output", type=Path, metavar="FILE", help="write JSON lines instead of readable text")


def neighbors_command(arguments: argparse.Namespace) -> None:
    """Print the words nearest to each WORD by cosine. Without --in, words are compared by the table of input
    embeddings, in which a word has one vector. With --in, the contextual vector of the WORD in a text is compared
    with every word of the texts in --corpus or, without it, with the words of the vocabulary, each run through the
    model alone, which says less about a word of several meanings."""
    from bert_jax.analysis import word_neighbors
    from bert_jax.inference.text_files import write_json_lines

    _check_neighbors(arguments)
    loaded = load_model(arguments)
    rows: list[tuple[dict[str, Any], str, list[Any]]] = []
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
        raise ValueError("--in: not allowed with + and -; omit --in")
    if arguments.candidates is not None and arguments.corpus is not None:
        raise ValueError("--candidates: not allowed with --corpus, whose words are the candidates; omit it")
    for name in ("top", "candidates"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name}: {value} is not allowed; allowed: 1 or more")


def _contextual(arguments: argparse.Namespace, loaded: Any) -> list[tuple[dict[str, Any], str, list[Any]]]:
    from bert_jax.analysis import word_neighbors
    from bert_jax.inference.text_files import read_texts
    from bert_jax.inference.words import checked_layers, hidden_layers

    layer = word_neighbors.default_layer(loaded) if arguments.layer is None else arguments.layer
    (layer,) = checked_layers(loaded, (layer,))
    options = run_options(arguments)
    queries = word_neighbors.find_occurrences(
        loaded, arguments.words, arguments.text, layer, 1 if arguments.occurrence is None else arguments.occurrence
    )
    if arguments.corpus is not None:
        texts = (_text_of(value) for value in read_texts((), arguments.corpus, False))
        found = word_neighbors.corpus_neighbors(
            loaded, queries, arguments.text, texts, layer, arguments.top, **options
        )
    else:
        candidates = 5000 if arguments.candidates is None else arguments.candidates
        found = list(
            word_neighbors.vocabulary_neighbors(
                loaded, queries, layer, arguments.top, candidates=candidates, **options
            )
        )
    rows = []
    for query, own in zip(queries, found, strict=True):
        begin, end = query.span
        line = word_neighbors.neighbor_line(query.word, own, text=arguments.text, start=begin, end=end, layer=layer)
        shown = f"{arguments.text[:begin]}[{arguments.text[begin:end]}]{arguments.text[end:]}"
        rows.append((line, f"{query.word} in {shown!r} (layer {layer} of {hidden_layers(loaded) - 1})", own))
    return rows


def _text_of(value: Any) -> str:
    text = value if isinstance(value, str) else value.get("text")
    if not isinstance(text, str):
        raise ValueError(f'{str(value)[:80]}: no text; write {{"text": "..."}}')
    return text


COMMANDS = (
    Command("neighbors", "the words nearest to a word, alone or in a text", neighbors_command, (
        option("words", nargs="+", metavar="WORD", help="words, or words with + and - between them (analogies)"),
        model(required=True, with_labels=False),
        option("--in", dest="text", metavar="TEXT", help="text that contains the words: use their vectors there"),
        option(
            "--occurrence", type=int, metavar="N", help="with --in: the N-th occurrence of the word (default: 1)"
        ),
        option(
            "--layer", type=int, metavar="I",
            help="with --in: 0 for the embeddings, 1 for the first layer, -1 for the last (default: the layer at "
            "three quarters of the depth; it is printed)",
        ),
        option(
            "--corpus", metavar="FILE",
            help="with --in: texts, one per line or .jsonl; each occurrence of each word is a candidate",
        ),
        option(
            "--candidates", type=int, metavar="N",
            help="with --in, without --corpus: number of vocabulary words, those with the lowest ids (default: "
            "5000)",
        ),
        option("--batch_tokens", type=int, metavar="N", help="number of tokens per batch"),
        option("--top", type=int, default=10, metavar="K", help="number of neighbors (default: 10)"),
        _OUTPUT,
    ), {"epilog": 'Example: bert-jax neighbors bank --in "he sat on the bank of the river" --model DIR'}),
)  # fmt: skip
