"""A loaded model with its tokenizer and compiled programs, shared by all functions of this package."""

import itertools
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self, TypeVar, cast

import jax
import numpy as np
from flax import traverse_util

from bert_jax.config import ExecutionConfig, ModelSpec
from bert_jax.inference.batching import (
    BatchOptions,
    DeviceOutputs,
    Outputs,
    Packed,
    Program,
    Progress,
    Shape,
    Stages,
    only_row,
    pack_batch,
    packed_batches,
    row_lengths,
    run_packed,
    run_stages,
)
from bert_jax.interop.model_bundle import ModelBundle
from bert_jax.io.text_lines import Each
from bert_jax.model import BertModel
from bert_jax.model.canonical import Params
from bert_jax.tasks.task import Encoded, ModelInput, Target
from bert_jax.tokenization import Tokenizer, build_tokenizer

if TYPE_CHECKING:
    from bert_jax.inference.onnx_network import OnnxNetwork

# A text or a pair of texts.
Text = str | tuple[str, str]
Input = TypeVar("Input")
Result = TypeVar("Result")
# Number of texts that are read and sorted by length together.
WINDOW = 4096
INPUTS_PER_ROW = 8
# Tokens of one batch: few enough for the caches of a CPU, enough to fill any other device.
_CPU_TOKENS, _TOKENS = 1024, 16384
_INT8 = "encoder in 8 bits"
_SMALL = 8  # a few short texts run in a batch of 1/8 of the tokens


def checked_texts(texts: Iterable[Input], *, pairs: bool = False) -> Iterator[Input]:
    """Return an iterator over ``texts``, unchanged. It raises ``ValueError`` for an input that is not a text. If
    ``pairs`` is True, pairs of texts are allowed too."""
    numbers = itertools.count()

    def checked(value: Input) -> Input:
        number = next(numbers)
        parts = value if pairs and isinstance(value, tuple | list) and len(value) == 2 else (value,)
        if not all(isinstance(part, str) for part in parts):
            allowed = "texts and pairs of texts" if pairs else "texts"
            raise ValueError(
                f"input {number}: {type(value).__name__} {str(value)[:40]!r} is not allowed; use {allowed}"
            )
        return value

    return Each(texts, checked)


def text_in(value: object) -> str:
    """Return the first text in ``value``, an input of :meth:`Engine.windows`; empty if it has none."""
    if isinstance(value, str):
        return value
    if isinstance(value, tuple | list):
        return next(filter(None, map(text_in, value)), "")
    record = getattr(value, "record", value)
    return str(getattr(record, "text", "") or " ".join(getattr(record, "words", ())))


def is_finite(outputs: Mapping[str, np.ndarray]) -> bool:
    """Return True if no array has NaN or infinite values."""
    return all(np.isfinite(values).all() for values in outputs.values())


def not_finite(loaded: "Engine", text: str) -> ValueError:
    """Return the error for NaN or infinite outputs for ``text``."""
    remedy = "compute in float32" if loaded.model.execution.dtype != "float32" else "use another model"
    return ValueError(f"{loaded.name}: NaN or infinite outputs for {text}; {remedy}")


@dataclass(repr=False)
class Engine:
    """Spec, network, parameters (on the device, in the layout of the network), tokenizer and compiled programs of a
    model."""

    spec: ModelSpec
    model: BertModel
    params: Params
    tokenizer: Tokenizer | None
    # Notes of the reader of the model format.
    notes: tuple[str, ...] = ()
    name: str = "the model"
    # Content of the file that spec.tokenizer names, and the origin of the weights; see ``ModelBundle``.
    tokenizer_content: bytes | None = None
    origin: Mapping[str, Any] = field(default_factory=dict)
    _programs: dict[Hashable, Callable[..., Any]] = field(default_factory=dict)

    @classmethod
    def of(cls, weights: ModelBundle, execution: ExecutionConfig, name: str) -> Self:
        """Return the engine for ``weights``, whose parameters are then on the device. On a CPU they may share
        memory with the arrays of ``weights``, which must not be changed afterwards."""
        spec, tokenizer = weights.spec, None
        on_device = jax.device_put(dict(weights.params))  # jnp.asarray would compile a program for each shape
        if spec.tokenizer is not None and weights.tokenizer_content is not None:
            tokenizer = build_tokenizer(spec.tokenizer, weights.tokenizer_content, spec.tokenizer.file)
        return cls(
            spec=spec,
            model=BertModel(spec.model, execution, spec.heads, spec.sentence),
            params=traverse_util.unflatten_dict(on_device, sep="/"),
            tokenizer=tokenizer,
            notes=weights.notes,
            name=name,
            tokenizer_content=weights.tokenizer_content,
            origin=weights.origin,
        )

    def __getstate__(self) -> dict[str, Any]:
        """Return the fields to pickle or copy: all but the compiled programs."""
        return self.__dict__ | {"_programs": {}}

    def bundle(self) -> ModelBundle:
        """Return the model in the form that every writer accepts, and from which a run can start. On a CPU the
        arrays are those of the model."""
        params = traverse_util.flatten_dict(self.params, sep="/")
        return ModelBundle(
            spec=self.spec,
            params={name: np.asarray(values) for name, values in params.items()},
            tokenizer_content=self.tokenizer_content,
            origin=self.origin,
        )

    def __repr__(self) -> str:
        """Return a few lines about the model: family, sizes, vocabulary, maximum length, heads or vectors."""
        spec, model, tokenizer = self.spec, self.spec.model, self.tokenizer
        parameters = sum(values.size for values in jax.tree.leaves(self.params))
        sizes = (
            f"{spec.family}, {model.num_layers} layer{'s' * (model.num_layers != 1)} of width {model.hidden_size}"
        )
        lines = [f"{type(self).__name__}({self.name!r}): {sizes}, {parameters:,} parameters"]
        pieces = "no vocabulary" if tokenizer is None else f"{tokenizer.vocab_size:,} pieces ({tokenizer.kind})"
        lines.append(f"  {pieces}; texts of at most {spec.max_length:,} tokens")
        heads = spec.heads
        labels = heads.sequence_labels or heads.pair_labels or heads.token_labels
        shown = ", ".join(label[:20] for label in labels[:5]) + (
            f", ... ({len(labels)})" if len(labels) > 5 else ""
        )
        what = [f"task: {spec.task.kind}"] if spec.task is not None else []
        what += [f"heads: {', '.join(heads.present()) or 'none'}"] + ([f"classes: {shown}"] if labels else [])
        if spec.sentence is not None:
            steps = [*spec.sentence.pooling, *(module.kind for module in spec.sentence.modules)]
            what.append(f"vectors: {', '.join(steps)}, width {spec.sentence.vector_width(model.hidden_size)}")
        return "\n".join([*lines, f"  {'; '.join(what)}"])

    def need_tokenizer(self) -> Tokenizer:
        """Return the tokenizer. Raises ``ValueError`` for a model without one."""
        if self.tokenizer is None:
            raise ValueError(f"{self.name}: no vocabulary, so the model accepts only ids; use bert-jax forward")
        return self.tokenizer

    def model_inputs(self, texts: Sequence[Text]) -> list[Encoded]:
        """Return the model inputs of texts and pairs, truncated to the maximum length of the model."""
        tokenizer = self.need_tokenizer()
        firsts = tokenizer.encode_batch([text if isinstance(text, str) else text[0] for text in texts])
        pairs = [i for i, text in enumerate(texts) if not isinstance(text, str)]
        seconds = dict(zip(pairs, tokenizer.encode_batch([texts[i][1] for i in pairs]), strict=True))
        return [self.build(first, seconds.get(i)) for i, first in enumerate(firsts)]

    def build(self, a: Sequence[int], b: Sequence[int] | None = None, max_length: int | None = None) -> Encoded:
        """Return the model input for a text with the token ids ``a``, or for a pair of texts with the token ids
        ``a`` and ``b``, truncated to ``max_length`` (None: the maximum length of the model)."""
        ids, types = self.need_tokenizer().build_inputs(a, b, max_length or self.spec.max_length)
        return Encoded(ids, types if self.spec.model.type_vocab_size > 1 else [0] * len(ids))

    def encoder_in_8_bits(self) -> "OnnxNetwork":
        """Return the encoder as a program of onnxruntime with 8-bit products, which is made at the first call; see
        ``onnx_network.encoder_in_8_bits``."""
        from bert_jax.inference.onnx_network import encoder_in_8_bits

        if _INT8 not in self._programs:
            self._programs[_INT8] = encoder_in_8_bits(self.bundle(), self.need_tokenizer().pad_id, self.name)
        return cast("OnnxNetwork", self._programs[_INT8])

    def program(
        self, key: Hashable, function: Callable[..., Result], donated: tuple[int, ...] = ()
    ) -> Callable[..., Result]:
        """Return the compiled ``function(params, ...)``, which is cached under ``key``. The memory of the
        ``donated`` arguments, by number, is used for the results.

        Products of float32 matrices are computed in float32 on every device (by default, accelerators round the
        operands)."""
        if key not in self._programs:
            exact = self.model.execution.dtype == "float32"

            def traced(*arguments: Any) -> Result:
                with jax.default_matmul_precision("float32" if exact else "default"):
                    return function(*arguments)

            self._programs[key] = jax.jit(traced, donate_argnums=donated)
        return self._programs[key]

    def windows(
        self,
        inputs: Iterable[Input],
        featurize: Callable[[list[Input]], list[ModelInput]],
        run: Callable[..., DeviceOutputs] | Stages,
        *arguments: np.ndarray | np.generic,
        sequences: Callable[[Sequence[ModelInput]], int] = lambda units: 1,
        targets: Mapping[str, Target] | None = None,
        window: int = WINDOW,
        batches: BatchOptions = BatchOptions(),
    ) -> Iterator[tuple[list[Input], list[ModelInput], list[Outputs]]]:
        """Process ``inputs``, which may be endless, in windows of ``window`` inputs. For each window, yield its
        inputs, their model inputs, and the outputs of each model input.

        Args:
            featurize: function that converts the inputs of a window to model inputs, in order.
            run: ``run(params, features, *arguments)``, a program whose outputs are arrays by level and name, or the
                stages of one.
            sequences: function that returns K, the number of sequences per input, for the model inputs of a window.
            targets: targets of the model inputs that the program reads.
            batches: see ``BatchOptions``.

        Raises ``ValueError``, which names the first input, for an output with a NaN or infinite value.
        """
        is_cpu = jax.default_backend() == "cpu"
        tokens = batches.batch_tokens or (_CPU_TOKENS if is_cpu else _TOKENS)
        reading, is_first = iter(inputs), True

        def on_device(program: Callable[..., DeviceOutputs]) -> Program:
            return lambda features: program(self.params, features, *arguments)

        while part := list(itertools.islice(reading, window)):
            units = featurize(part)
            # Later windows keep to the shapes of the first one, which are compiled.
            count = sequences(units) if units else 1
            pack = self._packing(count, tokens, batches.batch_size, targets or {}, is_cpu and is_first)
            is_first = False

            def run_all(
                units: Sequence[ModelInput], progress: Progress | None = None, pack: Any = pack
            ) -> list[Outputs]:
                if isinstance(run, Stages):
                    programs = [on_device(program) for program in run.programs]
                    return run_stages(programs, run.is_final, units, pack, progress)
                return run_packed(on_device(run), units, pack(units, {}), progress)

            outputs = run_all(units, batches.progress)
            bad = [i for i, output in enumerate(outputs) if not is_finite(output)]
            if bad:
                # The others in its row are not finite either, so each is run alone.
                first = next((i for i in bad if not is_finite(run_all(units[i : i + 1])[0])), bad[0])
                record, own = units[first].record, getattr(part[0], "own", part)  # predict's inputs come in chunks
                text = text_in(own[record])[:40] if record < len(own) else ""
                raise not_finite(self, repr(text) if text else f"input {record}")
            yield part, units, outputs

    def _packing(
        self, sequences: int, tokens: int, most: int | None, targets: Mapping[str, Target], may_be_small: bool
    ) -> Callable[[Sequence[ModelInput], Mapping[str, Target]], Iterable[Packed]]:
        """Return a function of model inputs (at most ``sequences`` sequences) and further targets.

        It packs them into batches of about ``tokens`` tokens and at most ``most`` inputs or, if ``may_be_small``,
        into a batch of one row if one row suffices."""
        longest = max(self.spec.max_length, self.spec.task_length)
        ladder, pad_id = row_lengths(longest * sequences), self.need_tokenizer().pad_id
        # Blocks begin with the row, so each sequence needs its own.
        per_row = 1 if self.spec.model.attention_block else min(INPUTS_PER_ROW, most or INPUTS_PER_ROW)

        def sizes(length: int, _: int) -> Sequence[int]:
            size = max(1, tokens // length)
            size = size if most is None else min(size, most // per_row)
            return (max(1, size // _SMALL), size) if length == ladder[0] else (size,)

        def pack(units: Sequence[ModelInput], more: Mapping[str, Target]) -> Iterable[Packed]:
            both = {**targets, **more}
            if may_be_small and (length := only_row([unit.length for unit in units], ladder[-1], per_row)):
                row, shape = range(len(units)), Shape(1, length, per_row)
                return [pack_batch(units, [row], shape, pad_id=pad_id, sequences=sequences, targets=both)]
            return packed_batches(units, ladder, per_row, sizes, pad_id=pad_id, sequences=sequences, targets=both)

        return pack
