"""One implementation of sentence embedding in a separate process; for embed_speed.py, embed_parity.py and inference_latency.py.

    embed_workers.py {ours,torch,onnxruntime} MODEL TEXTS [GRAPH]

TEXTS is a JSON list. Reads commands from standard input, a line each: a number of passes to time, or the path of an
.npy file to write the vectors to; answers each with one JSON line. GRAPH is the ONNX file (onnxruntime only).
"""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

BATCH = 32


def ours(model: str, texts: list[str]) -> tuple[Callable[[], np.ndarray], dict]:
    """Return the embedding function of this library."""
    import bert_jax

    loaded = bert_jax.load(model)
    shapes = lambda: {"compiled_shapes": sum(p._cache_size() for p in loaded._programs.values())}  # noqa: E731
    return lambda: loaded.embed(texts), shapes


def torch(model: str, texts: list[str]) -> tuple[Callable[[], np.ndarray], dict]:
    """sentence-transformers with two threads, its batches sorted by length by itself."""
    import torch
    from sentence_transformers import SentenceTransformer

    torch.set_num_threads(2)
    peer = SentenceTransformer(model, device="cpu", local_files_only=True)
    return lambda: peer.encode(texts, batch_size=BATCH), dict


def onnxruntime(model: str, texts: list[str], graph: str) -> tuple[Callable[[], np.ndarray], dict]:
    """onnxruntime with two threads on the exported graph, sorted by length, with this library's tokenizer."""
    import onnxruntime

    import bert_jax

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 2
    session = onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
    loaded = bert_jax.load(model)

    def run() -> np.ndarray:
        encoded = [one.ids for one in loaded.model_inputs(texts)]
        order = sorted(range(len(texts)), key=lambda i: -len(encoded[i]))
        vectors: list = [None] * len(texts)
        for start in range(0, len(order), BATCH):
            part = order[start : start + BATCH]
            ids = np.zeros((len(part), max(len(encoded[i]) for i in part)), np.int64)
            mask = np.zeros_like(ids)
            for row, i in enumerate(part):
                ids[row, : len(encoded[i])] = encoded[i]
                mask[row, : len(encoded[i])] = 1
            feed = {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)}
            for i, vector in zip(part, session.run(["sentence_embedding"], feed)[0], strict=True):
                vectors[i] = vector
        return np.stack(vectors)

    return run, dict


def main() -> None:
    """Answer commands until standard input ends."""
    kind, model, texts, *graph = sys.argv[1:]
    answers = sys.stdout
    sys.stdout = sys.stderr  # a library's chatter is no answer
    start = time.perf_counter()
    makers = {"ours": ours, "torch": torch, "onnxruntime": onnxruntime}
    run, describe = makers[kind](model, json.loads(Path(texts).read_text(encoding="utf-8")), *graph)
    vectors = run()
    said = {"setup_seconds": time.perf_counter() - start, **describe()}
    print(json.dumps(said), file=answers, flush=True)
    for line in sys.stdin:
        if line.strip().endswith(".npy"):
            np.save(line.strip(), vectors)
            print(json.dumps({}), file=answers, flush=True)
            continue
        seconds, processor = [], []
        for _ in range(int(line)):
            began, used = time.perf_counter(), time.process_time()
            vectors = run()
            seconds.append(time.perf_counter() - began)
            processor.append(time.process_time() - used)
        print(json.dumps({"seconds": seconds, "cpu_seconds": processor, **describe()}), file=answers, flush=True)


if __name__ == "__main__":
    main()
