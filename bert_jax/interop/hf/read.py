"""Reader of Hugging Face folders of BERT and RoBERTa; the tensors are checked against config.json."""

import dataclasses
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from bert_jax.config import HeadsConfig, ModelConfig, ModelSpec, TokenizerConfig
from bert_jax.interop.exchange import ModelBundle, ReadOptions
from bert_jax.interop.hf.config_json import CLASSES, CONFIG_FILE, HfConfig, default_labels, model_parts, read_config
from bert_jax.interop.hf.names import BUFFERS, TIED, hf_names
from bert_jax.interop.hf.tensors import Tensor, open_tensors, read_float32
from bert_jax.interop.stored import FLOATS, check_stored, listed
from bert_jax.interop.tokenizers.folder_files import read_tokenizer_files
from bert_jax.io.untrusted_folder import needed
from bert_jax.tokenization import build_tokenizer

_LAYER = re.compile(r"encoder\.layer\.(\d{1,6})\.")
# Part of a class's name -> head that is called "classifier".
_KINDS = {"SequenceClassification": "sequence", "TokenClassification": "token", "MultipleChoice": "choice"}


def is_hf(path: Path) -> bool:
    """Return True if ``path`` is a folder with Hugging Face's description of a model."""
    return (path / CONFIG_FILE).is_file()


def read_hf(path: Path, options: ReadOptions) -> ModelBundle:
    """Read a Hugging Face folder of BERT or RoBERTa: encoder, all heads whose tensors it has, tokenizer.

    Raises ``ValueError`` in one line: another type of model, damaged files, tensors that are missing, left over or
    of another shape, and (unless ``options.allow_mismatch``) a contradiction between config.json and tensors.
    """
    said = model_parts(read_config(needed(path, CONFIG_FILE)), str(path / CONFIG_FILE))
    found = _Found(path, said, options)
    found.open()
    spec = ModelSpec(model=found.sizes(), heads=found.heads(), family=said.family)
    found.settle()
    params = found.read(spec)
    tokenizer, content, tokenizer_notes = read_tokenizer_files(path, options)
    if tokenizer is not None and content is not None:
        found.notes += check_vocabulary(path, tokenizer, content, spec.model.vocab_size)
        spec = dataclasses.replace(spec, tokenizer=tokenizer)
    origin: dict[str, Any] = {"format": "Hugging Face folder", "name": path.absolute().name}
    if said.architecture:
        origin["class"] = said.architecture
    return ModelBundle(
        spec=spec,
        params=params,
        tokenizer_content=content,
        notes=(*said.notes, *found.notes, *tokenizer_notes),
        origin=origin,
    )


def check_vocabulary(path: Path, config: TokenizerConfig, content: bytes, rows: int) -> list[str]:
    """A vocabulary with more pieces than the model has rows would index past its end."""
    pieces = build_tokenizer(config, content, str(path / config.file)).vocab_size
    if pieces > rows:
        raise ValueError(
            f"{path / config.file}: {pieces} pieces, the model has {rows} word embeddings: it is another model's"
        )
    if pieces < rows:
        return [
            f"the vocabulary has {pieces} pieces, the model {rows} rows: the last {rows - pieces} are never used"
        ]
    return []


@dataclass
class _Found:
    """The tensors of one folder on their way to canonical parameters."""

    path: Path
    said: HfConfig
    options: ReadOptions
    notes: list[str] = field(default_factory=list)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    prefix: str = ""
    # (what, in config.json, in the tensors)
    contradictions: list[tuple[str, Any, Any]] = field(default_factory=list)

    def open(self) -> None:
        """Tensors under today's names: without ``module.``, with weight and bias for gamma and beta."""
        source, stored = open_tensors(self.path)
        for name, tensor in stored.items():
            clean = name.removeprefix("module.")
            clean = re.sub(r"(LayerNorm|layer_norm)\.gamma$", r"\1.weight", clean)
            clean = re.sub(r"(LayerNorm|layer_norm)\.beta$", r"\1.bias", clean)
            if clean.endswith(BUFFERS):
                continue
            if clean in self.tensors:
                raise ValueError(f"{self.path / source}: two tensors are called {clean[:80]!r}")
            if 0 in tensor.shape:
                raise ValueError(f"{self.path / source}: {clean[:80]!r} is empty (shape {tensor.shape})")
            self.tensors[clean] = tensor
        family = f"{self.said.family}."
        self.prefix = family if any(name.startswith(family) for name in self.tensors) else ""

    def has(self, module: str) -> bool:
        return any(name.startswith(f"{module}.") for name in self.tensors)

    def shape(self, name: str, rank: int) -> tuple[int, ...] | None:
        """Shape of a tensor, None where it is absent or of another rank (which is reported later)."""
        tensor = self.tensors.get(name)
        return tensor.shape if tensor is not None and len(tensor.shape) == rank else None

    def sizes(self) -> ModelConfig:
        """The model with the sizes of the tensors; contradictions to config.json are recorded."""
        model, prefix = self.said.model, self.prefix
        self._take_tied_embeddings()
        real: dict[str, int] = {}
        for table, rows in (
            ("word", "vocab_size"), ("position", "max_position_embeddings"), ("token_type", "type_vocab_size")
        ):  # fmt: skip
            shape = self.shape(f"{prefix}embeddings.{table}_embeddings.weight", 2)
            if shape is not None:
                real[rows] = shape[0]
                real.setdefault("hidden_size", shape[1])
        layers = {int(match[1]) for name in self.tensors if (match := _LAYER.match(name.removeprefix(prefix)))}
        if not layers or max(layers) >= len(self.tensors):
            raise ValueError(
                f"{self.path}: the tensors are not those of {self.said.family} layers: {listed(list(self.tensors))}"
            )
        real["num_layers"] = 1 + max(layers)
        shape = self.shape(f"{prefix}encoder.layer.0.intermediate.dense.weight", 2)
        if shape is not None:
            real["intermediate_size"] = shape[0]
        differing = {name: size for name, size in real.items() if size != getattr(model, name)}
        self.contradictions += [(name, getattr(model, name), size) for name, size in differing.items()]
        if not self.options.allow_mismatch:
            return model
        try:
            return dataclasses.replace(model, **differing)
        except ValueError as error:
            raise ValueError(f"{self.path}: the tensors cannot decide: {error}") from None

    def _take_tied_embeddings(self) -> None:
        """Of tied tensors a file may hold only the copy: then that is taken."""
        original = f"{self.prefix}embeddings.word_embeddings.weight"
        weight, bias = TIED[self.said.family]
        kept = weight.replace("decoder.weight", "bias")
        if self.said.tied and original not in self.tensors and weight in self.tensors:
            self.tensors[original] = self.tensors[weight]
            self.notes.append(f"word embeddings taken from {weight}, to which they are tied")
        if kept not in self.tensors and bias in self.tensors:
            self.tensors[kept] = self.tensors.pop(bias)

    def heads(self) -> HeadsConfig:
        """The heads whose tensors are present, with a note on each other head of the class in config.json."""
        roberta = self.said.family == "roberta"
        kind = self._classifier_kind()
        if roberta and kind == "sequence" and self.has(f"{self.prefix}pooler"):
            for name in [name for name in self.tensors if name.startswith(f"{self.prefix}pooler.")]:
                del self.tensors[name]
            self.notes.append("the pooler is left out: a sequence head of RoBERTa has one of its own")
        nsp = self.has("cls.seq_relationship")
        pooler = self.has(f"{self.prefix}pooler") or nsp or kind in ("sequence", "choice")
        mlm = self.has("lm_head") if roberta else self.has("cls.predictions")
        if mlm and roberta and self.said.model.activation != "gelu":
            raise ValueError(
                f"{self.path}: RoBERTa's MLM head always has the activation gelu, and hidden_act is another; "
                "readable are models in which both are gelu"
            )
        labels = self._labels(kind)
        span = self.has("qa_outputs")
        problem = self.said.problem or ("regression" if len(labels) == 1 else "single_label")
        if kind == "sequence" and problem == "regression" and len(labels) > 1:
            raise ValueError(
                f"{self.path}: problem_type regression with {len(labels)} outputs; readable: one output"
            )
        heads = HeadsConfig(
            pooler=pooler,
            mlm=mlm,
            nsp=nsp,
            sequence_labels=labels if kind == "sequence" else (),
            problem=problem if kind == "sequence" else "single_label",
            token_labels=labels if kind == "token" else (),
            span=span,
            choice=kind == "choice",
            dropout=self.said.dropout,
        )
        promised = CLASSES[self.said.architecture] if self.said.architecture else ()
        for name in promised:
            if name not in heads.present():
                what = "pooled output is" if name == "pooler" else f"{name} outputs are"
                self.notes.append(
                    f"{self.said.architecture} has a {name} layer, the tensors have none: {what} left out"
                )
        return heads

    def _classifier_kind(self) -> str | None:
        """sequence, token or choice; None: no tensor is called classifier."""
        if not self.has("classifier"):
            return None
        if self.has("classifier.out_proj"):
            return "sequence"
        told = next((kind for word, kind in _KINDS.items() if word in (self.said.architecture or "")), None)
        if told is None and not self.has(f"{self.prefix}pooler"):
            return "token"  # the other two stand on the pooler
        if told is None:
            classes = ", ".join(name for name in CLASSES if any(kind in name for kind in _KINDS))
            raise ValueError(
                f"{self.path / CONFIG_FILE}: there is a classifier, and architectures does not say of what; "
                f"put its class there: {classes}"
            )
        return told

    def _labels(self, kind: str | None) -> tuple[str, ...]:
        if kind not in ("sequence", "token"):
            return ()
        inner = ".out_proj" if self.has("classifier.out_proj") else ""
        shape = self.shape(f"classifier{inner}.weight", 2)
        said = self.said.labels
        if said is None:
            count = shape[0] if shape is not None else 2
            self.notes.append(f"{CONFIG_FILE} names no labels: {count}, called LABEL_0 and so on")
            return default_labels(count)
        if shape is None or len(said) == shape[0]:
            return said
        self.contradictions.append(("number of labels", len(said), shape[0]))
        return default_labels(shape[0])

    def settle(self) -> None:
        """Raise ``ValueError`` with every contradiction, or note which the tensors decided."""
        if not self.contradictions:
            return
        texts = [
            f"{what} is {said} in {CONFIG_FILE}, {real} in the tensors" for what, said, real in self.contradictions
        ]
        if not self.options.allow_mismatch:
            raise ValueError(f"{self.path}: {'; '.join(texts)}; with --allow_mismatch the tensors decide")
        self.notes += [f"{text}: the tensors decide" for text in texts]

    def read(self, spec: ModelSpec) -> dict[str, np.ndarray]:
        """Read every canonical parameter of ``spec``; a left-over tensor is an error."""
        names = hf_names(spec, self.prefix)
        tied = TIED[self.said.family]
        expected = {entry.name for entry in names.values()}
        left_over = [
            name for name in self.tensors if name not in expected and not (spec.heads.mlm and name in tied)
        ]
        self.notes += check_stored(
            spec,
            names,
            {name: (tensor.shape, tensor.dtype) for name, tensor in self.tensors.items()},
            left_over,
            allow_left_over=self.options.allow_mismatch,
            where=self.path,
            what="tensors",
        )
        return self._read_values(names)

    def _read_values(self, names: dict[str, Any]) -> dict[str, np.ndarray]:
        params: dict[str, np.ndarray] = {}
        bad: list[str] = []
        dtypes: dict[str, int] = {}
        for canonical, entry in names.items():
            tensor = self.tensors[entry.name]
            dtypes[tensor.dtype] = dtypes.get(tensor.dtype, 0) + 1
            params[canonical] = read_float32(tensor, entry.transpose)
            if not np.isfinite(params[canonical]).all():
                bad.append(entry.name)
        stored = ", ".join(dtypes)
        if self.said.dtype is not None and self.said.dtype != stored:
            self.notes.append(f"{CONFIG_FILE} says dtype {self.said.dtype}, the tensors are {stored}: as stored")
        for dtype, count in dtypes.items():
            if dtype != "float32":
                verb = "rounded" if dtype == "float64" else "raised"
                self.notes.append(f"{count} of {len(params)} tensors are {dtype}: {verb} to float32")
        if bad:
            self.notes.append(f"WARNING: NaN or infinite values in {listed(bad)}")
        self._check_tied(params)
        return params

    def _check_tied(self, params: dict[str, np.ndarray]) -> None:
        """An MLM output layer of its own would be another function than the tied one."""
        for name, original in TIED[self.said.family].items():
            tensor = self.tensors.get(name)
            if tensor is None or original not in params:
                continue
            if tensor.shape != params[original].shape or tensor.dtype not in FLOATS:
                same = False
            else:
                same = np.array_equal(read_float32(tensor).view(np.uint32), params[original].view(np.uint32))
            if not same:
                raise ValueError(
                    f"{self.path}: {name} differs from {original}: an untied MLM output layer is not supported; "
                    "remove the MLM head's tensors to read the rest"
                )
        untied = not self.said.tied and "mlm_head/output_bias" in params
        if untied and not any(name in self.tensors for name in TIED[self.said.family] if name.endswith("weight")):
            raise ValueError(
                f"{self.path}: tie_word_embeddings is false, and the output layer of the MLM head is not there; "
                "remove the MLM head's tensors to read the rest"
            )
