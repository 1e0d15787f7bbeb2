"""Commands that compare vectors of texts: search, mine, cluster, anisotropy."""

import argparse
import collections
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bert_jax.commands.options import (
    OUTPUT,
    Command,
    load_model,
    model,
    option,
    pooling,
    run_options,
    say,
    score_lines,
    streaming,
    text_of,
    vector_options,
)
from bert_jax.io.text_lines import Each

if TYPE_CHECKING:
    import numpy as np

    from bert_jax.contrib.analysis.neighbors import Hits
    from bert_jax.contrib.analysis.texts_or_vectors import Collection, Id
    from bert_jax.contrib.analysis.vector_index import VectorIndex
    from bert_jax.inference.loaded import LoadedModel
    from bert_jax.inference.text_files import Entry

_TEXTS = (
    "a file with one text per line (blank lines are skipped), a .jsonl file with id and text, or a .npy file "
    "written by bert-jax embed"
)
_MINED = "file with one text per line (blank lines are skipped), or .jsonl with id and text"
_PROMPT = option("--prompt", metavar="TEXT", help="text to insert before every text")


def search_command(arguments: argparse.Namespace) -> None:
    """Find the texts that are nearest to each query, in a corpus or in an index written by bert-jax embed. In a
    corpus, every text is compared with every query. The output is one JSON line per query: query (its id), text
    (its text) and hits (each with id, score and text). The best hits come first; hits with equal scores are in the
    order of the corpus."""
    from bert_jax.contrib.analysis.neighbors import hit_lines, read_relevant, relevance
    from bert_jax.contrib.analysis.texts_or_vectors import read_collection
    from bert_jax.contrib.analysis.vector_index import VectorIndex
    from bert_jax.inference.text_files import write_json_lines

    given = bool(arguments.queries) or arguments.query_file is not None
    _check_search(arguments, given)
    index = None if arguments.index is None else VectorIndex(arguments.index)
    corpus = read_collection(arguments.corpus) if index is None else index.entries
    queries = read_collection(arguments.query_file, arguments.queries) if given else corpus
    relevant = read_relevant(arguments.relevant, queries, corpus) if arguments.relevant is not None else None
    leaves_own_out = not given and not arguments.keep_self
    own_relevant = [query for query, ids in (relevant or {}).items() if leaves_own_out and query in ids]
    if own_relevant:
        query = f"the query {own_relevant[0]!r} is relevant to itself, but is not among its hits"
        raise ValueError(f"{arguments.relevant}: {query}; correct the file, or set --keep_self")
    rerank = _reranker(arguments, queries, corpus) if arguments.rerank else None
    if index is not None:
        found = _index_hits(arguments, index, queries)
    else:
        found = _corpus_hits(arguments, corpus, queries, leaves_own_out)
    found = found if rerank is None else rerank(found)
    if relevant is None:
        write_json_lines(hit_lines(found, queries, corpus), arguments.output)
        return
    judged: dict[Id, Hits] = {}

    def kept() -> "Iterator[Hits]":
        for query, hits in zip(queries.ids, found, strict=True):
            if query in relevant:
                judged[query] = hits
            yield hits

    if arguments.output is not None:
        write_json_lines(hit_lines(kept(), queries, corpus), arguments.output)
    else:
        collections.deque(kept(), 0)
    wanted = [relevant[query] for query in judged]
    scores = relevance(list(judged.values()), corpus.ids, wanted, arguments.top)
    others = len(queries) - len(judged)
    skipped = f" ({others:,} queries without relevant ids are not counted)" if others else ""
    print(f"{len(judged):,} queries, {arguments.top} hits each{skipped}", *score_lines(scores), sep="\n")


def _check_search(arguments: argparse.Namespace, has_queries: bool) -> None:
    if arguments.queries and arguments.query_file is not None:
        raise ValueError("queries on the command line and --queries: give only one of them")
    if arguments.top < 1:
        raise ValueError(f"--top: {arguments.top} is not allowed; use 1 or more")
    if arguments.dimensions is not None and not arguments.whiten:
        raise ValueError("--dimensions: requires --whiten; add --whiten")
    _check_reranking(arguments)
    if (arguments.corpus is None) == (arguments.index is None):
        raise ValueError("--corpus and --index: give exactly one of them")
    if arguments.index is not None:
        changed = [name for name in ("corpus_prompt", "whiten", "keep_self") if getattr(arguments, name)]
        changed += ["similarity dot"] if arguments.similarity != "cosine" else []
        if changed:
            raise ValueError(f"--{changed[0]} cannot be combined with --index, whose vectors are fixed")
        if not has_queries:
            raise ValueError("--index: no queries; write them on the command line, or set --queries FILE")
    elif arguments.query_prompt is not None and not has_queries:
        raise ValueError(
            "--query_prompt requires queries, but the corpus is searched with itself; use --corpus_prompt"
        )


def _wanted(arguments: argparse.Namespace) -> int:
    return arguments.candidates if arguments.rerank else arguments.top


def _corpus_hits(
    arguments: argparse.Namespace, corpus: "Collection", queries: "Collection", leaves_own_out: bool
) -> "Iterator[Hits]":
    from numpy import arange

    from bert_jax.contrib.analysis.neighbors import nearest

    vectors, query_vectors = _vectors(arguments, corpus, queries)
    own = arange(len(corpus)) if leaves_own_out else None
    return nearest(query_vectors, vectors, _wanted(arguments), similarity=arguments.similarity, own=own)


def _index_hits(arguments: argparse.Namespace, index: "VectorIndex", queries: "Collection") -> "Iterator[Hits]":
    from bert_jax.contrib.analysis.texts_or_vectors import embedded

    loaded, options = _model(arguments, queries), vector_options(arguments, arguments.query_prompt)
    if loaded is not None:
        index.check_model(loaded, options)
    vectors = embedded(queries, loaded, options, run_options(arguments))
    return index.search(vectors, _wanted(arguments))


def _check_reranking(arguments: argparse.Namespace) -> None:
    for name in ("candidates", "rerank_label"):
        if getattr(arguments, name) is not None and not arguments.rerank:
            raise ValueError(f"--{name}: requires --rerank; add --rerank with a model of pairs")
    if arguments.candidates is None:
        arguments.candidates = max(50, arguments.top)
    if arguments.candidates < arguments.top:
        raise ValueError(f"--candidates: {arguments.candidates} is not allowed; use {arguments.top} or more")


def _reranker(
    arguments: argparse.Namespace, queries: "Collection", corpus: "Collection"
) -> "Callable[[Iterator[Hits]], Iterator[Hits]]":
    """Return a function that orders hits by the model of --rerank, which is checked here, before the search."""
    from bert_jax.contrib.analysis.retrieval import relevance_label, require_texts, reranked
    from bert_jax.inference.loaded import load
    from bert_jax.interop.model_bundle import ReadOptions

    require_texts(queries, corpus)
    cross_encoder = load(arguments.rerank, options=ReadOptions(allow_mismatch=arguments.allow_mismatch))
    label, batches = relevance_label(cross_encoder, arguments.rerank_label), run_options(arguments)
    return lambda found: reranked(found, queries, corpus, cross_encoder, label, arguments.top, batches)


def _vectors(
    arguments: argparse.Namespace, corpus: "Collection", queries: "Collection"
) -> "tuple[np.ndarray, np.ndarray]":
    """Return the vectors of ``corpus`` and of ``queries``, whitened if --whiten is set."""
    from bert_jax.contrib.analysis.anisotropy import anisotropy, fit_whitening
    from bert_jax.contrib.analysis.texts_or_vectors import embedded

    loaded, batches = _model(arguments, corpus, queries), run_options(arguments)
    vectors = embedded(corpus, loaded, vector_options(arguments, arguments.corpus_prompt), batches)
    own, of_queries = queries is corpus, vector_options(arguments, arguments.query_prompt)
    query_vectors = vectors if own else embedded(queries, loaded, of_queries, batches)
    if not arguments.whiten:
        return vectors, query_vectors
    if query_vectors.shape[1] != vectors.shape[1]:
        raise ValueError(
            f"--whiten: the queries have width {query_vectors.shape[1]}, but the corpus has width "
            f"{vectors.shape[1]}; use vectors of the same model"
        )
    whitening = fit_whitening(vectors, arguments.dimensions)
    before, vectors = vectors, whitening.apply(vectors)
    if len(before) > 1:
        cosines = f"mean cosine of all pairs {anisotropy(before):.3f}, whitened {anisotropy(vectors):.3f}"
        say(f"{arguments.corpus}: {cosines}, {vectors.shape[1]} of {before.shape[1]} dimensions")
    return vectors, vectors if own else whitening.apply(query_vectors)


def _model(arguments: argparse.Namespace, *collections: "Collection") -> "LoadedModel | None":
    """Return the model; None unless a collection has texts and --model is set."""
    has_texts = any(collection.texts is not None for collection in collections)
    return load_model(arguments) if has_texts and arguments.model is not None else None


def mine_command(arguments: argparse.Namespace) -> None:
    """Add hard negatives to pairs of a query and its answer. Hard negatives are the texts of a corpus that are
    nearest to the query but are not known answers to it. The cosine of query and negative is lower than that of
    query and answer by at least --margin. Writes JSON lines with text, text_pair and negative, which fine-tuning
    reads (sentence.loss negatives or triplet)."""
    from bert_jax.contrib.analysis.retrieval import Mining, with_negatives
    from bert_jax.contrib.analysis.texts_or_vectors import read_collection
    from bert_jax.inference.text_files import read_texts, write_json_lines

    if not -2 <= arguments.margin < 2:
        allowed = "-2 or more and below 2, a difference of two cosines"
        raise ValueError(f"--margin: {arguments.margin} is not allowed; use {allowed}")
    for name in ("count", "candidates"):
        if getattr(arguments, name) < 1:
            raise ValueError(f"--{name}: {getattr(arguments, name)} is not allowed; use 1 or more")
    values = enumerate(read_texts((), arguments.pairs, True), 1)
    pairs = [_pair(value, f"{arguments.pairs}: entry {number}") for number, value in values]
    corpus = None if arguments.corpus is None else read_collection(arguments.corpus)
    mining = Mining(arguments.count, arguments.margin, arguments.candidates)
    if arguments.model is None:
        raise ValueError("--model: missing; name the model whose vectors are compared")
    options, batches = vector_options(arguments), run_options(arguments)
    found = with_negatives(
        pairs, corpus, load_model(arguments), mining, query_prompt=arguments.query_prompt,
        corpus_prompt=arguments.corpus_prompt, options=options, batches=batches,
    )  # fmt: skip
    lines = list(found)
    write_json_lines(lines, arguments.output)
    total, without = sum(len(line["negative"]) for line in lines), sum(not line["negative"] for line in lines)
    say(f"{len(lines):,} pairs, {total / len(lines):.2f} negatives each; {without:,} pairs have none")


def _pair(value: "Entry", where: str) -> tuple[str, str]:
    entry = {} if isinstance(value, str) else value
    text, pair = entry.get("text"), entry.get("text_pair")
    if not (isinstance(text, str) and isinstance(pair, str) and text.strip() and pair.strip()):
        raise ValueError(f'{where}: not a pair; write {{"text": "...", "text_pair": "..."}}')
    return text, pair


def cluster_command(arguments: argparse.Namespace) -> None:
    """Group texts with similar vectors. Writes JSON lines with id, text and cluster, and prints the size and the
    most central text of every cluster (to standard error if the JSON lines go to standard output)."""
    from bert_jax.contrib.analysis.clustering_scores import clustering_scores
    from bert_jax.contrib.analysis.clusters import agglomerative, cluster_lines, kmeans, read_labels, summary_lines
    from bert_jax.contrib.analysis.texts_or_vectors import embedded, read_collection
    from bert_jax.inference.text_files import write_json_lines

    of_kmeans = {"distance": arguments.distance, "seed": arguments.seed, "restarts": arguments.restarts}
    of_kmeans = {name: value for name, value in of_kmeans.items() if value is not None}
    is_kmeans = arguments.method == "kmeans"
    if (arguments.clusters is None) == (arguments.threshold is None):
        raise ValueError("--clusters and --threshold: give exactly one of them")
    if is_kmeans and arguments.threshold is not None:
        raise ValueError("--threshold cannot be combined with kmeans; use --clusters, or --method agglomerative")
    if not is_kmeans and of_kmeans:
        raise ValueError(f"--{next(iter(of_kmeans))} cannot be combined with --method agglomerative")
    if arguments.seed is not None and arguments.seed < 0:
        raise ValueError(f"--seed: {arguments.seed} is not allowed; use 0 or more")
    collection = read_collection(arguments.input)
    labels = read_labels(arguments.label_file, collection) if arguments.label_file is not None else None
    loaded, options = _model(arguments, collection), vector_options(arguments, arguments.prompt)
    vectors = embedded(collection, loaded, options, run_options(arguments))
    if is_kmeans:
        found = kmeans(vectors, arguments.clusters, **of_kmeans)
    else:
        found = agglomerative(vectors, clusters=arguments.clusters, threshold=arguments.threshold)
    write_json_lines(cluster_lines(found, collection), arguments.output)
    tell = say if arguments.output is None else print
    for line in summary_lines(found, collection):
        tell(line)
    if labels is not None:
        scores = clustering_scores(labels, found.labels.tolist())
        tell("  ".join(f"{name} {value:.4f}" for name, value in scores.items()))


def anisotropy_command(arguments: argparse.Namespace) -> None:
    """Print the mean cosine over all pairs of texts (0: isotropic). If the input has texts instead of vectors, also
    print the mean cosine of the rows of the embedding table, grouped by the frequency of their pieces in the texts
    (Li et al. 2020). bert-jax search --whiten removes the common direction."""
    from bert_jax.contrib.analysis.anisotropy import anisotropy, counted_embeddings, frequency_bands
    from bert_jax.contrib.analysis.texts_or_vectors import embedded, read_collection

    collection = read_collection(arguments.input)
    loaded, options = _model(arguments, collection), vector_options(arguments, arguments.prompt)
    vectors = embedded(collection, loaded, options, run_options(arguments))
    print(f"{len(vectors):,} texts: mean cosine of all pairs {anisotropy(vectors):.4f}")
    if collection.texts is None:
        return
    assert loaded is not None
    for band in frequency_bands(*counted_embeddings(loaded, collection.texts)):
        ranks = f"pieces {band.first:,} to {band.last:,} by frequency"
        print(f"{ranks}: mean cosine of all pairs {band.anisotropy:.4f}, mean length {band.mean_length:.3f}")


def write_index(arguments: argparse.Namespace, parts: Sequence[str]) -> None:
    """Write the vectors of ``embed --precision`` as an index. ``parts``: options that ask for vectors of tokens."""
    from bert_jax.contrib.analysis.vector_index import index_texts

    name, target = f"--precision {arguments.precision}", arguments.output
    if parts:
        raise ValueError(f"{name} cannot be combined with --{parts[0]}; an index has one vector per text")
    if target is None or target.suffix in (".npy", ".npz", ".jsonl"):
        raise ValueError(f"{name}: an index is a folder; give --output with the name of a new folder")
    inputs, batches = streaming(arguments)
    options = vector_options(arguments, arguments.prompt, arguments.prompt_name)
    entries = Each(inputs, lambda value: (value, text_of(value)))
    say(index_texts(target, load_model(arguments), entries, arguments.precision, options, batches))


def score_pairs(arguments: argparse.Namespace) -> None:
    """Print how often the acceptable sentence of a minimal pair scores higher (``score --pairs``)."""
    from bert_jax.contrib.analysis import minimal_pairs
    from bert_jax.inference.text_files import write_json_lines

    if arguments.texts or arguments.input is not None or arguments.per_token:
        other = "texts" if arguments.texts else "--input" if arguments.input is not None else "--per_token"
        raise ValueError(f"{other} cannot be combined with --pairs; the pairs are the input")
    pairs, batches = minimal_pairs.read_pairs(arguments.pairs, arguments.limit), run_options(arguments)
    scored = [*minimal_pairs.score_pairs(load_model(arguments), pairs, method=arguments.method, batches=batches)]
    if arguments.pair_scores is not None:
        rows = (
            {**one.pair, "score_good": one.good, "score_bad": one.bad, "correct": one.correct} for one in scored
        )
        write_json_lines(rows, arguments.pair_scores)
    groups = minimal_pairs.accuracies(scored)
    for group in groups:
        if group.level != "paradigm":
            (line,) = score_lines({f"{group.level} {group.name}": group.accuracy})
            print(f"{line} {group.pairs:,} pairs")
    unequal = sum(one.tokens[0] != one.tokens[1] for one in scored)
    print(f"{groups[0].ties:,} ties, counted as wrong; {unequal:,} pairs differ in their number of tokens")
    if arguments.output is not None:
        table = (
            {"level": one.level, "name": one.name, "pairs": one.pairs, "ties": one.ties}
            | dict(zip(("accuracy", "low", "high"), one.accuracy, strict=True))
            for one in groups
        )
        write_json_lines(table, arguments.output)


COMMANDS = (
    Command("search", "find the texts of a corpus that are nearest to each query", search_command, (
        model(required=False, with_int8=True),
        option("--corpus", metavar="FILE", help=_TEXTS),
        option(
            "--index", type=Path, metavar="DIR",
            help="index to search instead of --corpus: a folder that bert-jax embed --precision wrote. A search "
            "in a binary index selects 100 texts per query (or --top, if it is larger) with the bits in memory, "
            "and then ranks these texts by their int8 vectors on disk",
        ),
        option("queries", nargs="*", metavar="QUERY", help="queries (default: each text of the corpus is a query)"),
        option(
            "--queries", dest="query_file", metavar="FILE",
            help="file of queries in any format that --corpus accepts",
        ),
        option("--top", type=int, default=10, metavar="K", help="number of hits per query (default: 10)"),
        option(
            "--similarity", choices=("cosine", "dot"), default="cosine",
            help="measure of similarity, which is the score of a hit (default: cosine)",
        ),
        option(
            "--keep_self", action="store_true",
            help="without queries: allow each text to be its own hit",
        ),
        option(
            "--relevant", type=Path, metavar="FILE",
            help='file with the relevant texts of each query, as JSON lines {"query": id, "relevant": [ids]}; MRR, '
            "precision, recall and NDCG are printed instead of hits",
        ),
        OUTPUT,
        pooling,
        option("--corpus_prompt", metavar="TEXT", help="text to insert before every text of the corpus"),
        option("--query_prompt", metavar="TEXT", help="text to insert before every query"),
        option(
            "--rerank", metavar="DIR_OR_PREFIX",
            help="rerank the best hits with this model, which must be fine-tuned on pairs; it reads each query and "
            "text together",
        ),
        option(
            "--candidates", type=int, metavar="N",
            help="with --rerank: number of hits to rerank (default: 50, or --top if it is larger)",
        ),
        option(
            "--rerank_label", metavar="CLASS",
            help="with --rerank: class of relevant texts (default: the second of two classes)",
        ),
        option(
            "--whiten", action="store_true",
            help="whiten all vectors with the statistics of the corpus (Su et al. 2021)",
        ),
        option(
            "--dimensions", type=int, metavar="N", help="with --whiten: keep the N directions of largest variance",
        ),
    ), group="use", example='--model DIR --corpus corpus.txt "a query"'),
    Command("mine", "add hard negatives to pairs of texts, to train retrieval", mine_command, (
        model(required=False, with_labels=False, with_int8=True),
        option(
            "--pairs", required=True, metavar="FILE",
            help="JSON lines with text (the query) and text_pair (the answer)",
        ),
        option("--corpus", metavar="FILE", help=f"{_MINED} (default: the answers of all pairs)"),
        option(
            "--count", type=int, default=5, metavar="N", help="maximum number of negatives per pair (default: 5)",
        ),
        option(
            "--margin", type=float, default=0.0, metavar="X",
            help="minimum difference between the cosine of query and answer and the cosine of query and negative "
            "(default: 0)",
        ),
        option(
            "--candidates", type=int, default=50, metavar="N",
            help="number of nearest texts from which negatives are selected (default: 50)",
        ),
        OUTPUT,
        pooling,
        option(
            "--corpus_prompt", metavar="TEXT",
            help="text to insert before every answer and every text of the corpus",
        ),
        option("--query_prompt", metavar="TEXT", help="text to insert before the query of every pair"),
    ), group="more", example="--model DIR --pairs pairs.jsonl --output mined.jsonl"),
    Command("cluster", "group similar texts", cluster_command, (
        model(required=False, with_labels=False, with_int8=True),
        option("--input", required=True, metavar="FILE", help=_TEXTS),
        option("--clusters", type=int, metavar="K", help="number of clusters"),
        option(
            "--threshold", type=float, metavar="X",
            help="with --method agglomerative, instead of --clusters: cosine distance above which clusters are not "
            "merged",
        ),
        option(
            "--method", choices=("kmeans", "agglomerative"), default="kmeans", help="algorithm (default: kmeans)",
        ),
        option("--distance", choices=("cosine", "euclidean"), help="distance that kmeans uses (default: cosine)"),
        option("--seed", type=int, metavar="N", help="seed of kmeans (default: 0)"),
        option(
            "--restarts", type=int, metavar="N",
            help="number of kmeans runs, of which the best is used (default: 10)",
        ),
        option(
            "--labels", dest="label_file", metavar="FILE",
            help="file of the correct clusters: one label per line, or .jsonl with id and label. Purity, adjusted "
            "Rand index and NMI are then printed",
        ),
        OUTPUT,
        pooling,
        _PROMPT,
    ), group="use", example="--model DIR --input texts.txt --clusters 20"),
    Command("anisotropy", "measure how strongly the vectors of texts share one direction", anisotropy_command, (
        model(required=False, with_labels=False, with_int8=True),
        option("--input", required=True, metavar="FILE", help=_TEXTS),
        pooling,
        _PROMPT,
    ), group="export and inspect", example="--model DIR --input texts.txt"),
)  # fmt: skip
