"""Reader and writer of saved models (``model.json``), and reader of the workdir of a run.

A saved model is ``DIR/{model.json, vocabulary file, checkpoints/STEP}``. The checkpoint contains the canonical
parameters and the same kinds of digests as a checkpoint of a run (``bert_jax.training.checkpoint.digest``).
"""

import dataclasses
import functools
import hashlib
import json
import sys
from pathlib import Path

from flax import linen as nn

from bert_jax.config import (
    ModelSpec,
    PretrainConfig,
    TokenizerConfig,
    load_config,
    spec_from_json,
    spec_to_json,
    to_dict,
)
from bert_jax.interop.hf.families.long import copy_projections
from bert_jax.interop.model_bundle import ModelBundle, ReadOptions, check_shapes, parameter_shapes, without_folders
from bert_jax.interop.saved_files import BEST, SPEC_FILE, older, whole
from bert_jax.interop.taken_over import with_kept
from bert_jax.io.files import new_folder, whole_folder
from bert_jax.io.untrusted_folder import json_object
from bert_jax.objectives.registry import objective_class
from bert_jax.tokenization import FILE_NAMES, Tokenizer, WordPieceTokenizer, load_tokenizer
from bert_jax.training.checkpoint.digest import check_files, json_digest, write_checksums
from bert_jax.training.checkpoint.folder import checkpoint_folder, saved_steps
from bert_jax.training.checkpoint.parameters import (
    Parameters,
    arrays_digest,
    random_parameters,
    read_arrays,
    read_parameters,
    save_arrays,
)
from bert_jax.training.checkpoint.restore import NoCheckpoint
from bert_jax.training.logging.metrics_file import read_metrics
from bert_jax.training.workdir import read_record


def read_native(path: Path, options: ReadOptions) -> ModelBundle:
    """Read a saved model, the best parameters of a fine-tuning run, or the newest intact checkpoint of a
    pretraining run (the moving average if the run has one, unless ``options.ema`` is False). ``options.step`` names
    another checkpoint of the run.

    Raises ``ValueError`` if the model is missing or damaged, if the vocabulary is not the one with which the model
    was saved, if ``options.ema`` is True and the model has no moving average, or if the run has no checkpoint of
    ``options.step``.
    """
    path = whole(path)
    if not (path / SPEC_FILE).is_file():
        best = whole(path / BEST)
        if (best / SPEC_FILE).is_file():
            path = best
        elif "task:" in (path / "config.yaml").read_text(encoding="utf-8").splitlines():
            raise ValueError(f"{path}: the fine-tuning run has no evaluated model yet; continue the run")
        else:
            return _read_run(path, options)
    if options.network:
        raise ValueError(f"{path}: --network {options.network}: a saved model is one network; omit --network")
    if options.ema:
        raise ValueError(f"{path}: a saved model has no moving average; omit --ema")
    if options.step is not None:
        raise ValueError(f"{path}: not a pretraining run, which has checkpoints of several steps; omit step")
    return _read_saved(path)


def write_saved(folder: Path, weights: ModelBundle, step: int = 0) -> None:
    """Write ``weights`` as a saved model to ``folder``, which must not exist or must be empty.

    If an exception is raised, no incomplete folder remains. Raises ``ValueError`` if the folder is not empty or if
    the parameters do not match the spec.
    """
    check_shapes(weights.spec, weights.params, folder)
    folder = new_folder(folder)
    with whole_folder(folder) as partial:
        target = partial / "checkpoints" / str(step)
        target.mkdir(parents=True)
        meta = {
            "format": 1,
            "step": step,
            "spec": json.loads(spec_to_json(weights.spec)),
            "tokenizer_sha256": _sha256(weights.tokenizer_content),
            "origin": without_folders(weights.origin),
            "digest": arrays_digest(weights.params, weights.spec.model.vocab_size),
        }
        meta["json_digest"] = json_digest(meta)
        save_arrays(target / "state", weights.params)
        (target / "meta.json").write_text(json.dumps(meta, indent=1, ensure_ascii=False), encoding="utf-8")
        write_checksums(target)
        if weights.spec.tokenizer is not None and weights.tokenizer_content is not None:
            (partial / weights.spec.tokenizer.file).write_bytes(weights.tokenizer_content)
        (partial / SPEC_FILE).write_text(spec_to_json(weights.spec), encoding="utf-8")


def _sha256(content: bytes | None) -> str | None:
    return None if content is None else hashlib.sha256(content).hexdigest()


def _read_saved(path: Path) -> ModelBundle:
    spec = spec_from_json((path / SPEC_FILE).read_text(encoding="utf-8"), str(path / SPEC_FILE))
    steps = saved_steps(path)
    if not steps:
        raise NoCheckpoint(f"{path}: no checkpoint; import or export the model again")
    folder = checkpoint_folder(path) / str(steps[-1])
    problem = check_files(folder)
    if problem is not None:
        raise ValueError(f"{folder}: damaged ({problem}); import or export the model again")
    meta = json_object((folder / "meta.json").read_bytes(), folder / "meta.json")
    digest = meta.pop("json_digest", None)
    if digest != json_digest(meta):
        raise ValueError(f"{folder}: damaged (meta.json does not match its digest); save the model again")
    # Compared as specs, because an older version wrote fewer fields; missing fields have their defaults.
    if spec_from_json(json.dumps(meta["spec"]), str(folder)) != spec:
        raise ValueError(f"{path / SPEC_FILE}: differs from the model in the checkpoint; restore the original file")
    content = None
    if spec.tokenizer is not None:
        file = path / spec.tokenizer.file
        if not file.is_file():
            raise ValueError(f"{file}: the vocabulary file is missing; restore the original file")
        content = file.read_bytes()
        if _sha256(content) != meta["tokenizer_sha256"]:
            raise ValueError(f"{file}: not the vocabulary of the saved model; restore the original file")
    stored = read_arrays(folder / "state", check=lambda shapes: check_shapes(spec, shapes, folder / "state"))
    params = {name: stored[name] for name in parameter_shapes(spec)}
    if arrays_digest(params, spec.model.vocab_size) != meta["digest"]:
        raise ValueError(f"{folder}: damaged (the parameters do not match their digest); save the model again")
    notes = []
    if spec.task is None and meta["origin"].get("format") == "fine-tuning run":
        notes.append(
            f"{path}: an older version saved the model without the settings of its task: predictions use defaults, "
            f"such as texts of at most {spec.max_length} tokens; only a new run stores the settings"
        )
    return ModelBundle(
        spec=spec, params=params, tokenizer_content=content, notes=tuple(notes), origin=meta["origin"]
    )


def _read_run(workdir: Path, options: ReadOptions) -> ModelBundle:
    config = load_config(PretrainConfig, ["--config", str(workdir / "config.yaml")])
    vocabularies = [
        path
        for path in sorted(workdir.iterdir())
        # Other JSON files describe the run.
        if path.suffix in (".txt", ".model") or path.name == "tokenizer.json"
    ]
    if len(vocabularies) != 1:
        kinds = ".txt, .model or tokenizer.json"
        raise ValueError(f"{workdir}: contains {len(vocabularies)} vocabulary files ({kinds}); it must contain one")
    content = vocabularies[0].read_bytes()
    tokenizer = load_tokenizer(vocabularies[0], **config.data.rules)
    # The file of objective.module is not executed: the model can be read if its parameters are those of the
    # masked-LM objective.
    objective = objective_class(dataclasses.replace(config.objective, module=""))
    if options.network and options.network not in objective.networks:
        raise ValueError(f"{workdir}: --network {options.network}: {_networks(objective.networks)}")
    model = objective.make_model(config, None)
    stored = _stored(workdir, config, model, tokenizer, options)
    if isinstance(tokenizer, WordPieceTokenizer) and vocabularies[0].suffix == ".json":
        content = tokenizer.vocab_txt
    if stored.meta["tokenizer"] != tokenizer.fingerprint:
        raise ValueError(f"{vocabularies[0]}: not the vocabulary of the run; restore the original file")
    name = options.network or next(iter(objective.networks), "")
    record = read_record(workdir)
    architecture, heads, params = objective.network(config, model, stored.arrays, name)
    if architecture.global_tokens or "span_transform" in architecture.head_parts:
        # Pretraining does not read it; the recipe may state that of another vocabulary.
        architecture = dataclasses.replace(architecture, separator_id=tokenizer.sep_id)
    has_global = heads.sequence_labels or heads.span or heads.choice or (record and record["trained_global"])
    if architecture.global_tokens and not has_global:
        # No batch of the run had global tokens, and the others' projections have moved on.
        params = copy_projections(params)
    spec = ModelSpec(
        model=architecture,
        heads=heads,
        # A run that starts from a RoBERTa model keeps the position embeddings before the first position.
        family=architecture.family_name,
        tokenizer=TokenizerConfig(file=FILE_NAMES[tokenizer.kind], **tokenizer.rules),
    )
    spec = with_kept(spec, {} if record is None else record["kept"])
    check_shapes(spec, params, workdir)
    evaluations = [
        line for line in read_metrics(workdir) if line.get("split") == "eval" and line["step"] <= stored.step
    ]
    origin = {
        "format": "pretraining run",
        "name": workdir.absolute().name,
        "step": stored.step,
        "moving_average": stored.averaged,
        "recipe": to_dict(config),
        # The newest evaluation up to this step, of the moving average if the run has one.
        "metrics": dict(evaluations[-1]) if evaluations else {},
    }
    return ModelBundle(spec=spec, params=params, tokenizer_content=content, origin=origin)


def _stored(
    workdir: Path, config: PretrainConfig, model: nn.Module, tokenizer: Tokenizer, options: ReadOptions
) -> Parameters:
    """Return the parameters of the checkpoint that ``options`` names."""
    if options.step == 0:
        if config.training.first_step or read_record(workdir) is not None:
            raise ValueError(f"{workdir}: does not start from random parameters; read the model it starts from")
        return random_parameters(config, model, tokenizer)
    report = functools.partial(print, file=sys.stderr)
    stored = read_parameters(workdir, config, model, average=options.ema, report=report, step=options.step)
    if stored is None:
        raise NoCheckpoint(f"{workdir}: no checkpoint yet")
    return stored


def _networks(names: tuple[str, ...]) -> str:
    if not names:
        return "the run trained one network; omit --network"
    return f"not a network of the run; use {' or '.join(names)}"


def replace_saved(folder: Path, weights: ModelBundle, step: int) -> None:
    """Replace the saved model in ``folder``.

    At any moment a complete model exists, either in ``folder`` or in the folder with the same name and the suffix
    ``.old``.
    """
    old = older(folder)
    if old.exists() and not folder.exists():  # an earlier call was killed
        old.rename(folder)
    with whole_folder(folder, old) as new:
        write_saved(new, weights, step)
