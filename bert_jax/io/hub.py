"""Models on the Hugging Face Hub, which ``huggingface_hub`` downloads to its cache, and uploads.

Its environment variables apply: ``HF_HOME``, ``HF_ENDPOINT``, ``HF_TOKEN``, ``HF_HUB_OFFLINE``.
"""

import functools
import re
from pathlib import Path

from bert_jax.io.errors import first_line, near_path

_NAME = re.compile(r"([\w-][\w.-]*/)?[\w-][\w.-]*")
# Configuration, vocabularies and weights, without those of other libraries; and the weights of a model without
# these: of older models, and of exports in other formats.
_FILES = ["*.json", "*.txt", "*.model", "*.safetensors"]
_OTHER_WEIGHTS = ["*pytorch_model*.bin", "weights.npz", "bert_model.ckpt*", "model.gguf"]
_OTHERS = ["onnx/*", "openvino/*"]


def is_hub_name(path: Path) -> bool:
    """Return True if ``path`` does not exist and has the form of a name on the Hub: ``name``, or ``owner/name``
    where no folder ``owner`` exists. The prefix of a TF1 checkpoint in the working folder is not a name."""
    has_form = _NAME.fullmatch(path.as_posix()) and (path.parent == Path() or not path.parent.exists())
    return bool(has_form) and not path.exists() and not Path(f"{path}.index").exists()


def model_path(name: str | Path) -> Path:
    """Return the name of a model, as a user wrote it, as a path.

    Raises ``ValueError`` for a missing local path that would be a name on the Hub without the "./" at its begin or
    the "/" at its end, which a ``Path`` does not keep.
    """
    text, path = str(name), Path(name)
    if (text.startswith("./") or text.endswith("/")) and is_hub_name(path):
        raise ValueError(f"{text}: this folder does not exist{near_path(path)}")
    return path


def local_folder(path: Path) -> Path:
    """Return ``path``, or for a name on the Hub the folder of the downloaded model.

    Raises ``ValueError`` if the Hub has no such model, or cannot be reached and the model is not in the cache.
    """
    return _downloaded(path.as_posix()) if is_hub_name(path) else path


@functools.cache  # the Hub is asked once for each name
def _downloaded(name: str) -> Path:
    try:
        import huggingface_hub
    except ImportError:
        raise ValueError(
            f"{name}: does not exist; for a model on the Hugging Face Hub: pip install huggingface_hub"
        ) from None
    from huggingface_hub import errors

    def download(files: list[str]) -> Path:
        return Path(str(huggingface_hub.snapshot_download(name, allow_patterns=files, ignore_patterns=_OTHERS)))

    try:
        folder = download(_FILES)
        parts = (folder, *folder.glob("*_Dense"))  # layers of sentence-transformers have files of their own
        is_whole = all(any(part.rglob("*.safetensors")) for part in parts)
        return folder if is_whole else download(_OTHER_WEIGHTS)
    except errors.GatedRepoError:
        what = "asks you to accept the terms of this model; accept them there, then: hf auth login"
    except errors.RepositoryNotFoundError:
        what = "has no such model; for a private one: hf auth login"
    except (OSError, errors.HFValidationError) as error:
        reason = "HF_HUB_OFFLINE" if huggingface_hub.constants.HF_HUB_OFFLINE else first_line(error, 80)
        what = f"is not available ({reason}); connect, or copy the model to this machine"
    near = near_path(Path(name))
    raise ValueError(f"{name}: does not exist, and the Hugging Face Hub {what}{near}")


def push(folder: Path, name: str) -> str:
    """Upload the files of ``folder`` to the model ``name``, OWNER/NAME; return its address. A model that does not
    exist is created.

    Raises ``ValueError`` if huggingface_hub is not installed, if the Hub cannot be reached, and if it refuses the
    upload.
    """
    try:
        import huggingface_hub
    except ImportError:
        raise ValueError(f"--push {name}: pip install huggingface_hub; {folder} is complete") from None
    from huggingface_hub import errors

    try:
        api = huggingface_hub.HfApi()
        address = api.create_repo(name, exist_ok=True)
        api.upload_folder(repo_id=name, folder_path=folder)
    except Exception as error:
        known = (OSError, errors.HfHubHTTPError, errors.HFValidationError, errors.LocalTokenNotFoundError)
        if not isinstance(error, known) and not type(error).__module__.startswith("httpx"):  # no connection
            raise
        remedy = f"{folder} is complete; hf auth login, then: hf upload {name} {folder}"
        raise ValueError(f"--push {name}: {first_line(error, 160)}; {remedy}") from None
    return str(address)
