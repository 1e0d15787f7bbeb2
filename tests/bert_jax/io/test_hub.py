"""Models named as on the Hugging Face Hub: with a fake download, and with a server that answers as the Hub does."""

import fnmatch
import hashlib
import http.server
import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import errors
from inference_models import make_weights

import bert_jax
from bert_jax.commands.finetune import FinetuneRunOptions
from bert_jax.commands.main import main
from bert_jax.inference.loaded import prepare
from bert_jax.interop.readers import read_weights
from bert_jax.io import hub
from bert_jax.start.fixed_options import whole_name
from bert_jax.start.initial_model import initial_weights

COMMIT = "0123456789" * 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "model"
    prepare(make_weights(layers=1)).save(path, "hf", report=lambda line: None)
    return path


@pytest.fixture
def asked(folder, tmp_path, monkeypatch):
    """The names and files that the fake Hub is asked for; it has one model, owner/name."""
    monkeypatch.chdir(tmp_path)
    hub._downloaded.cache_clear()
    names = []

    def snapshot_download(name, *, allow_patterns, ignore_patterns):
        names.append((name, allow_patterns))
        if name == "owner/name":
            return str(folder)
        raise errors.LocalEntryNotFoundError("Cannot find an appropriate snapshot.\nConnect.")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    yield names
    hub._downloaded.cache_clear()


def test_a_model_of_the_hub_is_downloaded_once(asked, folder):
    weights = read_weights(Path("owner/name"))
    model = bert_jax.load("owner/name")
    assert weights.spec == model.spec == read_weights(folder).spec
    assert model.name == model.origin["name"] == "owner/name"
    assert [name for name, _ in asked] == ["owner/name"]


def test_other_weights_are_downloaded_if_there_are_no_usual_ones(asked, folder, monkeypatch):
    monkeypatch.setattr(hub, "_FILES", ["*.json"])
    monkeypatch.setattr(Path, "rglob", lambda path, pattern: iter(()))
    assert hub.local_folder(Path("owner/name")) == folder
    assert [files for _, files in asked] == [["*.json"], hub._OTHER_WEIGHTS]


def test_layers_of_sentence_transformers_without_safetensors_are_downloaded(asked, folder):
    (folder / "2_Dense").mkdir()
    hub.local_folder(Path("owner/name"))
    (folder / "2_Dense").rmdir()
    assert [files for _, files in asked] == [hub._FILES, hub._OTHER_WEIGHTS]


def test_an_upload_without_a_connection_is_one_line(folder, monkeypatch):
    refused = type("ConnectError", (Exception,), {"__module__": "httpx"})  # the type since huggingface_hub 1.0

    class Api:
        def create_repo(self, name, exist_ok):
            raise refused("Connection refused")

    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    with pytest.raises(ValueError, match=r"^--push owner/name: .*refused; .* is complete; hf auth login, then: "):
        hub.push(folder, "owner/name")


@pytest.mark.parametrize("format", ["npz", "hf"])
def test_an_uploaded_export_is_downloaded_whole(format, tmp_path):
    prepare(make_weights(layers=1)).export(tmp_path, format, verify=False, force=True, report=lambda line: None)
    patterns = [*hub._FILES, *hub._OTHER_WEIGHTS]
    names = [file.name for file in tmp_path.iterdir() if file.name != "README.md"]
    assert [name for name in names if not any(fnmatch.fnmatch(name, one) for one in patterns)] == []


@pytest.mark.parametrize("name", ["owner/missing", "bert-base-uncased"])
def test_a_missing_model_is_one_line(asked, name):
    with pytest.raises(
        ValueError, match=rf"^{name}: does not exist, and the Hugging Face Hub is not available"
    ) as no:
        bert_jax.load(name)
    assert "\n" not in str(no.value) and "copy the model to this machine" in str(no.value)


def test_a_local_folder_is_not_searched_on_the_hub(asked, tmp_path):
    (tmp_path / "runs").mkdir()
    (tmp_path / "quickstart").mkdir()
    for name in ("runs/quickstat", "/nowhere/at/all", "runs/a/b", "quickstart", "a b"):
        with pytest.raises(ValueError, match=r"does not exist|contains no model"):
            bert_jax.load(name)
    assert not asked
    with pytest.raises(ValueError, match=r"does not exist, and the Hugging Face Hub .*; did you mean 'quickstart'"):
        bert_jax.load("quickstat")


@pytest.mark.parametrize("name", ["./bert-base", "bert-base/", "./owner/name", "../owner/name", "~/name", "a/b/c"])
def test_a_missing_local_path_is_not_searched_on_the_hub(asked, name, capsys):
    with pytest.raises(ValueError, match=rf"^{re.escape(name)}: (this folder )?does not exist$"):
        bert_jax.load(name)
    for command in (
        ["picture", name, "a text"], ["export", "--model", name, "--to", "out", "--format", "hf"],
        ["finetune", "--init_from", name, "--task.kind", "classification", "--data.train", "a.tsv"],
    ):  # fmt: skip
        assert main(command) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("error: ") and "does not exist" in line, command
    assert not asked


def test_a_similar_folder_is_named(asked, tmp_path):
    (tmp_path / "quickstart").mkdir()
    with pytest.raises(
        ValueError, match=r"^\./quickstat: this folder does not exist; did you mean 'quickstart'\?$"
    ):
        bert_jax.load("./quickstat")
    (tmp_path / "bert_model.ckpt.index").touch()
    assert hub.model_path("./bert_model.ckpt") == Path("bert_model.ckpt") and not asked


def test_a_tf1_checkpoint_in_the_working_folder_is_not_searched_on_the_hub(asked, tmp_path):
    (tmp_path / "bert_model.ckpt.index").touch()
    assert hub.local_folder(Path("bert_model.ckpt")) == Path("bert_model.ckpt")
    assert not asked


def test_the_record_of_a_run_names_the_model_of_the_hub(asked, tmp_path):
    assert whole_name("owner/name") == "owner/name"
    (tmp_path / "owner" / "name").mkdir(parents=True)
    assert whole_name("owner/name") == str(tmp_path / "owner" / "name")


def test_a_run_starts_from_a_model_of_the_hub(asked, folder):
    weights, _ = initial_weights(FinetuneRunOptions(init_from="owner/name"), {}, None)
    assert weights.spec == read_weights(folder).spec and weights.origin["name"] == "owner/name"
    assert [name for name, _ in asked] == ["owner/name"]


class Server(http.server.ThreadingHTTPServer):
    """Answers the requests of huggingface_hub for one model, owner/name."""

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.files = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}

    def answer(self, path: str) -> tuple[int, dict[str, str], bytes]:
        name, _, rest = path.partition("?")[0].removeprefix("/").removeprefix("api/models/").partition("owner/name")
        if name or not rest:
            return 404, {"X-Error-Code": "RepoNotFound"}, b""
        if rest.startswith("/resolve/"):
            content = self.files[rest.removeprefix(f"/resolve/{COMMIT}/")].read_bytes()
            return 200, {"X-Repo-Commit": COMMIT, "ETag": f'"{hashlib.sha1(content).hexdigest()}"'}, content
        files = [{"type": "file", "path": one, "size": 1, "oid": COMMIT} for one in self.files]
        about = {"id": "owner/name", "sha": COMMIT, "siblings": [{"rfilename": one} for one in self.files]}
        return 200, {"Content-Type": "application/json"}, json.dumps(files if "/tree/" in rest else about).encode()


class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        code, headers, content = self.server.answer(self.path)
        self.send_response(code)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    do_HEAD = do_GET

    def log_message(self, *_) -> None:
        pass


def test_endpoint_and_cache_are_those_of_huggingface_hub(folder, tmp_path):
    server = Server(folder)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    environment = {
        **os.environ, "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HOME": str(tmp_path / "cache"),
        "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    }  # fmt: skip
    script = "import pathlib, sys\nfrom bert_jax.io import hub\nprint(hub.local_folder(pathlib.Path(sys.argv[1])))"

    def found(name: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", script, name]
        return subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)

    first, missing = found("owner/name"), found("owner/other")
    server.shutdown()
    server.server_close()
    assert Path(first.stdout.strip()).is_relative_to(tmp_path / "cache"), first.stderr
    assert "the Hugging Face Hub has no such model" in missing.stderr
    weights, expected = read_weights(Path(first.stdout.strip())), read_weights(folder)
    assert weights.spec == expected.spec
    assert found("owner/name").stdout == first.stdout  # from the cache
