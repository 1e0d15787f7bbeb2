"""Answer HTTP requests with a model that `bert-jax export --format onnx` wrote: vectors of texts, or their classes.

pip install onnxruntime tokenizers numpy && python serve_onnx.py DIR [--host 127.0.0.1] [--port 8000]
curl localhost:8000 -d '{"texts": ["a text", ["a text", "its pair"]]}'
curl localhost:8000/health"""

import argparse
import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import BoundedSemaphore

import numpy as np
import onnxruntime
from tokenizers import Tokenizer

FIELDS = {"input_ids": "ids", "attention_mask": "attention_mask", "token_type_ids": "type_ids"}
MOST_BYTES, MOST_TEXTS = 4_000_000, 64


class Model:
    def __init__(self, folder: Path) -> None:
        self.session = onnxruntime.InferenceSession((folder / "model.onnx").resolve(strict=True))
        metadata = self.session.get_modelmeta().custom_metadata_map.get("bert_jax", '{"model": {"heads": {}}}')
        model = json.loads(metadata)["model"]
        self.classes, self.problem = map(model["heads"].get, ("sequence_labels", "problem"))
        self.output = "logits" if self.classes else "sentence_embedding"
        if self.output not in [one.name for one in self.session.get_outputs()]:
            raise ValueError(f"{folder}: has no output {self.output}; served: a model of classes or of vectors")
        self.activation = model["heads"].get("activation")
        if self.activation not in ("", None, "sigmoid", "tanh"):
            raise ValueError(f"{folder}: the function of the score is {self.activation}; served: sigmoid, tanh")
        settings = json.loads((folder / "tokenizer_config.json").read_text())
        # False: both texts of a pair have the type 0.
        self.pair_types = "token_type_ids" in settings.get("model_input_names", ["token_type_ids"])
        self.tokenizer = Tokenizer.from_file(str((folder / "tokenizer.json").resolve(strict=True)))
        # How the fine-tuning of the model converted texts; other models read as much as they can.
        self.task = model.get("task") or {"max_length": settings["model_max_length"]}
        if self.classes and len(self.task.get("labels", ())) == len(self.classes):
            self.classes = self.task["labels"]  # as in the files of the run
        sentence = model.get("sentence") or {}
        self.prompt = dict(sentence.get("prompts", ())).get(sentence.get("default_prompt"), "")
        if self.prompt and not sentence["include_prompt"]:
            raise ValueError(f"{folder}: the vectors leave out the prompt before each text, which is not served")
        sides = {"head": "right", "tail": "left"}
        side = sides.get(self.task.get("truncation"), settings.get("truncation_side", "right"))
        self.tokenizer.enable_truncation(self.task["max_length"], direction=side)
        self.tokenizer.enable_padding(pad_id=self.tokenizer.token_to_id(settings["pad_token"]))

    def outputs(self, texts: list) -> tuple[np.ndarray, list[bool]]:
        """Return the outputs for texts and pairs, and whether each was truncated."""
        read = self.tokenizer.encode_batch(texts)
        cut, how = [bool(one.overflowing) for one in read], self.task.get("truncation")
        if how in ("head_tail", "key_sentences", "windows") and any(cut):
            most = f"more than {self.task['max_length']} tokens"
            raise ValueError(f"text {cut.index(True)}: {most}; this program does not read them as {how}")
        feed = {name: np.array([getattr(row, field) for row in read], np.int64) for name, field in FIELDS.items()}
        feed["token_type_ids"] *= self.pair_types
        return self.session.run([self.output], feed)[0].astype(np.float64), cut

    def answers(self, texts: list) -> list[dict]:
        texts = [tuple(text) if isinstance(text, list) else self.prompt + text for text in texts]
        rows, cut = self.outputs(texts)
        if self.task.get("pair_order") == "both":  # the logits of both orders are added
            if not all(isinstance(text, tuple) for text in texts):
                raise ValueError("the model reads pairs: give lists of two texts")
            rows = rows + self.outputs([text[::-1] for text in texts])[0]
        softmax = np.exp(rows - np.logaddexp.reduce(rows, axis=1, keepdims=True))
        sigmoid = 1 / (1 + np.exp(-rows))
        values = {"sigmoid": sigmoid, "tanh": np.tanh(rows)}.get(self.activation, rows)
        scores = {"regression": values, "multi_label": sigmoid}.get(self.problem, softmax).tolist()
        answers = [{"embedding": row} for row in rows.tolist()]
        if self.output == "logits":
            answers = [{"scores": dict(zip(self.classes, row, strict=True))} for row in scores]
        return [{**answer, "truncated": is_cut} for answer, is_cut in zip(answers, cut, strict=True)]


def texts_of(body: bytes) -> list:
    """Return the texts of a request. Raises ``ValueError`` for any other request."""
    given = json.loads(body)
    texts = given.get("texts") if isinstance(given, dict) else None
    if not isinstance(texts, list) or not 1 <= len(texts) <= MOST_TEXTS:
        raise ValueError(f'give {{"texts": [...]}} with 1 to {MOST_TEXTS} texts')
    parts = [part for text in texts for part in (text if isinstance(text, list) and len(text) == 2 else [text])]
    if not all(isinstance(part, str) and part.strip() for part in parts):
        raise ValueError("a text is a string that is not blank, or a list of two such strings")
    "".join(parts).encode()  # half a character (a lone surrogate) raises UnicodeEncodeError, a ValueError
    return texts


class Handler(BaseHTTPRequestHandler):
    protocol_version, timeout = "HTTP/1.1", 20

    def do_POST(self) -> None:
        lengths = self.headers.get_all("Content-Length", [])
        if "Transfer-Encoding" in self.headers or not lengths:
            return self.send_error(411, "Content-Length: none, or the body is sent in chunks")
        if len(lengths) > 1 or not lengths[0].isdecimal():
            return self.send_error(400, f"Content-Length: {', '.join(lengths)[:80]}")
        if len(lengths[0]) > 12 or int(lengths[0]) > MOST_BYTES:  # int() refuses thousands of digits
            return self.send_error(413, f"Content-Length: {lengths[0][:80]}")
        body = self.rfile.read(length := int(lengths[0]))
        self.close_connection |= len(body) < length
        try:
            return self.send(200, {"answers": self.server.model.answers(texts_of(body))})
        except (json.JSONDecodeError, UnicodeDecodeError, RecursionError):
            return self.send(400, {"error": "the body is not JSON"})
        except ValueError as error:
            return self.send(400, {"error": str(error)})

    def do_GET(self) -> None:
        self.close_connection |= "Content-Length" in self.headers  # a body, which is not read
        if self.path.partition("?")[0] != "/health":
            return self.send_error(501, f"Unsupported method ({self.command!r})")
        return self.send(200, {"status": "ok"})

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        self.close_connection = True
        allowed = f"allowed: POST with a Content-Length of at most {MOST_BYTES}"
        self.send(405 if code == 501 else code, {"error": f"{message}; {allowed}"})

    def send(self, status: int, value: dict) -> None:
        content = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Allow", "POST")
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


class Server(ThreadingHTTPServer):
    request_queue_size = 128

    def __init__(self, address: tuple[str, int], connections: int) -> None:
        self.free = BoundedSemaphore(connections)
        super().__init__(address, Handler)

    def process_request(self, request, client) -> None:
        if self.free.acquire(blocking=False):
            return super().process_request(request, client)
        request.sendall(b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Length: 0\r\n\r\n")
        return self.shutdown_request(request)

    def process_request_thread(self, request, client) -> None:
        try:
            super().process_request_thread(request, client)
        finally:
            self.free.release()

    def handle_error(self, request, client) -> None:
        if not isinstance(sys.exc_info()[1], OSError):  # the client has gone, or sends nothing
            super().handle_error(request, client)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--connections", type=int, default=256, help="clients at a time, a thread each")
    options = parser.parse_args()
    try:
        server = Server((options.host, options.port), options.connections)
        server.model = Model(options.folder)
    except Exception as error:  # also onnxruntime's own, for a file that is not whole
        parser.error(str(error))
    print(f"http://{options.host}:{server.server_port}", flush=True)
    server.serve_forever()
