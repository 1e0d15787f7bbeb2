"""Reader of Hugging Face folders; the tensors are checked against config.json."""

import dataclasses
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import numpy as np

from bert_jax.config import HeadsConfig, ModelConfig, ModelSpec, TokenizerConfig
from bert_jax.interop.hf.config_json import CONFIG_FILE, HfConfig, model_parts, names_family, read_config
from bert_jax.interop.hf.family import TASK_HEADS
from bert_jax.interop.hf.names import BUFFERS, hf_names, recognized_family
from bert_jax.interop.hf.tensors import open_tensors
from bert_jax.interop.model_bundle import ModelBundle, ReadOptions, check_sizes
from bert_jax.interop.stored_model import FLOATS, StoredModel, Tensor, listed, read_float32
from bert_jax.interop.tokenizers.folder_files import read_tokenizer_files
from bert_jax.io.untrusted_folder import needed
from bert_jax.json_values import Json
from bert_jax.tokenization import build_tokenizer

_UNTIED = "set tie_word_embeddings to false, or remove the tensors of the MLM head"


def is_hf(path: Path) -> bool:
    """Return True if ``path`` is a Hugging Face folder (with a config.json)."""
    return (path / CONFIG_FILE).is_file()


def read_hf(path: Path, options: ReadOptions) -> ModelBundle:
    """Read a Hugging Face folder: encoder, tokenizer, and all heads whose tensors are present.

    Raises ``ValueError`` with a one-line message for other types of models, damaged files, missing or unexpected
    tensors, tensors of the wrong shape, and (unless ``options.allow_mismatch`` is True) a contradiction between
    config.json and the tensors.
    """
    content = read_config(needed(path, CONFIG_FILE))
    family, family_notes = (None, ()) if names_family(content) else _family_of_tensors(path)
    content = content if family is None else {**content, "model_type": family}
    config = model_parts(content, str(path / CONFIG_FILE), allow_unknown=options.allow_mismatch)
    reader = _FolderReader(path, options, config=config)
    reader.open()
    spec = ModelSpec(model=reader.model(), heads=reader.heads(), family=config.model.family)
    reader.settle()
    params = reader.parameters(spec)
    tokenizer, pieces, tokenizer_notes = read_tokenizer_files(path, options)
    origin: dict[str, Json] = {"format": "Hugging Face folder", "name": path.absolute().name}
    if config.architecture:
        origin["class"] = config.architecture
    reader.notes += tokenizer_notes
    notes = (*family_notes, *config.notes, *reader.notes, *activation_notes(spec.heads))
    weights = ModelBundle(spec=spec, params=params, notes=notes, origin=origin)
    return with_tokenizer(weights, path, tokenizer, pieces)


def _family_of_tensors(path: Path) -> tuple[str, tuple[str, ...]]:
    """Return the family of a folder of 2019, whose config.json does not name it, and a note. Raises ``ValueError``
    if the names of the tensors do not determine the family."""
    family, what = recognized_family(open_tensors(path)[1]), "has neither model_type nor architectures"
    if family is None:
        problem = f"{what}, and the names of the tensors do not determine the family"
        raise ValueError(f"{path / CONFIG_FILE}: {problem}; add model_type, such as bert or roberta, to this file")
    return family, (f"{CONFIG_FILE} {what}: the tensor names match {family}",)


def activation_notes(heads: HeadsConfig) -> list[str]:
    """Return a list with a note if the activation of a cross-encoder does not apply to predictions."""
    if not heads.activation or heads.problem == "regression":
        return []
    what = "softmax" if heads.problem == "single_label" else "sigmoid"
    return [
        f"CrossEncoder.predict has the activation {heads.activation}, which exports keep; the scores of predict "
        f"are probabilities ({what})"
    ]


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
    if weights.spec.model.type_vocab_size < 2:
        tokenizer = dataclasses.replace(tokenizer, pair_types=True)  # the model has one type anyway
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
            clean = self.config.family.rename(clean)
            if clean.endswith(BUFFERS):
                continue
            if clean in self.tensors:
                raise ValueError(f"{self.path / source}: two tensors have the name {clean[:80]!r}")
            if 0 in tensor.shape:
                raise ValueError(f"{self.path / source}: {clean[:80]!r} is empty (shape {tensor.shape})")
            self.tensors[clean] = tensor
        family = self.config.family
        self.tensors = family.convert(self.tensors)
        self.prefix = family.prefix if self.has(family.prefix) else ""
        self._take_tied_embeddings()

    def _take_tied_embeddings(self) -> None:
        """If the word embeddings or the MLM output bias are missing, use the tensor that is tied to them."""
        family = self.config.family
        original = family.sizes(self.prefix)["vocab_size"][0]
        for copy, canonical in family.tied.items():
            if canonical.startswith("embeddings/"):
                if self.config.model.tied_output and original not in self.tensors and copy in self.tensors:
                    self.tensors[original] = self.tensors[copy]
                    self.notes.append(f"word embeddings are read from {copy}, to which they are tied")
                continue
            kept = f"{family.heads['mlm']['mlm_head']}.bias"
            # transformers ties the two biases only with the weights; if they are apart, the copy is the one in use.
            apart = not self.config.model.tied_output and copy in self.tensors
            if copy in self.tensors and (kept not in self.tensors or apart):
                self.tensors[kept] = self.tensors.pop(copy)

    def model(self) -> ModelConfig:
        """Return the model config after comparing it with the sizes of the tensors (:meth:`sizes`)."""
        family = self.config.family
        layer = re.compile(re.escape(self.prefix + family.layer).replace(r"\{i\}", r"(\d{1,6})"))
        return self.sizes(self.config.model, family.sizes(self.prefix), layer if layer.groups else None)

    def heads(self) -> HeadsConfig:
        """Return the heads whose tensors are present. Add a note for every head of the transformers class whose
        tensors are missing."""
        family = self.config.family
        found = self._present()
        kind = next((head for head in found if head in TASK_HEADS), None)
        labels = self._class_names(kind) if kind in ("sequence", "token") else ()
        problem = self.config.problem or ("regression" if len(labels) == 1 else "single_label")
        if kind == "sequence" and problem == "regression" and len(labels) > 1:
            outputs = f"the classifier has {len(labels)} outputs"
            raise ValueError(f"{self.path}: problem_type is regression, but {outputs}; regression needs one output")
        pooler = self._pooler()
        own = next((head for head in found if "pooler" in family.heads[head]), None)
        has_pooler = any(map(self.has, pooler))
        is_idle = any(set(family.classes[name]) - {"pooler"} == set(found) for name in family.idle_pooler)
        if has_pooler and (own or is_idle):
            self.tensors = {n: tensor for n, tensor in self.tensors.items() if not n.startswith(pooler)}
            why = f"the {own} head of {family.title} has its own dense layer" if own else "no output depends on it"
            self.notes.append(f"the pooler is omitted: {why}")
            has_pooler = False
        needs = {head for heads in family.classes.values() if "pooler" in heads for head in heads if head in found}
        heads = HeadsConfig(
            pooler=has_pooler or bool(needs - {"mlm"}),
            mlm="mlm" in found,
            nsp="nsp" in found,
            rtd="rtd" in found,
            sequence_labels=labels if kind == "sequence" else (),
            problem=problem if kind == "sequence" else "single_label",
            activation=self.config.activation if kind == "sequence" else "",
            token_labels=labels if kind == "token" else (),
            span="span" in found,
            choice=kind == "choice",
            dropout=self.config.dropouts.get(kind or TASK_HEADS[0]),
        )
        known = self.config.architecture
        for name in family.classes[known] if known else ():
            if name not in heads.present():
                what = "pooled output is" if name == "pooler" else f"{name} outputs are"
                self.notes.append(f"{known} has a {name} layer, but its tensors are missing: {what} omitted")
        return heads

    def _pooler(self) -> tuple[str, ...]:
        """Return the prefixes of the tensors of the encoder's own pooler."""
        modules = self.config.family.heads.get("pooler", {}).values()
        return tuple(f"{module.format(prefix=self.prefix)}." for module in modules)

    def _present(self) -> list[str]:
        """Return the heads whose output layers are among the tensors, at most one for each stored layer."""
        family, found, used = self.config.family, list[str](), set[str]()
        owners: dict[str, list[str]] = {}
        for head in family.heads:
            if head != "pooler":
                owners.setdefault(family.output_layer(head), []).append(head)
        # "classifier.out_proj" before "classifier", whose tensors begin alike.
        for module in sorted(owners, key=len, reverse=True):
            names = {name for name in self.tensors if name.startswith(f"{module}.")} - used
            if names:
                head = self._owner(module, owners[module])
                own = tuple(f"{place}." for place in family.heads[head].values())
                used |= {name for name in self.tensors if name.startswith(own)}
                found.append(head)
        if "mlm" not in found and self._has_tied_output():
            found.insert(0, "mlm")
        return found

    def _has_tied_output(self) -> bool:
        """Return True if the class of the model has an MLM head whose output layer has no parameters,
        and the other layers of the head are among the tensors."""
        model, family, known = self.config.model, self.config.family, self.config.architecture
        has_own = model.has_bias("mlm_output") or not model.tied_output
        if known is None or "mlm" not in family.classes[known] or has_own:
            return False
        others = {*family.heads["mlm"].values()} - {family.output_layer("mlm")}
        return model.mlm_layer == "none" or all(self.has(f"{module}.") for module in others)

    def _owner(self, module: str, heads: list[str]) -> str:
        """Return the head to which the layer ``module`` belongs."""
        family, known = self.config.family, self.config.architecture
        if len(heads) == 1:
            return heads[0]
        stated = [head for head in heads if known and head in family.classes[known]]
        if stated:
            return stated[0]
        own = {head: [f"{place}." for place in family.heads[head].values()] for head in heads}
        complete = [head for head in heads if all(map(self.has, own[head]))]
        most = max((len(own[head]) for head in complete), default=0)
        fullest = [head for head in complete if len(own[head]) == most]
        if len(fullest) == 1:
            return fullest[0]
        pooler = self._pooler()
        if "token" in heads and pooler and not any(map(self.has, pooler)):
            return "token"  # the other heads need the pooler
        classes = ", ".join(name for name, held in family.classes.items() if set(held) & set(heads))
        file = self.path / CONFIG_FILE
        raise ValueError(
            f"{file}: architectures does not determine the kind of {module}; set it to one of {classes}"
        )

    def _class_names(self, kind: str) -> tuple[str, ...]:
        shape = self.shape(f"{self.config.family.output_layer(kind)}.weight")
        labels = self.config.labels
        return self.labels(labels, shape[0] if shape is not None else len(labels or "01"))

    def parameters(self, spec: ModelSpec) -> dict[str, np.ndarray]:
        """Return every canonical parameter of ``spec``. Raises ``ValueError`` if a tied copy differs from its
        original."""
        check_sizes(spec, {name: tensor.shape for name, tensor in self.tensors.items()}, self.path)
        names, tied = hf_names(spec, self.prefix), self.config.family.tied
        stored_names = {entry.name for entry in names.values()}
        copies = {name: ours for name, ours in tied.items() if name not in stored_names}
        omitted = [n for n in self.tensors if n.startswith(self.config.family.omitted) and n not in stored_names]
        if omitted:
            self.notes.append(
                f"tensors that no class of {self.config.family.title} has are omitted: {listed(omitted)}"
            )
        params = self.read(spec, names, [*omitted, *(copies if spec.heads.mlm else ())])
        stored = ", ".join(dict.fromkeys(self.tensors[entry.name].dtype for entry in names.values()))
        if self.config.dtype not in (None, stored):
            self.notes.append(f"{CONFIG_FILE} states the dtype {self.config.dtype}, but the tensors are {stored}")
        for name, original in copies.items():
            if name in self.tensors and original in params and not _is_equal(self.tensors[name], params[original]):
                raise ValueError(f"{self.path}: {name} differs from {original}, to which it is tied; {_UNTIED}")
        return params


def _is_equal(copy: Tensor, original: np.ndarray) -> bool:
    """Return True if the tied tensor ``copy`` is bitwise equal to ``original`` after conversion to float32."""
    if copy.shape != original.shape or copy.dtype not in FLOATS:
        return False
    return np.array_equal(read_float32(copy).view(np.uint32), original.view(np.uint32))
