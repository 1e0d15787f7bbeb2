"""``docs/examples/serve_onnx.py``: right answers to several clients at a time, and clear ones to wrong requests."""

import contextlib
import dataclasses
import json
import runpy
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from exported import MODEL, VOCABULARY, random_weights, source

from bert_jax.config import HeadsConfig, ModelSpec, SentenceConfig, TokenizerConfig
from bert_jax.inference.loaded import prepare
from bert_jax.interop.export import export_model
from bert_jax.interop.programs.onnx_graph import write_onnx

SCRIPT = Path(__file__).resolve().parents[2] / "docs" / "examples" / "serve_onnx.py"
LABELS = HeadsConfig(pooler=True, sequence_labels=("a", "b", "c"))
SPECS = {
    "classes": ModelSpec(model=MODEL, heads=LABELS, tokenizer=TokenizerConfig()),
    "labels": ModelSpec(
        model=MODEL, heads=dataclasses.replace(LABELS, problem="multi_label"), tokenizer=TokenizerConfig()
    ),
    "vectors": ModelSpec(
        model=MODEL, heads=HeadsConfig(), sentence=SentenceConfig(), tokenizer=TokenizerConfig()
    ),
    "prompted vectors": ModelSpec(
        model=MODEL, heads=HeadsConfig(), tokenizer=TokenizerConfig(),
        sentence=SentenceConfig(prompts=(("query", "w7 : "),), default_prompt="query"),
    ),
    # Hugging Face's config.json has no word for this network, so the folder has none.
    "pruned": ModelSpec(
        model=dataclasses.replace(MODEL, layer_units=(8, 12), pooling="mean"), heads=LABELS,
        tokenizer=TokenizerConfig(),
    ),
}  # fmt: skip


QUICK = ("classes", "prompted vectors")


@pytest.fixture(
    scope="module", params=[name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in SPECS]
)
def server(request, tmp_path_factory):
    """(address, what the model itself answers to texts)."""
    tmp_path = tmp_path_factory.mktemp("served")
    weights = dataclasses.replace(random_weights(SPECS[request.param]), tokenizer_content=VOCABULARY)
    write_onnx(tmp_path, weights)
    assert (tmp_path / "config.json").exists() == (request.param != "pruned")
    words = [sys.executable, str(SCRIPT), str(tmp_path), "--port", "0"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        yield process.stdout.readline().strip(), answers_of(prepare(weights), request.param)
    finally:
        process.kill()
        process.wait()


def answers_of(model, kind):
    def answers(texts):
        if "vectors" in kind:
            return np.asarray(model.embed(texts))
        found = model.predict([tuple(text) if isinstance(text, list) else text for text in texts])
        return np.array([[one["probabilities"][name] for name in LABELS.sequence_labels] for one in found])

    return answers


def post(address, body, headers=None):
    """(status, value) of a request."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(address, content, headers or {}), timeout=60) as reply:
            return reply.status, json.load(reply)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def values(answers):
    return [one["embedding"] if "embedding" in one else list(one["scores"].values()) for one in answers]


def cut(address, content):
    """Send a part of a request and leave."""
    host, port = address.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(content)


@pytest.mark.slow
def test_clients_get_their_own_answers_whatever_the_others_do(server):
    address, expected = server
    rng = np.random.default_rng(0)
    texts = [" ".join(f"w{n}" for n in rng.integers(0, 96, rng.integers(1, 20))) for _ in range(60)]

    def client(number):
        own = texts[number::4]
        for i in range(0, len(own), 3):
            part = own[i : i + 3]
            cut(address, b'POST / HTTP/1.1\r\nContent-Length: 100\r\n\r\n{"texts": [')
            assert post(address, b"{")[0] == 400
            status, value = post(address, {"texts": part})
            assert status == 200 and not any(one["truncated"] for one in value["answers"])
            np.testing.assert_allclose(values(value["answers"]), expected(part), atol=1e-4)

    expected(texts)  # compiled once
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(client, range(4)))


def test_wrong_and_large_requests(server):
    address, expected = server
    for body, message in (
        (b"", "the body is not JSON"),
        (b"\xff", "the body is not JSON"),
        (b"[" * 100_000, "the body is not JSON"),
        ([], 'give {"texts": [...]} with 1 to 64 texts'),
        ({"texts": []}, 'give {"texts": [...]} with 1 to 64 texts'),
        ({"texts": ["w1"] * 65}, 'give {"texts": [...]} with 1 to 64 texts'),
        ({"texts": "w1"}, 'give {"texts": [...]} with 1 to 64 texts'),
        ({"texts": ["w1", " "]}, "a text is a string that is not blank, or a list of two such strings"),
        ({"texts": [["w1", "w2", "w3"]]}, "a text is a string that is not blank, or a list of two such strings"),
        ({"texts": [7]}, "a text is a string that is not blank, or a list of two such strings"),
    ):
        assert post(address, body) == (400, {"error": message})
    status, value = post(address, b'{"texts": ["\\ud800"]}')
    assert status == 400 and value["error"].endswith("surrogates not allowed")
    status, value = post(address, b"", {"Content-Length": "5000000"})
    allowed = "allowed: POST with a Content-Length of at most 4000000"
    assert status == 413 and value == {"error": f"Content-Length: 5000000; {allowed}"}
    for method in ("GET", "PUT"):
        request = urllib.request.Request(address, method=method)
        with pytest.raises(urllib.error.HTTPError) as error:
            urllib.request.urlopen(request, timeout=60)
        assert (error.value.code, error.value.headers["Allow"]) == (405, "POST")
        assert json.load(error.value) == {"error": f"Unsupported method ('{method}'); {allowed}"}
    long = "w1 w2 " * 170_000  # a megabyte
    status, value = post(address, {"texts": [long, "w3"]})
    assert status == 200 and [one["truncated"] for one in value["answers"]] == [True, False]
    np.testing.assert_allclose(values(value["answers"]), expected([long, "w3"]), atol=1e-4)
    if "scores" in value["answers"][0]:
        (pair,) = values(post(address, {"texts": [["w3 w4", "w5"]]})[1]["answers"])
        np.testing.assert_allclose(pair, expected([["w3 w4", "w5"]])[0], atol=1e-4)


def raw(address, content):
    """The status of the reply to the bytes of a request, 0 without a reply."""
    host, port = address.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall(content)
        words = connection.makefile("rb").readline().split()
    return int(words[1]) if words else 0


@pytest.mark.slow
def test_odd_lengths_health_and_a_limit_of_clients(tmp_path):
    write_onnx(tmp_path, dataclasses.replace(random_weights(SPECS["classes"]), tokenizer_content=VOCABULARY))
    words = [sys.executable, str(SCRIPT), str(tmp_path), "--port", "0", "--connections", "40"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        address, body = process.stdout.readline().strip(), b'{"texts": ["w1"]}'
        for headers, status in (
            (f"Content-Length: {'1' * 5000}", 413),
            (f"Content-Length: {len(body)}\r\nContent-Length: 5", 400),
            (f"Content-Length: {len(body)}\r\nContent-Length: {len(body)}", 400),
            ("Content-Length: 5, 5", 400),
            ("Content-Length: -1", 400),
            ("Transfer-Encoding: chunked", 411),
            (f"Transfer-Encoding: chunked\r\nContent-Length: {len(body)}", 411),
            ("X: y", 411),
            (f"Content-Length: {len(body)}", 200),
        ):
            assert raw(address, f"POST / HTTP/1.1\r\n{headers}\r\n\r\n".encode() + body) == status, headers
        with urllib.request.urlopen(f"{address}/health", timeout=60) as reply:
            assert (reply.status, json.load(reply)) == (200, {"status": "ok"})
        assert raw(address, b"GET /other HTTP/1.1\r\n\r\n") == 405
        for _ in range(20):
            cut(address, b"POST / HTTP/1.1\r\nContent-Length: 17\r\n\r\n" + body)  # gone before the answer
        host, port = address.removeprefix("http://").split(":")
        until(lambda: raw(address, b"GET /health HTTP/1.1\r\nConnection: close\r\n\r\n") == 200)
        waiting = [socket.create_connection((host, int(port))) for _ in range(40)]
        until(lambda: raw(address, b"GET /health HTTP/1.1\r\n\r\n") == 503)
        for connection in waiting:
            connection.close()
        until(lambda: post(address, {"texts": ["w1"]})[0] == 200)
    finally:
        process.kill()
        said = process.communicate()[1]
    assert "Traceback" not in said


def until(holds):
    """Wait until ``holds()`` is true; a busy machine takes its time."""
    for _ in range(200):
        with contextlib.suppress(OSError, ValueError):
            if holds():
                return
        time.sleep(0.05)
    raise AssertionError("not within 10 s")


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", ["tags", *(pytest.param(case, marks=pytest.mark.slow) for case in ("nothing", "port", "damaged"))]
)
def test_what_cannot_be_served_is_refused_in_one_line(case, tmp_path):
    heads = HeadsConfig(token_labels=("a", "b")) if case == "tags" else LABELS
    if case != "nothing":
        spec = dataclasses.replace(SPECS["classes"], heads=heads)
        write_onnx(tmp_path, dataclasses.replace(random_weights(spec), tokenizer_content=VOCABULARY))
    if case == "damaged":
        (tmp_path / "model.onnx").write_bytes(b"no ONNX")
    words = [sys.executable, str(SCRIPT), str(tmp_path), "--port", "80000" if case == "port" else "0"]
    run = subprocess.run(words, capture_output=True, text=True, timeout=120)
    message = {
        "nothing": f"No such file or directory: '{tmp_path / 'model.onnx'}'",
        "tags": f"{tmp_path}: has no output sentence_embedding; served: a model of classes or of vectors",
        "port": "port must be 0-65535",
        "damaged": "INVALID_PROTOBUF",
    }[case]
    assert run.returncode == 2 and message in run.stderr.splitlines()[-1]


def test_a_sentence_model_has_the_files_that_text_embeddings_inference_reads(tmp_path):
    """As its documentation lists them; the pooling is one of those that it knows."""
    folder = source(tmp_path / "model", SPECS["vectors"], tokenizer=True)
    export_model(folder, tmp_path / "out", "sentence-transformers", verify=False, report=lambda line: None)
    names = {path.relative_to(tmp_path / "out").as_posix() for path in (tmp_path / "out").rglob("*")}
    assert names > {"config.json", "tokenizer.json", "model.safetensors", "modules.json", "1_Pooling/config.json"}
    pooling = json.loads((tmp_path / "out" / "1_Pooling" / "config.json").read_text())
    assert pooling["pooling_mode_mean_tokens"] is True


@pytest.mark.slow
@pytest.mark.parametrize("activation", ["", "sigmoid", pytest.param("tanh", marks=pytest.mark.slow)])
def test_scores_of_pairs_are_those_of_the_model(tmp_path, activation):
    """The function of a cross-encoder's score, and pairs both of whose texts have the type 0."""
    heads = HeadsConfig(pooler=True, sequence_labels=("score",), problem="regression", activation=activation)
    tokenizer = TokenizerConfig(pair_types=False)
    weights = random_weights(ModelSpec(model=MODEL, heads=heads, tokenizer=tokenizer))
    weights = dataclasses.replace(weights, tokenizer_content=VOCABULARY)
    write_onnx(tmp_path, weights)
    texts = [("w1 w2", "w3"), ("w4", "w5 w6")]
    expected = [one["value"] for one in prepare(weights).predict(texts)]
    found = runpy.run_path(str(SCRIPT))["Model"](tmp_path).answers(list(map(list, texts)))
    np.testing.assert_allclose([one["scores"]["score"] for one in found], expected, atol=1e-5)
