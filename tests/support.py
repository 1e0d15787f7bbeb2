"""What several tests share: a tiny config, its batches, a source of batches without files."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import numpy as np
from builders import content, words

from bert_jax.batch import BatchInfo, RowShape, feature_shapes
from bert_jax.config import DataConfig, PretrainConfig, load_config
from bert_jax.training.logging.metrics_file import TIMING_KEYS

TINY = (
    "--model.vocab_size 211 --model.hidden_size 32 --model.num_layers 1 --model.num_attention_heads 4 "
    "--model.intermediate_size 64 --model.max_position_embeddings 64 --data.seq_length 16 "
    "--data.max_predictions 4 --optimizer.learning_rate 1e-3 --optimizer.warmup_steps 4 "
    "--training.num_steps 20 --training.global_batch_size 8 --training.log_interval 2 "
    "--training.checkpoint_interval 5 --training.compilation_cache none"
)


def tiny_config(*arguments: str) -> PretrainConfig:
    """A model of a few thousand parameters; ``arguments`` override it."""
    return load_config(PretrainConfig, " ".join([TINY, *arguments]).split())


def random_batch(config: PretrainConfig, seed: int = 0, rows: int | None = None) -> dict[str, np.ndarray]:
    """A batch with padding of unequal length and unequal numbers of masked positions."""
    rng = np.random.default_rng(seed)
    count = rows or config.training.global_batch_size
    length, masks, vocab = config.data.seq_length, config.data.max_predictions, config.model.vocab_size
    batch = {name: np.zeros(s, d) for name, (s, d) in feature_shapes(count, length, masks).items()}
    batch["position_ids"][:] = np.arange(length)
    for row in range(count):
        used = int(rng.integers(length // 2, length + 1))
        # Neighbouring ids depend on each other, so there is something to learn.
        start, stride = rng.integers(5, vocab), rng.integers(1, 4)
        batch["input_ids"][row, :used] = 5 + (start + stride * np.arange(used)) % (vocab - 5)
        batch["token_type_ids"][row, used // 2 : used] = 1
        batch["sequence_ids"][row, :used] = 1
        number = int(rng.integers(1, masks + 1))
        places = np.sort(rng.permutation(np.arange(1, used))[:number])
        batch["mlm_positions"][row, :number] = places
        batch["mlm_labels"][row, :number] = batch["input_ids"][row, places]
        batch["mlm_weights"][row, :number] = 1
        batch["input_ids"][row, places] = 4
    batch["nsp_labels"][:] = rng.integers(0, 2, (count, 1))
    batch["nsp_weights"][:] = 1
    batch["sequence_keys"][:, 0] = np.arange(count)
    batch["document_classes"][:] = rng.integers(0, 1 + len(config.data.classes), (count, 1))
    return batch


def write_vocabulary(folder: Path, size: int = 211) -> Path:
    """A WordPiece vocabulary of ``size`` pieces: the special tokens and w0, w1, ..."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.txt").write_bytes(content(words(size - 5)))
    return folder / "vocab.txt"


def objective_of(config: PretrainConfig, mesh: Any = None) -> Any:
    """The objective that ``config`` names, on ``mesh``."""
    from bert_jax.objectives.registry import objective_class

    return objective_class(config.objective)(config, mesh)


def masked_lm(model: Any) -> Any:
    """The masked-LM objective with ``model`` as its model."""
    pairs = "nsp" if model.heads.nsp else "none"
    objective = objective_of(PretrainConfig(data=DataConfig(next_sentence=pairs)))
    objective.model = model
    return objective


def sums_of(objective: Any, params: Any, batch: Any, key: Any = None, **fixed: Any) -> Any:
    """The sums of a batch, which carries nothing; ``fixed``: what the objective reads besides."""
    from bert_jax.objectives.objective import Aux

    return objective.sums(params, Aux(fixed), batch, key, axis=None)[0]


def random_params(model: Any, seed: int = 0, deviation: float = 0.05) -> Any:
    """Parameters of ``model`` from numpy, which compiles little: scales around 1, others around 0."""
    from flax import linen as nn

    from bert_jax.model.canonical import abstract_params, canonical_shapes, from_canonical

    rng, plain = np.random.default_rng(seed), model.clone(mesh=None)
    flat = {name: rng.normal(name.endswith("scale"), deviation, x) for name, x in canonical_shapes(plain).items()}
    return from_canonical(flat, nn.unbox(abstract_params(plain)), model.config.vocab_size)


def train_synthetic(config: PretrainConfig, workdir: Path, **options: Any) -> None:
    """Pretrain on :class:`SyntheticSource` and the first device in ``workdir``."""
    vocabulary = write_vocabulary(workdir.parent)
    defaults = {"source": SyntheticSource(config), "devices": jax.devices()[:1]}
    pretrain_on(config, workdir, vocabulary, **defaults | options)


def whole_and_resumed(config: PretrainConfig, folder: Path, times: int, **options: Any) -> list[dict[str, Any]]:
    """Train in ``folder/whole``, and in ``folder/cut`` with a stop at the request ``times`` + 1 and a resume; check
    that both have the same lines of metrics and return them. Only the last run draws diagrams."""
    import pytest
    from builders import StopAt

    from bert_jax.process.exits import Stop
    from bert_jax.training.logging.metrics_file import read_metrics

    with mock.patch("bert_jax.training.logging.report.draw_curves", lambda *_: b""):
        train_synthetic(config, folder / "whole", **options)
        with pytest.raises(Stop):
            train_synthetic(config, folder / "cut", stop=StopAt(times), **options)
    train_synthetic(config, folder / "cut", **options)
    lines = read_metrics(folder / "whole")
    assert untimed(read_metrics(folder / "cut")) == untimed(lines)
    return lines


def updater(optimizer: Any, rate: float) -> Any:
    """``(params, state, grads) -> (params, state)``: a compiled update by ``optimizer`` at a constant rate."""

    def apply(params: Any, state: Any, grads: Any) -> tuple[Any, Any]:
        direction, state = optimizer.update(grads, state, params)
        return jax.tree.map(lambda p, d: p - rate * d, params, direction), state

    return jax.jit(apply)


_OF_START = ("continue_from", "extend_positions", "allow_numeric_change")


def pretrain_on(config: PretrainConfig, workdir: Path, vocabulary: Path, **options: Any) -> None:
    """Pretrain in ``workdir`` with the tokenizer of ``vocabulary``; ``options``: the source and fields of
    ``Launch`` or ``Start``."""
    from bert_jax.objectives.inputs import Inputs
    from bert_jax.objectives.registry import objective_class
    from bert_jax.process.signals import StopRequest
    from bert_jax.start.start import Start
    from bert_jax.tokenization import load_tokenizer
    from bert_jax.training import pretrain
    from bert_jax.training.launch import Launch
    from bert_jax.training.run import train

    source, inputs = options.pop("source"), options.pop("inputs", Inputs())
    of_start = {name: options.pop(name) for name in _OF_START if name in options}
    objective, tokenizer = objective_class(config.objective), load_tokenizer(vocabulary)
    job = pretrain.PretrainJob(config, objective, tokenizer, vocabulary, source, inputs)
    with shared_first_states(), mock.patch.object(pretrain, "train_programs", _programs_of):
        train(job, Launch(workdir=workdir, **{"stop": StopRequest(), "start": Start(**of_start)} | options))


_PROGRAMS: dict[Any, Any] = {}


def shared_programs(key: Any, make: Callable[[], Any]) -> Any:
    """The programs of an earlier run with the same ``key``, else those of ``make``: to trace and compile them takes
    longer than a tiny run."""
    if key not in _PROGRAMS:
        if len(_PROGRAMS) == 12:
            _PROGRAMS.clear()
        _PROGRAMS[key] = make()
    return _PROGRAMS[key]


def _programs_of(objective: Any) -> Any:
    from bert_jax.training.programs import train_programs

    fixed = tuple((path, np.asarray(x).tobytes()) for path, x in jax.tree.leaves_with_path(objective.fixed))
    # What no program reads.
    rest: dict[str, Any] = {"checkpoint_interval": 1, "log_interval": 1, "eval_interval": 0, "max_bad_steps": 1}
    rest |= {"spike_limit": (), "spike_rollback": ()}
    if objective.config.optimizer.decay_steps and not objective.config.optimizer.restart_schedule:
        rest |= {"num_steps": 0, "num_tokens": 0, "first_step": 0}
    training = dataclasses.replace(objective.config.training, **rest)
    config = dataclasses.replace(objective.config, training=training)
    return shared_programs((type(objective), config, objective.mesh, fixed), lambda: train_programs(objective))


_STATES: dict[Any, Any] = {}


@contextlib.contextmanager
def shared_first_states() -> Iterator[None]:
    """Runs of shared programs begin with a copy of the first state of one of them, and show no filled masks."""
    from bert_jax.objectives import masked_lm
    from bert_jax.start import state as module
    from bert_jax.training.state import initial_state

    def first_state(model: Any, optimizer: Any, abstract: Any, seed: int, loaded: Any = None) -> Any:
        is_large = sum(leaf.size for leaf in jax.tree.leaves(abstract)) > 1_000_000
        if is_large or jax.process_count() > 1:  # a process sees its part of the arrays only
            return initial_state(model, optimizer, abstract, seed, loaded)
        content = [(name, np.asarray(values).tobytes()) for name, values in sorted((loaded or {}).items())]
        key = (id(abstract), seed, hash(tuple(content)))
        if key not in _STATES:
            if len(_STATES) == 24:
                _STATES.clear()
            # The programs are kept, so that no other ones get their id.
            _STATES[key] = abstract, jax.device_get(initial_state(model, optimizer, abstract, seed, loaded))
        # Copies, because a step writes into its state.
        return jax.tree.map(lambda x, like: jax.device_put(np.array(x), like.sharding), _STATES[key][1], abstract)

    def no_pieces(model: Any, params: Any, features: Any, count: int, pieces: int) -> Any:
        shape = (*features["mlm_positions"].shape, min(count, pieces))
        return np.zeros(shape, np.float32), np.zeros(shape, np.int32)

    with contextlib.ExitStack() as stack:
        if module.initial_state is initial_state:
            stack.enter_context(mock.patch.object(module, "initial_state", first_state))
        if masked_lm.top_pieces.__module__ == masked_lm.__name__:
            stack.enter_context(mock.patch.object(masked_lm, "top_pieces", no_pieces))
        yield


def untimed(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Metric lines without what depends on the clock."""
    return [{key: value for key, value in record.items() if key not in TIMING_KEYS} for record in records]


@dataclasses.dataclass
class SyntheticIterator:
    """Batch ``n`` is a function of ``n`` alone."""

    config: PretrainConfig
    rows: list[int]
    poison: frozenset[int] = frozenset()
    data_step: int = 0
    skipped: list[list[int]] = dataclasses.field(default_factory=list)

    def __next__(self) -> tuple[dict[str, np.ndarray], BatchInfo]:
        batch = random_batch(self.config, seed=1000 + self.data_step)
        if self.data_step in self.poison:
            batch["mlm_weights"][0, 0] = np.nan
        self.data_step += 1
        size = self.config.training.global_batch_size
        info = BatchInfo(
            data_step=self.data_step - 1,
            epoch=self.data_step * size / 100,
            examples_seen=(self.data_step - sum(stop - start for start, stop in self.skipped)) * size,
            sequences=size,
        )
        return {name: values[self.rows] for name, values in batch.items()}, info

    def state(self) -> dict[str, Any]:
        return {"data_step": self.data_step, "skipped": list(self.skipped)}

    def skip(self, batches: int) -> None:
        self.skipped.append([self.data_step, self.data_step + batches])
        self.data_step += batches

    def restore(self, state: Mapping[str, Any]) -> None:
        self.data_step, self.skipped = state["data_step"], list(state["skipped"])


@dataclasses.dataclass
class SyntheticSource:
    """A ``PretrainSource`` without files; ``poison`` names data steps whose loss is not finite."""

    config: PretrainConfig
    poison: frozenset[int] = frozenset()

    @property
    def row_shape(self) -> RowShape:
        return RowShape(self.config.data.seq_length, self.config.data.max_predictions)

    def train(self, rows: list[int]) -> SyntheticIterator:
        return SyntheticIterator(self.config, rows, self.poison)

    def held_out(
        self, batch_size: int, rows: list[int], max_batches: int
    ) -> Iterator[dict[str, np.ndarray]] | None:
        count = max_batches or 3
        return ({n: v[rows] for n, v in random_batch(self.config, i, batch_size).items()} for i in range(count))

    def training_pass(self) -> Iterator[dict[str, np.ndarray]]:
        return (random_batch(self.config, seed=1000 + i) for i in range(4))

    def unigram_cross_entropy(self) -> float | None:
        return float(np.log(self.config.model.vocab_size))

    def constant_accuracy(self) -> float | None:
        return 0.5


def relative_difference(tree: Any, reference: Any) -> float:
    """Largest norm(g - g0) / max(norm(g0), 1e-4 global norm) over the leaves of two flat dicts."""
    total = np.sqrt(sum(float(np.sum(np.square(np.asarray(x, np.float64)))) for x in jax.tree.leaves(reference)))
    worst = 0.0
    for name, expected in reference.items():
        expected, got = np.asarray(expected, np.float64), np.asarray(tree[name], np.float64)
        worst = max(worst, np.linalg.norm(got - expected) / max(np.linalg.norm(expected), 1e-4 * total))
    return worst
