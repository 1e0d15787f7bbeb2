"""``bert-jax import | export | embed | predict | score | generate | forward`` as a person calls them."""

import dataclasses
import importlib.util
import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from inference_models import make_weights

import bert_jax
from bert_jax.commands import main as cli
from bert_jax.config import HeadsConfig, SentenceConfig, SentenceModule
from bert_jax.contrib.generation.generate import generate
from bert_jax.interop import export, import_model
from bert_jax.interop.saved_model import write_saved
from bert_jax.process.accelerators import DEVICE_FILES

TEXTS = ["w1 w2 w3", "w4", "w5 w6 w7 w8 w9 , w1"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A classifier and a sentence model, saved."""
    folder = tmp_path_factory.mktemp("models")
    labels = HeadsConfig(pooler=True, sequence_labels=("no", "yes"))
    write_saved(folder / "classifier", make_weights(labels))
    sentence = SentenceConfig(modules=(SentenceModule(kind="normalize"),), prompts=(("query", "w7 : "),))
    write_saved(folder / "sentence", make_weights(sentence=sentence))
    return folder


@pytest.fixture
def call(capsys, monkeypatch):
    """Run a command: (exit code, stdout, stderr)."""

    def run(*words, stdin=""):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin.encode())))
        capsys.readouterr()
        code = cli.main([str(word) for word in words])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.fixture
def refused(call):
    """Run a command that must end with one line and code 2; returns the line."""

    def run(*words, stdin=""):
        code, out, err = call(*words, stdin=stdin)
        assert code == 2 and out == "", (code, out, err)
        assert len(err.splitlines()) == 1 and err.startswith("error: "), err
        return err

    return run


@pytest.mark.slow
@pytest.mark.parametrize("first", ["", "import jax"])
def test_loading_is_silent_where_libtpu_finds_no_tpu(folder, first):
    """libtpu, which is installed for planning, prints a page of errors when it finds no TPU."""
    if importlib.util.find_spec("libtpu") is None or any(any(Path("/").glob(name)) for name in DEVICE_FILES):
        pytest.skip("needs libtpu and a machine without accelerators")
    chosen = ("JAX_PLATFORMS", "JAX_FORCE_TPU_INIT", "TPU_WORKER_HOSTNAMES")
    environment = {name: value for name, value in os.environ.items() if name not in chosen}
    script = f"{first}\nimport sys, bert_jax\nprint(bert_jax.load(sys.argv[1]).embed('w1').shape)"
    command = [sys.executable, "-c", script, str(folder / "sentence")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stdout, done.stderr) == (0, "(16,)\n", "")


@pytest.mark.slow
def test_generate(folder, call, refused, tmp_path):
    weights = make_weights(HeadsConfig())
    model = dataclasses.replace(weights.spec.model, attention="causal")
    weights = dataclasses.replace(weights, spec=dataclasses.replace(weights.spec, model=model))
    write_saved(tmp_path / "causal", weights)
    loaded = bert_jax.load(tmp_path / "causal")
    rows = list(generate(loaded, TEXTS, max_new_tokens=5))
    expected = [
        {"prompt": row.prompt, "text": row.text, "tokens": len(row.ids), "ended": row.ended} for row in rows
    ]
    words = ("generate", tmp_path / "causal", "--max_new_tokens", 5)
    prompts = [word for text in TEXTS for word in ("--prompt", text)]
    code, out, err = call(*words, *prompts)
    assert (code, err) == (0, "") and [json.loads(line) for line in out.splitlines()] == expected
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS))
    target = tmp_path / "out.jsonl"
    code, out, err = call(*words, "--input", tmp_path / "texts.txt", "--output", target, "--batch_size", 2)
    assert (code, out, err) == (0, "", "") and [json.loads(line) for line in target.open()] == expected
    drawn = [call(*words, *prompts, "--temperature", 1, "--top_k", 9, "--seed", seed)[1] for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]

    line = refused("generate", folder / "classifier", "--prompt", "w1")
    assert "a bidirectional model cannot generate text" in line and "bert-jax fill-mask" in line
    assert "--temperature" in refused(*words, "--prompt", "w1", "--top_k", 3)
    assert "temperature: -1.0 is not allowed" in refused(*words, "--prompt", "w1", "--temperature", -1)
    assert "at most 70 together" in refused(*words[:2], "--prompt", "w1", "--max_new_tokens", 69)
    assert "no text given" in refused(*words)
    code, out, err = call("generate", tmp_path / "causal", "--prompt", "", "--max_new_tokens", 3)
    assert (code, err) == (0, "") and json.loads(out)["prompt"] == ""  # from the first token of the tokenizer


def test_embed_writes_what_the_library_gives(folder, call, tmp_path):
    vectors = bert_jax.load(folder / "sentence").embed(TEXTS)
    assert np.allclose(np.linalg.norm(vectors, axis=1), 1)
    source, target = tmp_path / "texts.txt", tmp_path / "vectors.npy"
    source.write_text("\n\n".join(TEXTS) + "\n")
    code, out, err = call("embed", "--model", folder / "sentence", "--input", source, "--output", target)
    assert (code, out) == (0, "") and "float32[3, 16]" in err
    assert np.array_equal(np.load(target), vectors)
    npz = tmp_path / "vectors.npz"
    code, out, err = call("embed", "--model", folder / "sentence", "--input", source, "--output", npz)
    assert (code, out) == (0, "") and "vectors.npz: float32[3, 16]" in err
    with np.load(npz) as arrays:
        assert arrays.files == ["embeddings"] and arrays["embeddings"].dtype == np.float32
        assert np.array_equal(arrays["embeddings"], vectors)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["texts.txt", "vectors.npy", "vectors.npz"]
    code, out, err = call("embed", "--model", folder / "sentence", stdin="\n".join(TEXTS))
    lines = [json.loads(line)["embedding"] for line in out.splitlines()]
    assert (code, err) == (0, "") and np.allclose(lines, vectors, atol=1e-6)


@pytest.mark.slow
def test_embed_by_pooling_prompt_and_token(folder, call):
    model = bert_jax.load(folder / "sentence")
    for words, options in (
        (("--pooling", "max", "--normalize", "false"), {"pooling": "max", "normalize": False}),
        (("--prompt_name", "query"), {"prompt_name": "query"}),
        (("--prompt", "w9 "), {"prompt": "w9 "}),
    ):
        code, out, _ = call("embed", "--model", folder / "sentence", *words, TEXTS[0])
        assert code == 0
        assert np.allclose(json.loads(out)["embedding"], model.embed([TEXTS[0]], **options)[0], atol=1e-6), words
    code, out, _ = call("embed", "--model", folder / "sentence", "--per_token", "--layers=-1,0", "w1 ||| w2")
    features = json.loads(out)["features"]
    assert code == 0 and [token["token"] for token in features] == ["[CLS]", "w1", "[SEP]", "w2", "[SEP]"]
    assert [layer["index"] for layer in features[0]["layers"]] == [-1, 0]
    code, out, _ = call("embed", "--model", folder / "sentence", "--per_token", "w1")  # the last four, if there are
    assert code == 0 and [layer["index"] for layer in json.loads(out)["features"][0]["layers"]] == [-1, -2]


@pytest.mark.slow
def test_predict_pairs_from_json_lines(folder, call, tmp_path):
    pairs = [{"text": "w1 w2", "text_pair": "w3"}, {"text": "w4"}]
    source = tmp_path / "pairs.jsonl"
    source.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    code, out, _ = call("predict", "--model", folder / "classifier", "--input", source)
    given = [json.loads(line) for line in out.splitlines()]
    assert code == 0 and given == bert_jax.load(folder / "classifier").predict(pairs)
    assert given[0]["label"] in ("no", "yes") and abs(sum(given[0]["probabilities"].values()) - 1) < 1e-5
    code, out, _ = call("predict", "--model", folder / "classifier", "--json_lines", stdin=source.read_text())
    assert code == 0 and [json.loads(line) for line in out.splitlines()] == given


@pytest.mark.slow
def test_rows_begin_with_the_ids_of_the_inputs(folder, call, tmp_path):
    (tmp_path / "in.jsonl").write_text('{"id": "a", "text": "w1"}\n\n{"text": "w2"}\n{"text": "w3", "id": 7}\n')
    for words in (["predict", "--model", folder / "classifier"], ["embed", "--model", folder / "sentence"]):
        code, out, _ = call(*words, "--input", tmp_path / "in.jsonl")
        rows = [json.loads(line) for line in out.splitlines()]
        assert code == 0 and [row.get("id") for row in rows] == ["a", None, 7] and next(iter(rows[0])) == "id"
        plain = call(*words, stdin="w1\nw2\nw3\n")
        assert [{k: v for k, v in row.items() if k != "id"} for row in rows] == [
            *map(json.loads, plain[1].splitlines())
        ]
        assert "blank" not in plain[2]


def test_blank_lines_between_texts_are_counted(folder, call):
    _, out, err = call("predict", "--model", folder / "classifier", stdin="\nw1\n\n \nw2\n\n")
    assert len(out.splitlines()) == 2
    assert "standard input: blank lines skipped: 3; results follow the order of the other lines\n" in err


def test_weights_go_out_and_in_again(folder, call, tmp_path):
    npz, saved, ids = tmp_path / "npz", tmp_path / "saved", tmp_path / "ids.npz"
    np.savez(
        ids, input_ids=np.array([[2, 6, 7, 3], [2, 8, 3, 0]]), attention_mask=np.array([[1] * 4, [1, 1, 1, 0]])
    )
    code, out, _ = call("export", "--from", folder / "classifier", "--to", npz, "--format", "npz")
    assert code == 0, out
    assert call("import", "--from", npz, "--to", saved)[0] == 0
    outputs = []
    for model in (folder / "classifier", npz, saved):
        target = tmp_path / f"{model.name}.out.npz"
        code, out, _ = call("forward", "--model", model, "--input", ids, "--output", target, "--attentions")
        assert code == 0 and "attentions [2, 2, 4, 4, 4]" in out and "logits [2, 2]" in out
        outputs.append(dict(np.load(target)))
    for name, values in outputs[0].items():
        assert np.array_equal(values, outputs[1][name]) and np.array_equal(values, outputs[2][name]), name


def test_refusals(folder, call, refused, tmp_path):
    model = ("--model", folder / "sentence")
    assert "--layers: requires --per_token" in refused("embed", *model, "--layers=-1", "w1")
    assert "--pooling: not allowed with --per_token" in refused(
        "embed", *model, "--per_token", "--pooling", "cls", "w1"
    )
    assert "--layers: 'a' is not allowed" in refused("embed", *model, "--per_token", "--layers", "a", "w1")
    for name in ("x.npy", "x.npz"):
        assert ".jsonl file" in refused("embed", *model, "--per_token", "--output", tmp_path / name, "w1")
    assert "--batch_tokens: 0 is not allowed" in refused("embed", *model, "--batch_tokens", "0", "w1")
    assert "no text given" in refused("embed", *model)
    assert "give only one of them" in refused("embed", *model, "--input", tmp_path / "x", "w1")
    assert "no prompt 'other'" in refused("embed", *model, "--prompt_name", "other", "w1")
    assert "no task head" in refused("predict", *model, "w1")
    assert "not JSON" in refused("predict", "--model", folder / "classifier", "--json_lines", stdin="w1\n")
    assert "not a JSON object" in refused(
        "predict", "--model", folder / "classifier", "--json_lines", stdin="[1]\n"
    )
    (tmp_path / "latin.txt").write_bytes(b"w1\n\xff\n")
    assert "latin.txt:2: not valid UTF-8" in refused(
        "embed", *model, "--input", tmp_path / "latin.txt", "--output", tmp_path / "v.npy"
    )
    refused("embed", *model, "--input", tmp_path / "latin.txt", "--output", tmp_path / "v.npz")
    assert [path.name for path in tmp_path.iterdir()] == ["latin.txt"]
    assert "not a file" in refused("embed", *model, "--output", tmp_path, "w1")
    assert "not a file" in refused("embed", *model, "--output", "/dev/null", "w1")
    assert Path("/dev/null").is_char_device()
    assert "no model" in refused("embed", "--model", tmp_path, "w1")
    assert "not empty" in refused("import", "--from", folder / "sentence", "--to", folder / "classifier")
    assert "not empty" in refused(
        "export", "--from", folder / "sentence", "--to", folder / "classifier", "--format", "hf"
    )
    export = ["export", "--from", folder / "classifier"]
    formats = "hf, sentence-transformers, tf1, onnx, stablehlo, npz, gguf"
    assert refused(*export) == f"error: --format: not given; formats that hold this model: {formats}\n"
    assert refused(*export, "--format", "npz") == "error: --to: not given; name a new folder\n"
    export = ["export", "--from", "x", "--to", "y", "--format"]
    for words in (["embed"], [*export, "other"], [*export, "hf", "--heads", ""], ["unknown"]):
        with pytest.raises(SystemExit) as ended:
            cli.main(words)
        assert ended.value.code == 2


@pytest.mark.parametrize(("format", "what"), [("onnx", "an ONNX export"), ("stablehlo", "a StableHLO export")])
def test_an_exported_program_is_no_model(folder, call, refused, tmp_path, format, what):
    words = ("export", "--from", folder / "classifier", "--to", tmp_path / format, "--format", format)
    assert call(*words, "--no_verify")[0] == 0
    for path in (tmp_path / format, *(tmp_path / format).glob("model.onnx")):
        line = refused("embed", "--model", path, "w1")
        assert what in line and "programs cannot be imported" in line


@pytest.mark.parametrize(("number", "expected"), [(signal.SIGTERM, 42), (signal.SIGINT, 130)])
@pytest.mark.parametrize("words", [("export", "--format", "npz"), ("import",)])
def test_a_stopped_command_leaves_nothing(folder, call, tmp_path, monkeypatch, words, number, expected):
    table, name = (export.WRITERS, "npz") if "export" in words else (vars(import_model), "write_saved")
    write = table[name]

    def interrupted(*arguments, **options):
        write(*arguments, **options)
        os.kill(os.getpid(), number)

    monkeypatch.setitem(table, name, interrupted)
    code, _, err = call(*words, "--from", folder / "classifier", "--to", tmp_path / "out")
    assert code == expected and err.startswith("stopped; incomplete output was removed")
    assert list(tmp_path.iterdir()) == []


def test_import_follows_a_link(folder, call, tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "new")
    assert call("import", "--from", folder / "classifier", "--to", tmp_path / "link")[0] == 0
    assert (tmp_path / "link").is_symlink() and (tmp_path / "new" / "model.json").is_file()


def test_one_text_gives_one_answer(folder, capsys, monkeypatch):
    model = bert_jax.load(folder / "classifier")
    assert model.config.hidden_size == 16
    assert model.predict("w1 w2") == model.predict(["w1 w2"])[0]
    assert np.array_equal(model.embed("w1 w2"), model.embed(["w1 w2"])[0])
    with pytest.raises(ValueError, match="dtype: 'float16' is not allowed"):
        bert_jax.load(folder / "classifier", dtype="float16")
    monkeypatch.setattr(sys, "stdin", None)
    assert cli.main(["predict", "--model", str(folder / "classifier")]) == 2
    assert capsys.readouterr().err.startswith("error: standard input: closed")


def test_score(folder, call, refused, tmp_path):
    write_saved(tmp_path / "masked", make_weights(HeadsConfig(mlm=True)))
    model = ("score", "--model", tmp_path / "masked")
    rows = bert_jax.load(tmp_path / "masked").score(TEXTS)
    expected = [{"text": row.text, "score": row.score, "tokens": len(row.pieces)} for row in rows]
    code, out, err = call(*model, *TEXTS)
    assert code == 0 and [json.loads(line) for line in out.splitlines()] == expected
    total = sum(row["tokens"] for row in expected)
    perplexity = np.exp(-sum(row["score"] for row in expected) / total)
    assert err == f"pseudo-perplexity {perplexity:.4g} over {total} tokens\n"
    target = tmp_path / "scores.jsonl"
    words = ("--method", "PLL-original", "--per_token", "--output", target, "--json_lines")
    code, out, _ = call(*model, *words, stdin='{"text": "w1xy w2"}')
    (line,) = map(json.loads, target.open())
    assert code == 0 and out == "" and line["pieces"] == ["w1", "##x", "##y", "w2"] and line["tokens"] == 4
    assert abs(sum(line["log_probabilities"]) - line["score"]) < 1e-9

    assert "no language-model head" in refused("score", "--model", folder / "classifier", "w1")
    assert "--limit: requires --pairs" in refused(*model, "--limit", 1, "w1")
    assert "--pair_scores: requires --pairs" in refused(*model, "--pair_scores", target, "w1")
    assert "no text given" in refused(*model)
    assert "a text on the command line is blank" in refused(*model, "")
    assert "the maximum is 70" in refused(*model, "w1 " * 69)


def test_score_of_minimal_pairs(call, refused, tmp_path):
    write_saved(tmp_path / "masked", make_weights(HeadsConfig(mlm=True)))
    model = ("score", "--model", tmp_path / "masked")
    pairs = [
        {
            "sentence_good": f"w{i} w1",
            "sentence_bad": f"w{i} w2x",
            "linguistics_term": f"t{i % 2}",
            "UID": f"u{i % 3}",
        }
        for i in range(3, 20)
    ]
    pairs.append({"sentence_good": "w1", "sentence_bad": "w1"})
    source, table, scores = (tmp_path / name for name in ("pairs.jsonl", "table.jsonl", "scores.jsonl"))
    source.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    code, out, err = call(*model, "--pairs", source, "--output", table, "--pair_scores", scores)
    lines = out.splitlines()
    assert (
        code == 0 and err == "" and [line.split(" ")[0] for line in lines[:3]] == ["overall", *["phenomenon"] * 2]
    )
    assert lines[3] == "1 ties, counted as wrong; 17 pairs differ in their number of tokens" and len(lines) == 4
    rows, groups = (list(map(json.loads, path.open())) for path in (scores, table))
    assert [{name: row[name] for name in pair} for row, pair in zip(rows, pairs, strict=True)] == pairs
    right = [row["correct"] for row in rows]
    assert right == [row["score_good"] > row["score_bad"] for row in rows] and 0 < sum(right) < 18
    assert groups[0]["accuracy"] == sum(right) / 18 and groups[0]["low"] < groups[0]["accuracy"] < groups[0]["high"]
    assert lines[0].startswith(f"overall all {sum(right) / 18:.4f} [") and lines[0].endswith("] 18 pairs")
    assert [group["pairs"] for group in groups] == [18, 9, 8, 6, 6, 5]
    code, out, _ = call(*model, "--pairs", source, "--limit", 2)
    assert code == 0 and out.splitlines()[0].endswith(" 7 pairs")

    assert "--per_token cannot be combined with --pairs" in refused(*model, "--pairs", source, "--per_token")
    assert "texts cannot be combined with --pairs" in refused(*model, "w1", "--pairs", source)
    assert "No such file" in refused(*model, "--pairs", tmp_path / "missing.jsonl")
    source.write_text('{"sentence_good": "w1"}\n')
    assert "pairs.jsonl:1: no sentence_bad" in refused(*model, "--pairs", source)
