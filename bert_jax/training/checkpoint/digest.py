"""Checksums of the files of a checkpoint and digests of its values.

Orbax does not detect a flipped bit in a payload file. A checkpoint therefore contains (1) a list of the size and
crc32c of every file, written after the commit, with a digest of the list itself, and (2) a digest of the path,
shape, dtype and bits of every canonical leaf. The digest of the leaves does not depend on the mesh or the layout.
"""

import errno
import functools
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import google_crc32c
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from bert_jax.io.files import write_whole
from bert_jax.io.storage import Location
from bert_jax.model.canonical import STACKED, VOCABULARY_ROWS, Params, path_name
from bert_jax.training.state import TrainState

CHECKSUM_FILE = "checksums.json"
_LEAVES_AT_ONCE = 48


def _mix(x: jax.Array) -> jax.Array:
    """Mix the bits of uint32 values bijectively (the finalizer of MurmurHash3)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def _digest_leaf(x: jax.Array, stacked: bool, rows: int | None) -> jax.Array:
    """Return two position-dependent sums of the bits of ``x``: uint32[2], or uint32[layers, 2] if ``x`` is stacked.

    The sums do not depend on the mesh. Rows with an index of ``rows`` or more are padding; they affect the digest
    only if they are damaged (not 0).
    """
    damaged = jnp.any(x[rows:] != 0) if rows is not None else False
    x = x[:rows] if rows is not None else x
    x = x if stacked else x[None]
    size = x.dtype.itemsize
    bits = jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * size}")) if x.dtype != jnp.bool_ else x
    bits = bits.astype(jnp.uint32)
    position = jnp.zeros(x.shape, jnp.uint32)
    for dim in range(1, x.ndim):
        stride = int(np.prod(x.shape[dim + 1 :], dtype=np.int64)) & 0xFFFFFFFF
        position += jax.lax.broadcasted_iota(jnp.uint32, x.shape, dim) * jnp.uint32(stride)
    axes = tuple(range(1, x.ndim))
    first = jnp.sum(_mix(bits) * (2 * position + 1), axes, dtype=jnp.uint32) + jnp.uint32(damaged)
    second = jnp.sum(_mix(bits ^ _mix(position + jnp.uint32(0x9E3779B9))), axes, dtype=jnp.uint32)
    result = jnp.stack([first, second], axis=-1)
    return result if stacked else result[0]


def tree_digest(tree: TrainState, vocab_size: int) -> str:
    """Return the SHA-256 (hex) of the :func:`digest_lines` of ``tree``."""
    return lines_digest(digest_lines(tree, vocab_size))


def lines_digest(lines: list[str]) -> str:
    """Return the SHA-256 (hex) of ``lines``, the :func:`digest_lines` of one or more trees, in sorted order."""
    return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()


def part_digests(lines: list[str]) -> dict[str, str]:
    """Return one digest for the parameters (key ``params``) and one for their moving average (key ``ema``),
    computed from ``lines``, the :func:`digest_lines` of a training state. A key without lines is omitted."""
    parts = {part: [line for line in lines if line.startswith(f"{part}/")] for part in ("params", "ema")}
    return {part: lines_digest(own) for part, own in parts.items() if own}


def digest_lines(tree: TrainState | Params, vocab_size: int) -> list[str]:
    """Return one line, ``name shape dtype digest``, for each canonical leaf of ``tree``."""
    return start_digest(tree, vocab_size)()


def start_digest(tree: TrainState | Params, vocab_size: int) -> Callable[[], list[str]]:
    """Start computing the digests of the leaves of ``tree``. Return a function that waits for them and returns
    the :func:`digest_lines` of ``tree``.

    The buffers of ``tree`` may be donated after this call. The returned function may be called from any thread.
    """
    pending = []
    for kind, leaves in _alike(tree, vocab_size):
        digests = _digest_program(kind, len(leaves))([leaf for _, leaf in leaves])
        if len(kind.sharding.device_set) > 1 and jax.default_backend() == "cpu":
            # Several independent programs with collectives in flight deadlock on virtual CPU devices.
            digests.block_until_ready()
        pending.append((kind, [name for name, _ in leaves], digests))

    def finish() -> list[str]:
        return [
            line
            for kind, names, digests in pending
            for name, values in zip(names, np.asarray(digests), strict=True)
            for line in _lines(kind, name, values)
        ]

    return finish


def compile_digest(tree: TrainState, vocab_size: int) -> None:
    """Compile the programs of :func:`start_digest` for arrays of the shapes, dtypes and shardings of ``tree``."""
    for kind, leaves in _alike(tree, vocab_size):
        _digest_program(kind, len(leaves))


class _Kind(NamedTuple):
    """Properties of a leaf that determine the program for its digest. ``rows`` is the number of rows before the
    padding, or None for a leaf that is never padded."""

    shape: tuple[int, ...]
    dtype: np.dtype
    sharding: jax.sharding.Sharding
    stacked: bool
    rows: int | None


def _alike(tree: TrainState | Params, vocab_size: int) -> Iterator[tuple[_Kind, list[tuple[str, jax.Array]]]]:
    """Group the leaves of ``tree`` by kind; yield each kind with at most 48 (name, leaf) pairs at a time.

    Each group needs only one program. A device queues only a few programs, and dispatching more of them blocks. A
    CPU does not, so it takes the leaves one by one: otherwise, the digests of a small model would take as long to
    compile as its training step, once for each number of leaves.
    """
    at_once = 1 if jax.default_backend() == "cpu" else _LEAVES_AT_ONCE
    kinds: dict[_Kind, list[tuple[str, jax.Array]]] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name = path_name(path)
        rows = vocab_size if name.endswith(VOCABULARY_ROWS) else None
        kind = _Kind(tuple(leaf.shape), leaf.dtype, leaf.sharding, STACKED in name, rows)
        kinds.setdefault(kind, []).append((name, leaf))
    for kind, leaves in kinds.items():
        for first in range(0, len(leaves), at_once):
            yield kind, leaves[first : first + at_once]


def _lines(kind: _Kind, name: str, values: np.ndarray) -> Iterator[str]:
    shape = kind.shape if kind.rows is None else (kind.rows, *kind.shape[1:])
    if kind.stacked:
        before, after = name.split(STACKED)
        for i, pair in enumerate(values):
            yield f"{before}encoder/layer_{i}/{after} {shape[1:]} {kind.dtype} {pair[0]} {pair[1]}"
    else:
        yield f"{name} {shape} {kind.dtype} {values[0]} {values[1]}"


@functools.lru_cache(maxsize=1024)
def _digest_program(kind: _Kind, count: int) -> Callable[[list[jax.Array]], jax.Array]:
    """Return the compiled program that computes the digests of ``count`` leaves, replicated on all processes."""
    everywhere = None
    if isinstance(kind.sharding, NamedSharding):
        everywhere = NamedSharding(kind.sharding.mesh, PartitionSpec())

    def digest(leaves: list[jax.Array]) -> jax.Array:
        return jnp.stack([_digest_leaf(leaf, kind.stacked, kind.rows) for leaf in leaves])

    like = jax.ShapeDtypeStruct(kind.shape, kind.dtype, sharding=kind.sharding)
    return jax.jit(digest, out_shardings=everywhere).lower([like] * count).compile()


def json_digest(value: Any) -> str:
    """Return the SHA-256 (hex) of a JSON value, which is serialized with sorted keys and without spaces."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def file_checksum(path: Location) -> str:
    """Return the crc32c checksum (hex) of a file."""
    checksum = google_crc32c.Checksum()
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            checksum.update(block)
    return checksum.hexdigest().decode()


def write_checksums(folder: Location) -> None:
    """Atomically write the size and crc32c of every file under ``folder`` to the checksum file of ``folder``.

    Raises ``FileNotFoundError`` if ``folder`` does not exist.
    """
    if not folder.is_dir():
        raise FileNotFoundError(errno.ENOENT, "the checkpoint was not committed", str(folder))
    held: Iterable[Location] = folder.rglob("*")
    files = {
        path.relative_to(folder).as_posix(): [path.stat().st_size, file_checksum(path)]
        for path in sorted(held)
        if path.is_file() and not path.name.startswith(CHECKSUM_FILE)
    }
    write_whole(folder / CHECKSUM_FILE, json.dumps({"files": files, "digest": json_digest(files)}))


def check_files(folder: Location, share: tuple[int, int] = (0, 1)) -> str | None:
    """Return a description of the first fault in the files of a checkpoint, or ``None`` if no fault is found.

    If the run was killed after the commit but before it wrote the checksum file, the checkpoint lacks this file.
    Such a checkpoint counts as undamaged here; the digest of its values is checked later. With ``share`` = (i, n),
    only every n-th file is checked, starting with file i, so that n processes can divide the work.
    """
    path = folder / CHECKSUM_FILE
    if not path.exists():
        return None
    try:
        listed = json.loads(path.read_text())
        files, digest = listed["files"], listed["digest"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return f"{CHECKSUM_FILE} is not readable"
    if json_digest(files) != digest:
        return f"{CHECKSUM_FILE} is damaged"
    for name, (size, checksum) in sorted(files.items())[share[0] :: share[1]]:
        file = folder / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != size:
            return f"{name} has {file.stat().st_size} bytes instead of {size}"
        if file_checksum(file) != checksum:
            return f"{name} differs from its checksum"
    return None
