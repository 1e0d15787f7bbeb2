"""A model that is ready for use, loaded from a path in any supported format or from the Hugging Face Hub."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn, cast

import numpy as np

from bert_jax import registry
from bert_jax.config import ExecutionConfig, ModelConfig
from bert_jax.config.spec import Pooling
from bert_jax.inference.batching import BatchOptions, Progress
from bert_jax.inference.embed import VectorOptions, embed, vector_width
from bert_jax.inference.engine import Engine, Input, Result, Text
from bert_jax.inference.fill import fill_mask
from bert_jax.inference.forward import forward, outputs_of_texts, token_arrays
from bert_jax.inference.predict import predict
from bert_jax.inference.score import Method, score
from bert_jax.inference.zero_shot import Labels, zero_shot
from bert_jax.interop.model_bundle import ModelBundle, ReadOptions, StoredDtype
from bert_jax.interop.readers import read_weights
from bert_jax.io import elsewhere
from bert_jax.io.errors import did_you_mean
from bert_jax.io.hub import model_path
from bert_jax.io.signatures import methods_name_parameters, names_parameters
from bert_jax.json_values import Json
from bert_jax.process.accelerators import keep_to_cpu_without_accelerator
from bert_jax.process.program_cache import use_program_cache
from bert_jax.tasks.text_classification import probability_table


@methods_name_parameters
class LoadedModel(Engine):
    """A loaded model with a method for each use. ``model.apply({"params": params}, features)`` returns a
    ``BertOutput``.

    A method returns one result for a text, and a list or an array of results for a list or another iterable of
    texts. ``batch_tokens`` is the maximum number of tokens in a batch (None: it depends on the device), and
    ``batch_size`` the maximum number of texts (None: as many as ``batch_tokens`` allows); ``progress`` is called
    with the number of texts that were processed since its last call. Methods raise ``ValueError`` with a one-line
    message for other inputs, and if the model lacks an output layer or a setting that they need.
    """

    def __getattr__(self, name: str) -> NoReturn:
        """Raise ``AttributeError`` with what exists instead of ``name``."""
        known = [*(one for one in vars(LoadedModel) if not one.startswith("_")), "spec", "params", "tokenizer"]
        what = elsewhere.OF_MODEL.get(name, f"it has: {', '.join(known)}")
        hint = "" if name in elsewhere.OF_MODEL else did_you_mean(name, known)
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}{hint}; {what}")

    def __call__(self, *arguments: Json | np.ndarray, **named: Json | np.ndarray) -> NoReturn:
        """Raise ``TypeError`` with the methods to use."""
        methods = "embed, predict, fill_mask, sequence_output or hidden_states, or forward for arrays of ids"
        raise TypeError(f"a {type(self).__name__} is not a function; use {methods}")

    @property
    def config(self) -> ModelConfig:
        """The ``ModelConfig`` of the network, its sizes and variants."""
        return self.spec.model

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes, in the order of :meth:`predict_proba`; for a tagging model, its tags; empty for a
        model without classes."""
        heads = self.spec.heads
        return (
            ()
            if heads.problem == "regression"
            else heads.sequence_labels or heads.pair_labels or heads.token_labels
        )

    # ------------------------------------------------------------------ vectors

    def embed(
        self,
        texts: str | Iterable[str],
        *,
        pooling: Pooling | None = None,
        normalize: bool | None = None,
        width: int | None = None,
        prompt: str | None = None,
        prompt_name: str | None = None,
        dtype: Literal["int8"] | None = None,
        batch_size: int | None = None,
        batch_tokens: int | None = None,
        progress: Progress | None = None,
    ) -> np.ndarray:
        """Return the vector of each text: float32[texts, E]; float32[E] for a single text.

        Args:
            pooling: cls, mean or max over the last layer, without the dense layers of the model. None: pooling and
                dense layers of the model, or the mean if it has none.
            normalize: True: divide vectors by their Euclidean norm. False: do not. None: the setting of the model.
            width: number of first values of each vector to return; if vectors are normalized, these values are
                normalized again. None: all.
            prompt: text to insert before every text.
            prompt_name: name of a prompt of the model. None: the default prompt of the model, unless ``prompt`` is
                set.
            dtype: int8: compute the matrix products of the encoder in 8 bits by onnxruntime on the CPU (extra
                ``onnx``), which is about twice as fast; the vectors differ slightly. None: the dtype of the model.
        """
        options = VectorOptions(pooling, normalize, width, prompt, prompt_name, dtype)
        batches = BatchOptions(batch_tokens, batch_size, progress)
        vectors = _answers(texts, lambda texts: embed(self, texts, options, batches))
        size = vector_width(self.spec, pooling, width)
        return np.array(vectors, np.float32).reshape(-1, size) if isinstance(vectors, list) else vectors

    # The name of this method in sentence-transformers.
    encode = embed

    def sequence_output(
        self, texts: Text | Iterable[Text], *, batch_size: int = 8
    ) -> np.ndarray | list[np.ndarray]:
        """Return the output of the last layer for each text or pair, special tokens included: a list of
        float32[tokens, H]; one array for a single text. ``batch_size`` texts are processed together."""
        return self._outputs(texts, "last_hidden_state", batch_size)

    def pooled_output(self, texts: Text | Iterable[Text], *, batch_size: int = 8) -> np.ndarray:
        """Return the output of the pooler for each text or pair of texts: float32[texts, H]; float32[H] for a
        single text. Arguments as in :meth:`sequence_output`."""
        rows = self._outputs(texts, "pooler_output", batch_size)
        return np.array(rows, np.float32).reshape(-1, self.config.hidden_size) if isinstance(rows, list) else rows

    def hidden_states(self, texts: Text | Iterable[Text], *, batch_size: int = 8) -> np.ndarray | list[np.ndarray]:
        """Return the embeddings and the output of every layer for each text or pair of texts: a list of
        float32[layers + 1, tokens, H]; one array for a single text. Arguments as in :meth:`sequence_output`."""
        return self._outputs(texts, "hidden_states", batch_size)

    def attentions(self, texts: Text | Iterable[Text], *, batch_size: int = 8) -> np.ndarray | list[np.ndarray]:
        """Return the attention probabilities of every layer and head for each text or pair of texts: a list of
        float32[layers, heads, tokens, tokens], whose last axis sums to 1; one array for a single text. Arguments as
        in :meth:`sequence_output`."""
        return self._outputs(texts, "attentions", batch_size)

    def _outputs(self, texts: Text | Iterable[Text], name: str, batch_size: int) -> np.ndarray | list[np.ndarray]:
        return _answers(texts, lambda texts: outputs_of_texts(self, texts, name, batch_size))

    def forward(
        self, inputs: Mapping[str, np.ndarray], *, hidden_states: bool = False, attentions: bool = False
    ) -> dict[str, np.ndarray]:
        """Return every output of the model for arrays of token ids; see ``forward.forward``."""
        return forward(self, inputs, hidden_states=hidden_states, attentions=attentions)

    def tokenize(self, texts: Text | Iterable[Text]) -> dict[str, np.ndarray]:
        """Return ``input_ids``, ``attention_mask`` and ``token_type_ids`` of the texts or pairs of texts for
        :meth:`forward`: int32[texts, tokens], padded to the longest text, special tokens included.
        ``tokenizer.pieces(ids)`` returns the pieces of a row."""
        return token_arrays(self, [texts] if isinstance(texts, str) else _several(texts))

    # ------------------------------------------------------------------ predictions

    def predict(
        self,
        texts: str | Mapping[str, Json] | Iterable[Json],
        *,
        task: str | None = None,
        exit_entropy: float | None = None,
        batch_size: int | None = None,
        batch_tokens: int | None = None,
        progress: Progress | None = None,
    ) -> Any:
        """Return the predictions of the task head: a list of dicts, or one dict for a single text or object. See
        ``predict.predict`` for inputs, ``task``, ``exit_entropy`` and the fields of a prediction."""
        batches = BatchOptions(batch_tokens, batch_size, progress)
        return _answers(
            texts, lambda texts: predict(self, texts, task=task, exit_entropy=exit_entropy, batches=batches)
        )

    def predict_proba(
        self,
        texts: str | Mapping[str, Json] | Iterable[Json],
        *,
        batch_size: int | None = None,
        batch_tokens: int | None = None,
        progress: Progress | None = None,
    ) -> np.ndarray:
        """Return the probability of each of :attr:`classes`: float64[texts, classes]; float64[classes] for a single
        text. The rows sum to 1 except in multi-label classification. Raises ``ValueError`` for a
        model that does not classify texts."""
        heads = self.spec.heads
        if not self.classes or not (heads.sequence_labels or heads.pair_labels):
            raise ValueError(f"{self.name}: no head with classes of texts; use predict")
        found = self.predict(texts, batch_size=batch_size, batch_tokens=batch_tokens, progress=progress)
        table = probability_table(found if isinstance(found, list) else [found], self.classes)
        return table.reshape(-1, len(self.classes)) if isinstance(found, list) else table[0]

    def fill_mask(
        self,
        texts: str | Iterable[str],
        *,
        top: int = 5,
        batch_size: int | None = None,
        batch_tokens: int | None = None,
        progress: Progress | None = None,
    ) -> Any:
        """Return the ``top`` most probable pieces for each mask: a list of ``FilledText``, or one ``FilledText``
        for a single text. See ``fill.fill_mask``."""
        batches = BatchOptions(batch_tokens, batch_size, progress)
        return _answers(texts, lambda texts: fill_mask(self, texts, top=top, batches=batches))

    def score(
        self,
        texts: str | Iterable[str],
        *,
        method: Method | None = None,
        batch_size: int | None = None,
        batch_tokens: int | None = None,
        progress: Progress | None = None,
    ) -> Any:
        """Return the log-probability of texts: a list of ``ScoredText``, or one ``ScoredText`` for a single text.
        See ``score.score`` for ``method``; ``batch_size``, ``batch_tokens`` and ``progress`` count masked copies of
        texts."""
        batches = BatchOptions(batch_tokens, batch_size, progress)
        return _answers(texts, lambda texts: score(self, texts, method=method, batches=batches))

    def zero_shot(
        self,
        texts: str | Iterable[str],
        labels: Labels,
        *,
        template: str | None = None,
        multi_label: bool = False,
        entailment: str | None = None,
        batch_size: int | None = None,
        batch_tokens: int | None = None,
        progress: Progress | None = None,
    ) -> Any:
        """Classify texts with ``labels`` on which the model was not trained. Return a list of dicts, or one dict
        for a single text. See ``zero_shot.zero_shot`` for ``labels``, ``template``, ``multi_label`` and
        ``entailment``; ``batch_size``, ``batch_tokens`` and ``progress`` count pairs of a text and a hypothesis."""
        batches = BatchOptions(batch_tokens, batch_size, progress)

        return _answers(
            texts,
            lambda texts: zero_shot(
                self, texts, labels, template=template, multi_label=multi_label, entailment=entailment,
                batches=batches,
            ),
        )  # fmt: skip

    # ------------------------------------------------------------------ pictures

    def picture(
        self,
        text: Text | None = None,
        *,
        words: Sequence[str] = (),
        layer: int = 1,
        head: int = 1,
        top: int = 5,
        candidates: int = 2000,
    ) -> Any:
        """Return a ``Picture`` of the model that reads a text or a pair of texts: attention, rollout, entropy and
        distance of the heads, the words nearest to each token, and a map of ``words``. A notebook shows it as a
        page, and its method ``save(path)`` writes the page to a file. See
        ``bert_jax.contrib.pictures.picture.picture``."""
        draw = registry.load("extensions", "LoadedModel.picture")
        return draw(self, text, words=words, layer=layer, head=head, top=top, candidates=candidates)

    # ------------------------------------------------------------------ files

    def save(
        self,
        path: str | Path,
        format: str | None = None,
        *,
        force: bool = False,
        report: Callable[[str], None] = print,
    ) -> None:
        """Write the model to the folder ``path``, which :func:`load` reads.

        Args:
            format: None: the format of this library. Other formats: see :meth:`export`, which also compares the
                written folder with the model.
            force: replace a folder that is not empty, but not one that contains the source of this model.
            report: function that is called with each line about a written export.

        Raises ``ValueError`` if the folder is not empty or the format cannot represent the model.
        """
        if format is not None:
            self.export(path, format, verify=False, force=force, report=report)
            return
        from bert_jax.interop.export import replaced_folder
        from bert_jax.interop.saved_model import write_saved

        with replaced_folder(Path(path), force, self._kept) as partial:
            write_saved(partial, self.bundle())

    def save_pretrained(self, path: str | Path, *, force: bool = False) -> None:
        """Write a folder that transformers reads (``from_pretrained``) and, for a model of text vectors, also
        sentence-transformers. Raises ``ValueError`` as :meth:`save` does."""
        self.save(path, "hf" if self.spec.sentence is None else "sentence-transformers", force=force)

    def export(
        self,
        path: str | Path,
        format: str,
        *,
        dtype: StoredDtype = "float32",
        heads: Sequence[str] | None = None,
        width: int | None = None,
        exact_tokenizer: bool = False,
        verify: bool = True,
        peer_python: str | None = None,
        force: bool = False,
        report: Callable[[str], None] = print,
    ) -> None:
        """Write the model to the folder ``path`` in the format of another library, load it there, and report the
        largest difference of each output, as ``bert-jax export`` does. ``bert_jax.interop.export.export_model``
        describes formats and parameters."""
        from bert_jax.interop.export import export_model

        export_model(
            self.bundle(), Path(path), format, dtype=dtype, heads=heads, width=width,
            exact_tokenizer=exact_tokenizer, verify=verify, peer_python=peer_python, force=force, kept=self._kept,
            report=report,
        )  # fmt: skip

    @property
    def _kept(self) -> tuple[tuple[Path, str]]:
        """The path that no export may delete, and its name for messages."""
        return ((Path(self.name), "the source"),)


def _several(texts: Iterable[Input]) -> Iterable[Input]:
    """Return ``texts``. Raises ``ValueError`` unless they are an iterable of several texts."""
    columns = getattr(texts, "columns", None)  # of a data frame, which iterates over their names
    if columns is None and isinstance(texts, Iterable) and not isinstance(texts, bytes | Mapping):
        return texts
    remedy = (
        "give a string or a list of strings"
        if columns is None
        else f"give one column, of {', '.join(map(str, columns))}"
    )
    raise ValueError(f"texts: {type(texts).__name__} is not allowed; {remedy}")


def _answers(texts: Iterable[Input], run: Callable[[Iterable[Input]], Iterator[Result]]) -> Result | list[Result]:
    """Return the result of ``run`` for a single text or object, or the list of results for several."""
    return next(run([cast(Input, texts)])) if isinstance(texts, str | Mapping) else list(run(_several(texts)))


@names_parameters
def load(
    path: str | Path,
    *,
    dtype: Literal["float32", "bfloat16"] = "float32",
    options: ReadOptions | None = None,
) -> LoadedModel:
    """Read a model in any supported format: a workdir or saved model, a Hugging Face or sentence-transformers
    folder, a TF1 checkpoint prefix, or an npz export. A name on the Hugging Face Hub, such as
    "sentence-transformers/all-MiniLM-L6-v2", is downloaded to the cache of huggingface_hub.

    ``dtype`` is the dtype of the computation. Compiled programs are cached for later processes
    (``process.program_cache``). Raises ``ValueError`` with a one-line message for a path without a model, a damaged
    model, or an unsupported ``dtype``.
    """
    if dtype not in ("float32", "bfloat16"):
        hint = "; int8 is a dtype of embed" if dtype == "int8" else ""
        raise ValueError(f"dtype: {dtype!r} is not allowed; use float32 or bfloat16{hint}")
    keep_to_cpu_without_accelerator()
    use_program_cache()
    return prepare(read_weights(model_path(path), options), dtype=dtype, name=str(path))


def prepare(
    weights: ModelBundle, *, dtype: Literal["float32", "bfloat16"] = "float32", name: str = "the model"
) -> LoadedModel:
    """Convert ``weights`` to a :class:`LoadedModel`, whose parameters are on the device."""
    return LoadedModel.of(weights, ExecutionConfig(vocab_multiple=1, dtype=dtype), name)
