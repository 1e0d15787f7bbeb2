"""Reader of Hugging Face folders of BERT and RoBERTa; the tensors are checked against config.json."""

import dataclasses
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from bert_jax.config import HeadsConfig, ModelConfig, ModelSpec, TokenizerConfig
from bert_jax.interop.exchange import ModelBundle, ReadOptions
from bert_jax.interop.hf.config_json import CLASSES, CONFIG_FILE, HfConfig, model_parts, names_family, read_config
from bert_jax.interop.hf.names import BUFFERS, TIED, hf_names, recognized_family
from bert_jax.interop.hf.tensors import open_tensors
from bert_jax.interop.stored import FLOATS, StoredModel, Tensor, read_float32
from bert_jax.interop.tokenizers.folder_files import read_tokenizer_files
from bert_jax.io.untrusted_folder import needed
from bert_jax.tokenization import build_tokenizer

_LAYER = re.compile(r"(?:bert\.|roberta\.)?encoder\.layer\.(\d{1,6})\.")
_UNTIED = "an untied MLM output layer is not supported; remove the tensors of the MLM head to read the rest"
# Part of the name of a class -> head whose layer is named "classifier".
_KINDS = {"SequenceClassification": "sequence", "TokenClassification": "token", "MultipleChoice": "choice"}


def is_hf(path: Path) -> bool:
    """Return True if ``path`` is a Hugging Face folder (with a config.json)."""
    return (path / CONFIG_FILE).is_file()


def read_hf(path: Path, options: ReadOptions) -> ModelBundle:
    """Read a Hugging Face folder of BERT or RoBERTa: encoder, tokenizer, and all heads whose tensors are present.

    Raises ``ValueError`` with a one-line message for other types of models, damaged files, missing or unexpected
    tensors, tensors of the wrong shape, and (unless ``options.allow_mismatch`` is True) a contradiction between
    config.json and the tensors.
    """
    content = read_config(needed(path, CONFIG_FILE))
    family, family_notes = (None, ()) if names_family(content) else _family_of_tensors(path)
    config = model_parts(content if family is None else {**content, "model_type": family}, str(path / CONFIG_FILE))
    reader = _FolderReader(path, options, config=config)
    reader.open()
    spec = ModelSpec(model=reader.model(), heads=reader.heads(), family=config.family)
    reader.settle()
    params = reader.parameters(spec)
    tokenizer, pieces, tokenizer_notes = read_tokenizer_files(path, options)
    origin: dict[str, Any] = {"format": "Hugging Face folder", "name": path.absolute().name}
    if config.architecture:
        origin["class"] = config.architecture
    reader.notes += tokenizer_notes
    weights = ModelBundle(
        spec=spec, params=params, notes=(*family_notes, *config.notes, *reader.notes), origin=origin
    )
    return with_tokenizer(weights, path, tokenizer, pieces)


def _family_of_tensors(path: Path) -> tuple[str, tuple[str, ...]]:
    """Return the family of a folder of 2019, whose config.json does not name it, and a note. Raises ``ValueError``
    if the names of the tensors do not determine the family."""
    family, what = recognized_family(open_tensors(path)[1]), "has neither model_type nor architectures"
    if family is None:
        problem = f"{what}, and the names of the tensors do not determine the family"
        raise ValueError(f"{path / CONFIG_FILE}: {problem}; add model_type (bert or roberta) to this file")
    return family, (f"{CONFIG_FILE} {what}: the names of the tensors are those of {family}",)


def with_tokenizer(
    weights: ModelBundle, folder: Path, tokenizer: TokenizerConfig | None, content: bytes | None
) -> ModelBundle:
    """Return ``weights`` with the tokenizer of ``folder``. Add a note if the tokenizer has fewer pieces than the
    model has word embeddings.

    Raises ``ValueError`` if the tokenizer has more pieces than the model has word embeddings.
    """
    if tokenizer is None or content is None:
        return weights
    file, rows = folder / tokenizer.file, weights.spec.model.vocab_size
    pieces, notes = build_tokenizer(tokenizer, content, str(file)).vocab_size, weights.notes
    if pieces > rows:
        remedy = "use the vocabulary of this model"
        raise ValueError(f"{file}: {pieces} pieces, but the model has {rows} word embeddings; {remedy}")
    if pieces < rows:
        unused = f"the last {rows - pieces} are never used"
        notes = (*notes, f"the vocabulary has {pieces} pieces, the model {rows} word embeddings: {unused}")
    spec = dataclasses.replace(weights.spec, tokenizer=tokenizer)
    return dataclasses.replace(weights, spec=spec, tokenizer_content=content, notes=notes)


@dataclass
class _FolderReader(StoredModel):
    """Reader of the tensors of one Hugging Face folder."""

    what: ClassVar[str] = "tensors"
    config_file: ClassVar[str] = CONFIG_FILE

    config: HfConfig = field(kw_only=True)
    # Prefix of the names of the encoder tensors: the family and a dot, or empty.
    prefix: str = ""

    def open(self) -> None:
        """Collect the tensors under the names that current versions of transformers use.

        The prefix ``module.`` is removed, and gamma and beta of a LayerNorm are renamed to weight and bias.
        """
        source, stored = open_tensors(self.path)
        for name, tensor in stored.items():
            clean = name.removeprefix("module.")
            clean = re.sub(r"(LayerNorm|layer_norm)\.gamma$", r"\1.weight", clean)
            clean = re.sub(r"(LayerNorm|layer_norm)\.beta$", r"\1.bias", clean)
            if clean.endswith(BUFFERS):
                continue
            if clean in self.tensors:
                raise ValueError(f"{self.path / source}: two tensors have the name {clean[:80]!r}")
            if 0 in tensor.shape:
                raise ValueError(f"{self.path / source}: {clean[:80]!r} is empty (shape {tensor.shape})")
            self.tensors[clean] = tensor
        family = f"{self.config.family}."
        self.prefix = family if self.has(family) else ""
        self._take_tied_embeddings()

    def _take_tied_embeddings(self) -> None:
        """If the word embeddings or the MLM output bias are missing, use the tensor that is tied to them."""
        original = f"{self.prefix}embeddings.word_embeddings.weight"
        weight, bias = TIED[self.config.family]
        kept = weight.replace("decoder.weight", "bias")
        if self.config.tied and original not in self.tensors and weight in self.tensors:
            self.tensors[original] = self.tensors[weight]
            self.notes.append(f"word embeddings are read from {weight}, to which they are tied")
        if kept not in self.tensors and bias in self.tensors:
            self.tensors[kept] = self.tensors.pop(bias)

    def model(self) -> ModelConfig:
        """Return the model config after comparing it with the sizes of the tensors (:meth:`sizes`)."""
        prefix = self.prefix
        table, width = f"{prefix}embeddings.{{}}_embeddings.weight", "encoder.layer.0.intermediate.dense.weight"
        return self.sizes(self.config.model, table, _LAYER, (f"{prefix}{width}", 0))

    def heads(self) -> HeadsConfig:
        """Return the heads whose tensors are present. Add a note for every head of the transformers class whose
        tensors are missing."""
        roberta, pooler_prefix = self.config.family == "roberta", f"{self.prefix}pooler."
        kind = self._classifier_kind()
        if roberta and kind == "sequence" and self.has(pooler_prefix):
            self.tensors = {n: tensor for n, tensor in self.tensors.items() if not n.startswith(pooler_prefix)}
            self.notes.append("the pooler is omitted: the sequence head of RoBERTa has its own dense layer")
        nsp = self.has("cls.seq_relationship.")
        mlm = self.has("lm_head." if roberta else "cls.predictions.")
        if mlm and roberta and self.config.model.activation != "gelu":
            raise ValueError(
                f"{self.path}: the MLM head of RoBERTa always uses gelu, but hidden_act selects "
                f"{self.config.model.activation}"
            )
        labels = self._class_names() if kind in ("sequence", "token") else ()
        problem = self.config.problem or ("regression" if len(labels) == 1 else "single_label")
        if kind == "sequence" and problem == "regression" and len(labels) > 1:
            outputs = f"the classifier has {len(labels)} outputs"
            raise ValueError(f"{self.path}: problem_type is regression, but {outputs}; allowed: one output")
        heads = HeadsConfig(
            pooler=self.has(pooler_prefix) or nsp or kind in ("sequence", "choice"),
            mlm=mlm,
            nsp=nsp,
            sequence_labels=labels if kind == "sequence" else (),
            problem=problem if kind == "sequence" else "single_label",
            token_labels=labels if kind == "token" else (),
            span=self.has("qa_outputs."),
            choice=kind == "choice",
            dropout=self.config.dropout,
        )
        known = self.config.architecture
        for name in CLASSES[known] if known else ():
            if name not in heads.present():
                what = "pooled output is" if name == "pooler" else f"{name} outputs are"
                self.notes.append(f"{known} has a {name} layer, but its tensors are missing: {what} omitted")
        return heads

    def _classifier_kind(self) -> str | None:
        """Return the head to which the layer "classifier" belongs: sequence, token or choice. Return None if there
        is no such layer."""
        if not self.has("classifier."):
            return None
        if self.has("classifier.out_proj."):
            return "sequence"
        known = next((kind for word, kind in _KINDS.items() if word in (self.config.architecture or "")), None)
        if known is None and not self.has(f"{self.prefix}pooler."):
            return "token"  # the other two heads need the pooler
        if known is None:
            classes = ", ".join(name for name in CLASSES if any(kind in name for kind in _KINDS))
            file = self.path / CONFIG_FILE
            raise ValueError(f"{file}: architectures does not determine the kind of classifier; allowed: {classes}")
        return known

    def _class_names(self) -> tuple[str, ...]:
        inner = ".out_proj" if self.has("classifier.out_proj.") else ""
        shape, labels = self.shape(f"classifier{inner}.weight"), self.config.labels
        return self.labels(labels, shape[0] if shape is not None else len(labels or "01"))

    def parameters(self, spec: ModelSpec) -> dict[str, np.ndarray]:
        """Return every canonical parameter of ``spec``. Raises ``ValueError`` if a tied copy differs from its
        original."""
        names, tied = hf_names(spec, self.prefix), TIED[self.config.family]
        params = self.read(spec, names, tied if spec.heads.mlm else ())
        stored = ", ".join(dict.fromkeys(self.tensors[entry.name].dtype for entry in names.values()))
        if self.config.dtype not in (None, stored):
            self.notes.append(f"{CONFIG_FILE} states the dtype {self.config.dtype}, but the tensors are {stored}")
        for name, original in tied.items():
            if name in self.tensors and original in params and not _is_equal(self.tensors[name], params[original]):
                raise ValueError(f"{self.path}: {name} differs from {original}: {_UNTIED}")
        untied = not self.config.tied and "mlm_head/output_bias" in params
        if untied and not any(name in self.tensors for name in tied if name.endswith("weight")):
            raise ValueError(f"{self.path}: tie_word_embeddings is false: {_UNTIED}")
        return params


def _is_equal(copy: Tensor, original: np.ndarray) -> bool:
    """Return True if the tied tensor ``copy`` is bitwise equal to ``original`` after conversion to float32."""
    if copy.shape != original.shape or copy.dtype not in FLOATS:
        return False
    return np.array_equal(read_float32(copy).view(np.uint32), original.view(np.uint32))
