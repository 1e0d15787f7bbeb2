"""Answer HTTP requests with a model that `bert-jax export --format onnx` wrote: vectors of texts, or their classes.

    pip install onnxruntime tokenizers numpy
    python serve_onnx.py DIR [--host 127.0.0.1] [--port 8000]
    curl localhost:8000 -d '{"texts": ["a text", ["a text", "its pair"]]}'

A wrong request gets a status of 4xx and one line that says why."""

import argparse
import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import onnxruntime
from tokenizers import Tokenizer

MOST_BYTES, MOST_TEXTS = 4_000_000, 64


class Model:
    def __init__(self, folder: Path) -> None:
        self.session = onnxruntime.InferenceSession(folder / "model.onnx")
        config = json.loads((folder / "config.json").read_text())
        settings = json.loads((folder / "tokenizer_config.json").read_text())
        names = [one.name for one in self.session.get_outputs()]
        self.output = next(name for name in ("sentence_embedding", "logits") if name in names)
        self.classes = [name for _, name in sorted(config.get("id2label", {}).items(), key=lambda x: int(x[0]))]
        self.problem = config.get("problem_type")
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.tokenizer.enable_truncation(settings["model_max_length"])
        self.tokenizer.enable_padding(pad_id=self.tokenizer.token_to_id(settings["pad_token"]))

    def answers(self, texts: list) -> list[dict]:
        read = self.tokenizer.encode_batch([tuple(text) if isinstance(text, list) else text for text in texts])
        columns = {"input_ids": "ids", "attention_mask": "attention_mask", "token_type_ids": "type_ids"}
        feed = {one.name: np.array([getattr(row, columns[one.name]) for row in read], np.int64)
                for one in self.session.get_inputs()}  # fmt: skip
        rows = self.session.run([self.output], feed)[0].astype(np.float64)
        if self.output == "sentence_embedding":
            answers = [{"embedding": row.tolist()} for row in rows]
        else:
            powers = np.exp(rows - rows.max(axis=1, keepdims=True))
            scores = {"regression": rows, "multi_label_classification": 1 / (1 + np.exp(-rows))}.get(
                self.problem, powers / powers.sum(axis=1, keepdims=True)
            )
            answers = [{"scores": dict(zip(self.classes, row, strict=True))} for row in scores.tolist()]
        return [{**answer, "truncated": bool(one.overflowing)} for answer, one in zip(answers, read, strict=True)]


def texts_of(body: bytes) -> list:
    """Return the texts of a request. Raises ``ValueError`` for any other request."""
    given = json.loads(body)
    texts = given.get("texts") if isinstance(given, dict) else None
    if not isinstance(texts, list) or not 1 <= len(texts) <= MOST_TEXTS:
        raise ValueError(f'give {{"texts": [...]}} with 1 to {MOST_TEXTS} texts')
    for text in texts:
        parts = text if isinstance(text, list) and len(text) == 2 else [text]
        if not all(isinstance(part, str) and part.strip() for part in parts):
            raise ValueError("a text is a string that is not blank, or a list of two such strings")
        "".join(parts).encode()  # half a character (a lone surrogate) raises UnicodeEncodeError, a ValueError
    return texts


class Handler(BaseHTTPRequestHandler):
    protocol_version, timeout = "HTTP/1.1", 20

    def do_POST(self) -> None:
        length = self.headers.get("Content-Length", "")
        self.close_connection = True  # unless the whole body is read
        if not length.isdecimal() or int(length) > MOST_BYTES:
            return self.send(413, {"error": f"Content-Length: {length or 'none'}; allowed: at most {MOST_BYTES}"})
        body = self.rfile.read(int(length))
        self.close_connection = len(body) < int(length)
        try:
            return self.send(200, {"answers": self.server.model.answers(texts_of(body))})
        except (json.JSONDecodeError, UnicodeDecodeError, RecursionError):
            return self.send(400, {"error": "the body is not JSON"})
        except ValueError as error:
            return self.send(400, {"error": str(error)})

    def send(self, status: int, value: dict) -> None:
        content = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    options = parser.parse_args()
    server = ThreadingHTTPServer((options.host, options.port), Handler)
    server.model = Model(options.folder)
    print(f"http://{options.host}:{server.server_port}", flush=True)
    server.serve_forever()
