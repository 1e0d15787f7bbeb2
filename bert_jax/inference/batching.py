"""Packing of model inputs into batches of a few fixed shapes, and execution of these batches.

Packing does not change the outputs of an input. Shapes: B rows, S tokens per row, U inputs per row, K sequences per
input.
"""

import dataclasses
import heapq
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import jax
import numpy as np

from bert_jax.tasks.task import Level, ModelInput, Target

# Lengths of the only row of a small call; long ones double, so that few programs serve single inputs.
_ONLY_ROW, _SHORT = (16, 32, 48, 64, 128, 256, 512, 1024, 2048, 4096), 64
ROW_LENGTHS = (32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096)
_IN_FLIGHT = 4
# Name of the hidden states that one stage computes and the next one reads, [B, S, H].
HIDDEN = "hidden"

# DeviceOutputs: arrays on the device by level and name. Outputs: arrays of one model input by name.
DeviceOutputs = Mapping[Level, Mapping[str, jax.Array]]
Outputs = dict[str, np.ndarray]
Program = Callable[[dict[str, np.ndarray]], DeviceOutputs]
# A program of parameters, features and further arguments.
Function = Callable[..., DeviceOutputs]
Progress = Callable[[int], None]


@dataclass(frozen=True)
class BatchOptions:
    """Options of every function that runs texts through a model. Raises ``ValueError`` for a number below 1."""

    # Tokens of one batch; None: a number that suits the device.
    batch_tokens: int | None = None
    # Most inputs of one batch; None: as many as its tokens allow.
    batch_size: int | None = None
    # Called with the number of inputs that were processed since the last call.
    progress: Progress | None = None

    def __post_init__(self) -> None:
        for name in ("batch_tokens", "batch_size"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, int) and value >= 1):
                raise ValueError(f"{name}: {value!r} is not allowed; allowed: 1 or more")


@dataclass(frozen=True)
class Stages:
    """Programs, each of which computes some layers. An input passes through them until its outputs are final; the
    others are packed into new batches with the array ``HIDDEN`` (level token) of the program before."""

    # Functions (params, features) that return arrays by level and name; all but the last return ``HIDDEN``.
    programs: Sequence[Callable[..., DeviceOutputs]]
    # True if the outputs of an input at a stage before the last are final.
    is_final: Callable[[Outputs], bool]


@dataclass(frozen=True, order=True)
class Shape:
    """Shape of a batch: number of rows, tokens per row and inputs per row."""

    rows: int
    length: int
    units: int


@dataclass(frozen=True)
class Packed:
    """A batch on the host: features, and the place of each input in the batch."""

    features: dict[str, np.ndarray]
    # (index of the input, row, slot in the row, position of its first token)
    places: list[tuple[int, int, int, int]]


def row_lengths(limit: int) -> tuple[int, ...]:
    """Return at most seven row lengths for inputs of at most ``limit`` tokens; the last length is ``limit``.

    A program is therefore compiled for at most eight shapes: one for each length, and a smaller batch of the first
    length; the rows of :func:`only_row`, one program each, come in addition."""
    ladder = ROW_LENGTHS[2:9] if limit <= 512 else ROW_LENGTHS[2:14:2]
    return (*(length for length in ladder if length < limit), limit)


def only_row(lengths: Sequence[int], limit: int, units: int) -> int | None:
    """Return the length of the row, at most ``limit``, that all inputs share: one input, or up to ``units`` short
    ones; ``lengths`` are their numbers of tokens. None: one row is too small, or a usual batch is as fast."""
    total = sum(lengths)
    if total > limit or not 0 < len(lengths) <= (units if total <= _SHORT else 1):
        return None
    return next((length for length in _ONLY_ROW if total <= length < limit), limit)


def fill_rows(
    lengths: Sequence[int], ladder: Sequence[int], units: int, rows: int | None = None
) -> list[list[int]] | None:
    """Return the indices of the inputs in each row, or None if the inputs do not fit into ``rows`` rows.

    ``lengths`` are the numbers of tokens of the inputs, ``ladder`` contains the allowed row lengths in ascending
    order, and a row has at most ``units`` inputs. The longest inputs are placed first, each into the row with the
    least free space that suffices. A new row has the smallest allowed length into which its first input fits."""
    filled: list[list[int]] = []
    # Heaps of rows that are not full, by free space; bit i of ``spaces`` is set if a row with free space i exists.
    # So the row of an input is found in constant time; a test set may have hundreds of thousands of inputs.
    waiting: dict[int, list[int]] = defaultdict(list)
    spaces = 0
    for number in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        need = lengths[number]
        enough = spaces >> need
        if enough:
            space = need + (enough & -enough).bit_length() - 1
            row = heapq.heappop(waiting[space])
            spaces ^= 0 if waiting[space] else 1 << space
        elif need > ladder[-1] or len(filled) == rows:
            return None
        else:
            row, space = len(filled), _rung(need, ladder)
            filled.append([])
        filled[row].append(number)
        if len(filled[row]) < units:
            heapq.heappush(waiting[space - need], row)
            spaces |= 1 << (space - need)
    return filled


def _rung(length: int, ladder: Sequence[int]) -> int:
    return next(rung for rung in ladder if rung >= length)


def pack_batch(
    units: Sequence[ModelInput],
    rows: Sequence[Sequence[int]],
    shape: Shape,
    *,
    pad_id: int,
    sequences: int = 1,
    targets: Mapping[str, Target] | None = None,
    keys: Sequence[int] | None = None,
) -> Packed:
    """Return a batch of the model inputs ``units``. ``rows`` contains the indices of the inputs in each row.
    ``bert_jax.tasks.task.Task`` lists the features.

    Args:
        sequences: number of sequences per input (K); an input with fewer sequences has empty slots.
        targets: description of each target of the inputs, by name.
        keys: for training, a number per input that identifies the input in the training data. It determines the
            feature ``sequence_keys`` of ``bert_jax.batch``.
    """
    size, targets = (shape.rows, shape.length), targets or {}
    features = {name: np.zeros(size, np.int32) for name in ("token_type_ids", "sequence_ids", "position_ids")} | {
        "input_ids": np.full(size, pad_id, np.int32)
    }
    features["cls_positions"] = np.zeros((shape.rows, shape.units * sequences), np.int32)
    if keys is not None:
        features["sequence_keys"] = np.zeros_like(features["cls_positions"], np.uint32)
    features["weights"] = np.zeros((shape.rows, shape.units), np.float32)
    for name, target in targets.items():
        dims = size if target.level == "token" else (shape.rows, shape.units)
        features[name] = np.zeros((*dims, *target.shape), target.dtype)
    counting = np.arange(shape.length, dtype=np.int32)
    places = []
    for i, numbers in enumerate(rows):
        start = 0
        for slot, number in enumerate(numbers):
            unit, first = units[number], start
            if keys is not None:
                own = slice(slot * sequences, (slot + 1) * sequences)
                features["sequence_keys"][i, own] = keys[number] * sequences + np.arange(sequences)
            for k, sequence in enumerate(unit.sequences):
                end = start + len(sequence.ids)
                features["input_ids"][i, start:end] = sequence.ids
                features["token_type_ids"][i, start:end] = sequence.types
                features["sequence_ids"][i, start:end] = slot * sequences + k + 1
                features["position_ids"][i, start:end] = counting[: end - start]
                features["cls_positions"][i, slot * sequences + k] = start
                start = end
            features["weights"][i, slot] = unit.weight
            for name, value in unit.targets.items():
                level = targets[name].level
                if level == "token":
                    features[name][i, first:start] = value
                else:
                    features[name][i, slot] = value + first if level == "position" else value
            places.append((number, i, slot, first))
    return Packed(features, places)


def packed_batches(
    units: Sequence[ModelInput],
    ladder: Sequence[int],
    per_row: int,
    sizes: Callable[[int, int], Sequence[int]],
    *,
    pad_id: int,
    sequences: int = 1,
    targets: Mapping[str, Target] | None = None,
) -> Iterator[Packed]:
    """Yield batches that together contain every input once; batches with the longest rows are first.

    Args:
        ladder: allowed row lengths, ascending.
        per_row: maximum number of inputs per row (U).
        sizes: function of a row length and of the total number of rows of this length; returns the allowed numbers
            of rows per batch, ascending. The last batch has the smallest allowed number that suffices for the
            remaining rows.
        pad_id, sequences, targets: see :func:`pack_batch`.
    """
    rows = fill_rows([unit.length for unit in units], ladder, per_row)
    assert rows is not None, f"an input has more than {ladder[-1]} tokens"
    by_length: dict[int, list[list[int]]] = defaultdict(list)
    for row in rows:
        by_length[_rung(units[row[0]].length, ladder)].append(row)
    for length, waiting in by_length.items():  # the longest are filled first
        allowed = sizes(length, len(waiting))
        while waiting:
            size = next((size for size in allowed if size >= len(waiting)), allowed[-1])
            shape = Shape(size, length, per_row)
            yield pack_batch(units, waiting[:size], shape, pad_id=pad_id, sequences=sequences, targets=targets)
            waiting = waiting[size:]


def by_level(outputs: Mapping[str, tuple[Level, jax.Array]]) -> dict[Level, dict[str, jax.Array]]:
    """Return the arrays of ``Task.outputs`` as {level: {name: array}}, the format of :data:`DeviceOutputs`."""
    levels: dict[Level, dict[str, jax.Array]] = {}
    for name, (level, array) in outputs.items():
        levels.setdefault(level, {})[name] = array
    return levels


def run_packed(
    program: Program, units: Sequence[ModelInput], batches: Iterable[Packed], progress: Progress | None = None
) -> list[Outputs]:
    """Return the outputs of every input, in order: the entry of the input in each ``unit`` array, and the entries
    of its tokens in each ``token`` array. A few batches are started before the outputs of the first batch are
    collected. ``progress`` is called with the number of inputs of each batch."""
    outputs: list[Outputs] = [{} for _ in units]
    waiting: deque[tuple[Packed, DeviceOutputs]] = deque()

    def collect() -> None:
        packed, arrays = waiting.popleft()
        levels = {level: {name: np.asarray(of) for name, of in named.items()} for level, named in arrays.items()}
        of_units, of_tokens = levels.get("unit", {}), levels.get("token", {})
        for number, row, slot, first in packed.places:
            tokens = slice(first, first + units[number].length)
            outputs[number] = {name: array[row, slot] for name, array in of_units.items()}
            outputs[number] |= {name: array[row, tokens] for name, array in of_tokens.items()}
        if progress is not None:
            progress(len(packed.places))

    for packed in batches:
        waiting.append((packed, program(packed.features)))
        if len(waiting) > _IN_FLIGHT:
            collect()
    while waiting:
        collect()
    return outputs


def run_stages(
    programs: Sequence[Program],
    is_final: Callable[[Outputs], bool],
    units: Sequence[ModelInput],
    pack: Callable[[Sequence[ModelInput], Mapping[str, Target]], Iterable[Packed]],
    progress: Progress | None = None,
) -> list[Outputs]:
    """Return the outputs of every input, in order, by the last of the :class:`Stages` that it passes through, and
    the number of this stage, from 0, as ``stage``. ``pack`` returns batches of inputs with additional targets."""
    outputs: list[Outputs] = [{} for _ in units]
    waiting, carried = dict(enumerate(units)), dict[str, Target]()
    for number, program in enumerate(programs):
        inputs, left = list(waiting.values()), dict[int, ModelInput]()
        found = run_packed(program, inputs, pack(inputs, carried))
        for (place, unit), output in zip(waiting.items(), found, strict=True):
            hidden = output.pop(HIDDEN, None)
            outputs[place] = output | {"stage": np.asarray(number)}
            if hidden is not None and not is_final(output):
                left[place] = dataclasses.replace(unit, targets={**unit.targets, HIDDEN: hidden})
                carried = {HIDDEN: Target("token", hidden.dtype.type, hidden.shape[1:])}
        if progress is not None:
            progress(len(waiting) - len(left))
        waiting = left
        if not waiting:
            break
    return outputs
