"""A trained model read back from its workdir."""

import sys
from pathlib import Path
from typing import Any

import jax

from bert_jax.config import MeshConfig, PretrainConfig, load_config
from bert_jax.model import BertForPretraining, BertModel
from bert_jax.parallel import make_mesh
from bert_jax.tokenization import Tokenizer, load_tokenizer
from bert_jax.training.checkpoint import NoCheckpoint, restore_newest


def load_saved_model(workdir: Path) -> tuple[BertModel, Any, Tokenizer]:
    """Model, parameters (the moving average where there is one) and tokenizer of a pretraining workdir.

    Uses the newest checkpoint that passes its checks, on one device. Raises ``ValueError`` when ``workdir``
    holds no run.
    """
    recipe = workdir / "config.yaml"
    if not recipe.is_file():
        raise ValueError(f"{workdir}: no config.yaml there; give the workdir of a pretraining run")
    config = load_config(PretrainConfig, ["--config", str(recipe)])
    vocabularies = [path for path in sorted(workdir.iterdir()) if path.suffix in (".txt", ".model")]
    if len(vocabularies) != 1:
        raise ValueError(f"{workdir}: expected one vocabulary file (.txt or .model), found {len(vocabularies)}")
    tokenizer = load_tokenizer(vocabularies[0], lower_case=config.data.lower_case)
    mesh = make_mesh(MeshConfig(), jax.local_devices()[:1])
    restored = restore_newest(
        workdir, config, mesh, read_only=True, may_change=set(), report=lambda line: print(line, file=sys.stderr)
    )
    if restored is None:
        raise NoCheckpoint(f"{workdir}: no checkpoint there yet")
    state = restored.state
    model = BertForPretraining(config.model, config.execution, config.has_nsp)
    return model, state.params if state.ema is None else state.ema, tokenizer
