"""Vectors of skip-gram and CBOW against gensim's, on the same words in the same order of sentences.

    python studies/word_vectors/word_vectors.py --corpus TEXT TEXT --gensim PYTHON --work FOLDER [--seeds 0 1 2 3 4]
        [--methods skip_gram cbow] [--output LINES] [--short]

``PYTHON`` has gensim 4.4 (``pip install gensim==4.4.0``), whose package also holds the test sets. The vocabulary is
the 40,000 most frequent words, the rows of the shards are the sentences of both, and both train 5 epochs with 100
values, windows of 5, 5 negatives, subsampling from 1e-3 and two threads. Compared over the seeds:

* Spearman correlation with human judgments (WordSim-353, SimLex-999) over the pairs whose words both occur at least
  5 times;
* accuracy of analogies (questions-words.txt) among the 20,000 most frequent words;
* overlap of the 10 nearest neighbors of the 1,000 most frequent words, between one of ours and one of gensim's, and
  between two of gensim's;
* words per second;
* the words and values that gensim reads from our files, which must be bitwise ours.

Finished runs in FOLDER are not repeated, and a cut run resumes. ``--short``: 1 seed of ours and 2 of gensim's, one
epoch, without a bar for the correlations. Exit code 3 if a mean correlation is more than 0.02 below gensim's, the
overlap more than 0.03 below that of two gensim seeds, or the speed less than 0.2 times gensim's, and if gensim
reads other vectors from our files.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
WORDS, SIZE, WINDOW, NEGATIVES, SUBSAMPLE, EPOCHS = 40_000, 100, 5, 5, 1e-3, 5
CORRELATION_BAR, OVERLAP_BAR, SPEED_BAR = 0.02, 0.03, 0.2
SETS = {"wordsim353": "wordsim353.tsv", "simlex999": "simlex999.txt"}
ANALOGY_WORDS, FREQUENT, NEIGHBORS, LEAST = 20_000, 1000, 10, 5

# Run by the other Python: trains, reads files, or copies the test sets.
GENSIM = """
import json, sys, time, shutil, pathlib, gensim
from gensim.models.word2vec import LineSentence, Word2Vec
settings = json.loads(sys.argv[1])
if settings["sets"]:
    folder = pathlib.Path(gensim.__file__).parent / "test" / "test_data"
    for name in settings["sets"]:
        shutil.copy(folder / name, settings["to"])
elif "read" in settings:
    import numpy
    from gensim.models import KeyedVectors
    for name, to in settings["read"]:
        vectors = KeyedVectors.load_word2vec_format(name, binary=name.endswith(".bin"))
        numpy.savez(to, words=numpy.array(vectors.index_to_key), vectors=vectors.vectors)
else:
    model = Word2Vec(min_count=1, workers=2, **settings["options"])
    model.build_vocab(LineSentence(settings["text"]))
    start = time.perf_counter()
    model.train(LineSentence(settings["text"]), total_examples=model.corpus_count, epochs=settings["epochs"])
    seconds = time.perf_counter() - start
    model.wv.save_word2vec_format(settings["to"], binary=True)
    words = model.corpus_total_words * settings["epochs"]
    print(json.dumps({"version": gensim.__version__, "seconds": seconds, "words_per_second": words / seconds}))
"""


def other(python: Path, **settings: object) -> str:
    """Run :data:`GENSIM` with the Python that has gensim; return what it prints."""
    command = [str(python), "-c", GENSIM, json.dumps({"sets": []} | settings)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def arguments_of(method: str, corpus: list[Path], work: Path) -> list[str]:
    """Return the options of our runs, without those of a seed."""
    return [
        "--config", str(ROOT / f"configs/story/{method}.yaml"), "--data.corpus", *map(str, corpus),
        "--data.shards", str(work / "shards"), "--data.eval_fraction", "0.02",
        "--data.tokenizer", "words", "--model.vocab_size", str(WORDS),
        "--model.hidden_size", str(SIZE), "--objective.window", str(WINDOW), "--objective.negatives",
        str(NEGATIVES), "--objective.subsample", str(SUBSAMPLE),
    ]  # fmt: skip


def rows_of(method: str, corpus: list[Path], work: Path) -> tuple[list[list[str]], np.ndarray, list[str]]:
    """Build the shards; return the words of every training row, the counts of the vocabulary, and its words."""
    from bert_jax.config import PretrainConfig, load_config
    from bert_jax.contrib.ancestors.objectives.sampling import special_ids, training_ids
    from bert_jax.tokenization import load_tokenizer
    from data_pipeline.build.ensure import ensure_data
    from data_pipeline.read.pretrain_input import ShardSource

    config = load_config(PretrainConfig, arguments_of(method, corpus, work))
    vocabulary = ensure_data(config.data, vocab_size=config.model.vocab_size, report=print)
    tokenizer = load_tokenizer(vocabulary, lower_case=config.data.lower_case)
    words = tokenizer.pieces(range(tokenizer.vocab_size))
    special, rows, counts = set(special_ids(tokenizer)), [], np.zeros(len(words), np.int64)
    for ids, sequences in training_ids(ShardSource(config, tokenizer)):
        for row, seen in zip(ids, sequences, strict=True):
            kept = [token for token in row[seen > 0].tolist() if token not in special]
            counts += np.bincount(kept, minlength=len(words))
            rows.append([words[token] for token in kept])
    return rows, counts, words


def train(method: str, seed: int, epochs: int, rows: int, corpus: list[Path], work: Path) -> Path:
    """Train one of our runs; return its workdir."""
    from bert_jax.config import PretrainConfig, load_config

    arguments, workdir = arguments_of(method, corpus, work), work / f"{method}-{epochs}-{seed}"
    batch = load_config(PretrainConfig, arguments).training.global_batch_size
    steps = epochs * rows // batch
    command = [
        sys.executable, "run_pretrain.py", *arguments, "--training.seed", str(seed), "--training.num_steps",
        str(steps), "--training.eval_interval", str(steps), "--training.log_interval", str(max(steps // 50, 1)),
        "--training.checkpoint_interval", str(max(steps // 4, 1)), "--workdir", str(workdir),
    ]  # fmt: skip
    subprocess.run(command, cwd=ROOT, check=True)
    return workdir


def speed(workdir: Path, words_per_epoch: int, rows: int, batch: int) -> float:
    """Return the words per second of a run: the median over its log lines."""
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    seconds = [line["seconds_per_step"] for line in lines if "seconds_per_step" in line]
    return words_per_epoch / rows * batch / statistics.median(seconds)


def unit(path: Path, words: list[str]) -> np.ndarray:
    """Return the vectors of ``words`` in a model, divided by their norms (0 for absent words)."""
    from bert_jax.interop.model_bundle import ReadOptions
    from bert_jax.interop.readers import read_weights

    bundle = read_weights(path, ReadOptions())
    own = bundle.tokenizer_content.decode().split("\n")
    places = {word: place for place, word in enumerate(own)}
    table = bundle.params["embeddings/word_embeddings/embedding"]
    vectors = np.stack([table[places[word]] if word in places else np.zeros(table.shape[1]) for word in words])
    return (vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-9)).astype(np.float32)


def is_read_by_gensim(workdir: Path, gensim: Path, work: Path) -> bool:
    """Return True if gensim reads the same words and, bit for bit, the same values from both files of the model in
    ``workdir``."""
    from bert_jax.contrib.ancestors.formats.word2vec import BINARY_FILE, TABLE, TEXT_FILE, write_word2vec
    from bert_jax.interop.model_bundle import ReadOptions
    from bert_jax.interop.readers import read_weights

    bundle = read_weights(workdir, ReadOptions())
    words, table = bundle.tokenizer_content.decode().split("\n"), bundle.params[TABLE]
    vectors = dict(zip(words, table, strict=False))
    with tempfile.TemporaryDirectory(dir=work) as name:
        write_word2vec(Path(name), bundle)
        files = [(f"{name}/{file}", f"{name}/{file}.npz") for file in (TEXT_FILE, BINARY_FILE)]
        other(gensim, read=files)
        for _, file in files:
            theirs = np.load(file)
            ours = np.stack([vectors[word] for word in theirs["words"].tolist()])
            if len(ours) < len(words) - 5 or ours.tobytes() != theirs["vectors"].astype(np.float32).tobytes():
                return False
    return True


def scores(vectors: np.ndarray, words: list[str], counts: np.ndarray, sets: Path) -> dict[str, float]:
    """Return the correlations and the accuracy of analogies."""
    from scipy.stats import spearmanr

    places, found = {word: place for place, word in enumerate(words)}, {}
    for name, file in SETS.items():
        pairs = []
        for line in (sets / file).read_text(encoding="utf-8").splitlines():
            parts = line.lower().split("\t")
            if line.startswith("#") or len(parts) < 3:
                continue
            both = [places.get(word, -1) for word in parts[:2]]
            if min(both) >= 0 and counts[both].min() >= LEAST:
                pairs.append((*both, float(parts[2])))
        cosines = [float(vectors[a] @ vectors[b]) for a, b, _ in pairs]
        found[name] = float(spearmanr(cosines, [value for *_, value in pairs]).statistic)
        found[f"{name}_pairs"] = len(pairs)
    order = np.argsort(-counts, kind="stable")[:ANALOGY_WORDS]
    candidates, of_word = vectors[order], {words[place]: row for row, place in enumerate(order.tolist())}
    questions = []
    for line in (sets / "questions-words.txt").read_text(encoding="utf-8").lower().splitlines():
        parts = [of_word.get(word, -1) for word in line.split()]
        if len(parts) == 4 and min(parts) >= 0:
            questions.append(parts)
    asked, right = np.array(questions), 0
    for part in np.array_split(asked, max(len(asked) // 500, 1)):
        a, b, c, answer = part.T
        similarity = (candidates[b] - candidates[a] + candidates[c]) @ candidates.T
        np.put_along_axis(similarity, part[:, :3], -np.inf, axis=1)
        right += int((similarity.argmax(axis=1) == answer).sum())
    return found | {"analogies": right / len(asked), "analogies_asked": len(asked)}


def neighbors(vectors: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return the places of the nearest words of the most frequent ones, int[1000, 10]."""
    places = np.argsort(-counts, kind="stable")[:FREQUENT]
    similarity = vectors[places] @ vectors.T
    similarity[np.arange(FREQUENT), places] = -np.inf
    return np.argpartition(-similarity, NEIGHBORS, axis=1)[:, :NEIGHBORS]


def overlap(one: np.ndarray, two: np.ndarray) -> float:
    """Return the mean share of common neighbors."""
    return float(
        np.mean([len(set(a) & set(b)) / NEIGHBORS for a, b in zip(one.tolist(), two.tolist(), strict=True)])
    )


def compare(method: str, options: argparse.Namespace) -> tuple[dict[str, object], list[str]]:
    """Train both, and return the figures of a method and what is below its bar."""
    work, epochs = options.work, 1 if options.short else EPOCHS
    rows, counts, words = rows_of(method, options.corpus, work)
    text, sets = work / "rows.txt", work / "sets"
    text.write_text("".join(" ".join(row) + "\n" for row in rows), encoding="utf-8")
    sets.mkdir(exist_ok=True)
    other(options.gensim, sets=[*SETS.values(), "questions-words.txt"], to=str(sets))
    ours, theirs, speeds = [], [], {"ours": [], "gensim": []}
    is_read = True
    seeds = options.seeds[:1] if options.short else options.seeds
    for seed in seeds:
        workdir = train(method, seed, epochs, len(rows), options.corpus, work)
        speeds["ours"].append(speed(workdir, int(counts.sum()), len(rows), options.batch))
        ours.append(unit(workdir, words))
        is_read &= is_read_by_gensim(workdir, options.gensim, work)
    for seed in seeds if len(seeds) > 1 else [0, 1]:
        file, report = work / f"gensim-{method}-{epochs}-{seed}.bin", work / f"gensim-{method}-{epochs}-{seed}.json"
        if not report.exists():
            settings = {
                "vector_size": SIZE, "window": WINDOW, "negative": NEGATIVES, "sample": SUBSAMPLE,
                "sg": int(method == "skip_gram"), "seed": seed + 1,
            }  # fmt: skip
            report.write_text(other(options.gensim, text=str(text), to=str(file), epochs=epochs, options=settings))
        speeds["gensim"].append(json.loads(report.read_text())["words_per_second"])
        theirs.append(unit(file, words))
    figures: dict[str, object] = {
        "method": method,
        "epochs": epochs,
        "words": int(counts.sum()),
        "seeds": len(seeds),
    }
    figures["read_by_gensim"] = is_read
    problems = [] if is_read else [f"{method}: gensim reads other vectors from our files"]
    for name, vectors in (("ours", ours), ("gensim", theirs)):
        for key in (found := [scores(x, words, counts, sets) for x in vectors])[0]:
            figures[f"{name}_{key}"] = statistics.mean(one[key] for one in found)
        figures[f"{name}_words_per_second"] = statistics.median(speeds[name])
    near = {name: [neighbors(x, counts) for x in vectors] for name, vectors in (("ours", ours), ("gensim", theirs))}
    both = [overlap(a, b) for a, b in zip(near["ours"], near["gensim"], strict=False)]
    figures["overlap"] = statistics.mean(both)
    figures["overlap_of_gensim"] = statistics.mean(
        overlap(near["gensim"][i], near["gensim"][i - 1]) for i in range(1, len(theirs))
    )
    for key in () if options.short else (*SETS, "analogies"):
        if figures[f"ours_{key}"] < figures[f"gensim_{key}"] - CORRELATION_BAR:
            problems.append(f"{method}: {key} {figures[f'ours_{key}']:.3f}, gensim {figures[f'gensim_{key}']:.3f}")
    if not options.short and figures["overlap"] < figures["overlap_of_gensim"] - OVERLAP_BAR:
        problems.append(f"{method}: overlap {figures['overlap']:.3f}, gensim {figures['overlap_of_gensim']:.3f}")
    if figures["ours_words_per_second"] < SPEED_BAR * figures["gensim_words_per_second"]:
        problems.append(f"{method}: speed")
    return figures, problems


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--corpus", type=Path, nargs="+", required=True)
    parser.add_argument("--gensim", type=Path, required=True, help="Python that has gensim")
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--methods", nargs="+", default=["skip_gram", "cbow"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--output", type=Path)
    parser.add_argument("--short", action="store_true")
    options = parser.parse_args()
    from bert_jax.config import PretrainConfig, load_config

    options.work.mkdir(parents=True, exist_ok=True)
    options.work = options.work.resolve()
    options.corpus = [path.resolve() for path in options.corpus]
    problems, start = [], time.perf_counter()
    for method in options.methods:
        config = load_config(PretrainConfig, arguments_of(method, options.corpus, options.work))
        options.batch = config.training.global_batch_size
        figures, below = compare(method, options)
        line = json.dumps({key: round(x, 4) if isinstance(x, float) else x for key, x in figures.items()})
        print(line, flush=True)
        if options.output is not None:
            with options.output.open("a", encoding="utf-8") as file:
                file.write(line + "\n")
        problems += below
    print(f"{time.perf_counter() - start:.0f} s; below the bar: {'; '.join(problems) or 'nothing'}")
    return 3 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
