"""Loads the exports of a model in other libraries and compares the vectors of texts, tokenizers included.

    npm install --ignore-scripts @huggingface/transformers@4.3.2
    python benchmarks/exports.py MODEL TEXTS --peer_python PYTHON --node_modules node_modules

TEXTS has one text per line (the first 200 count); PYTHON has sentence-transformers and xllamacpp
(tests/golden/requirements.lock). Prints a JSON line per library and form: the least cosine with the vectors of
``bert_jax.load(MODEL).embed``, divided by their norm, the largest difference, and the share of texts with the same
nearest text. A model with a masked-language-model head or classes is also run with that head under node. Exit code
3: a cosine below 0.9999 (8 bits: 0.999), another nearest text (float32 only), or a probability that differs by more
than 1e-4. The model must have mean pooling.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnxruntime

import bert_jax
from bert_jax.contrib.llama_cpp.gguf_file import ARCHITECTURES
from bert_jax.contrib.llama_cpp.llama import llama_vectors
from bert_jax.inference.loaded import LoadedModel
from bert_jax.interop.export import export_model

QUIET = {"report": lambda line: None, "verify": False}
LEAST = {"float32": 0.9999, "int8": 0.999}
SENTENCES = """
import json, sys, sentence_transformers
model = sentence_transformers.SentenceTransformer(sys.argv[1], device="cpu", local_files_only=True).float()
vectors = model.encode(json.load(open(sys.argv[2])), normalize_embeddings=True).tolist()
json.dump({"version": sentence_transformers.__version__, "answers": vectors}, open(sys.argv[3], "w"))
"""


def answers_of(command: list[str], texts: list[str], scratch: Path) -> tuple[str, list]:
    """The version and the answers of a program that reads a file of texts and writes a file of answers."""
    (scratch / "texts.json").write_text(json.dumps(texts), encoding="utf-8")
    words = [*command, str(scratch / "texts.json"), str(scratch / "answers.json")]
    subprocess.run(words, check=True, cwd=scratch, capture_output=True)
    found = json.loads((scratch / "answers.json").read_text(encoding="utf-8"))
    return found["version"], found["answers"]


def onnx_vectors(file: Path, model: LoadedModel, texts: list[str]) -> np.ndarray:
    """The vectors of an ONNX file: its output sentence_embedding."""
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    rows = []
    for ids in model.tokenizer.encode_batch(texts):
        row = np.array([[model.tokenizer.cls_id, *ids[: model.spec.max_length - 2], model.tokenizer.sep_id]])
        inputs = {"input_ids": row, "attention_mask": np.ones_like(row), "token_type_ids": np.zeros_like(row)}
        found = dict(zip(names, session.run(names, inputs), strict=True))
        rows.append(found["sentence_embedding"][0])
    return np.stack(rows)


def vectors(
    model: LoadedModel, folder: Path, texts: list[str], options: argparse.Namespace
) -> Iterator[tuple[str, str, np.ndarray]]:
    """Yield library and version, dtype, and its vectors."""
    export_model(Path(options.model), folder / "st", "sentence-transformers", with_onnx=True, **QUIET)
    if options.peer_python:
        command = [options.peer_python, "-c", SENTENCES, str(folder / "st")]
        version, found = answers_of(command, texts, folder)
        yield f"sentence-transformers {version}", "float32", np.array(found)
    forms = (("float32", "fp32", "model.onnx"), ("int8", "q8", "model_quantized.onnx"))
    for dtype, _, file in forms:
        found = onnx_vectors(folder / "st" / "onnx" / file, model, texts)
        yield f"onnxruntime {onnxruntime.__version__}", dtype, found
    for dtype, name, _ in forms if options.node_modules else ():
        version, found = answers_of([*node(options), str(folder / "st"), "feature-extraction", name], texts, folder)
        yield f"transformers.js {version}", dtype, np.array(found)
    for dtype in ("float32", "int8") if model.spec.family in ARCHITECTURES else ():
        export_model(Path(options.model), folder / dtype, "gguf", dtype=dtype, **QUIET)
        answer = llama_vectors(folder / dtype / "model.gguf", texts, options.peer_python)
        if answer is not None:
            yield answer[0], dtype, answer[1]


def node(options: argparse.Namespace) -> list[str]:
    return ["node", str(Path(__file__).with_suffix(".mjs").resolve()), str(Path(options.node_modules).resolve())]


def head_difference(model: LoadedModel, folder: Path, texts: list[str], options: argparse.Namespace) -> dict | None:
    """The largest difference of a probability between transformers.js and the head of the model: of the best piece
    for a mask, or of the best class, by transformers.js."""
    heads = model.spec.heads
    if not options.node_modules or not (heads.mlm or heads.sequence_labels):
        return None
    task, head = ("text-classification", "sequence") if heads.sequence_labels else ("fill-mask", "mlm")
    export_model(Path(options.model), folder / "hf", "hf", with_onnx=True, heads=[head], **QUIET)
    if task == "fill-mask":
        mask = model.tokenizer.special_pieces[4]
        texts = [" ".join([*text.split()[:6], mask, "."]) for text in texts if len(text.split()) > 3]
        filled = [text.masks[0].predictions for text in model.fill_mask(texts)]
        ours, name = [{model.tokenizer.piece_id(piece): share for piece, share in best} for best in filled], "token"
    else:
        ours, name = [one["probabilities"] for one in model.predict(texts)], "label"
    version, theirs = answers_of([*node(options), str(folder / "hf"), task, "fp32"], texts, folder)
    worst = max(
        abs(mine.get(best[name], 0.0) - best["score"])
        for mine, all_best in zip(ours, theirs, strict=True)
        for best in all_best[:1]
    )
    return {"library": f"transformers.js {version}", "task": task, "texts": len(texts), "largest_difference": worst}


def nearest(found: np.ndarray) -> np.ndarray:
    return (found @ found.T - 2 * np.eye(len(found))).argmax(axis=1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("texts", type=Path)
    parser.add_argument("--peer_python", help="a Python with sentence-transformers and xllamacpp")
    parser.add_argument("--node_modules", help="a folder with @huggingface/transformers; needs node")
    options = parser.parse_args()
    texts = [line for line in options.texts.read_text(encoding="utf-8").splitlines() if line.strip()][:200]
    model = bert_jax.load(options.model)
    ours = model.embed(texts, normalize=True)
    failed = False
    with tempfile.TemporaryDirectory() as scratch:
        for library, dtype, found in vectors(model, Path(scratch), texts, options):
            found = found / np.linalg.norm(found, axis=1, keepdims=True)
            cosine, same = (ours * found).sum(axis=1).min(), (nearest(ours) == nearest(found)).mean()
            failed |= cosine < LEAST[dtype] or (same < 1 and dtype == "float32")
            line = {"library": library, "dtype": dtype, "texts": len(texts), "cosine": round(float(cosine), 7)}
            difference = float(f"{np.abs(ours - found).max():.2g}")
            print(json.dumps(line | {"largest_difference": difference, "same_nearest": float(same)}), flush=True)
        if line := head_difference(model, Path(scratch), texts, options):
            failed |= line["largest_difference"] > 1e-4
            print(json.dumps(line), flush=True)
    return 3 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
