"""Proof that a checkpoint is what was saved: checksums of its files and a digest of its values.

A flipped bit in a payload file restores silently wrong, so a checkpoint carries (1) size and crc32c of every
file, itself checksummed, written after the commit, and (2) a digest of path, shape, dtype and bits of every
canonical leaf, which does not depend on mesh or layout.
"""

import functools
import hashlib
import json
from pathlib import Path
from typing import Any

import google_crc32c
import jax
import jax.numpy as jnp
import numpy as np

from bert_jax.model.layout import STACKED, VOCABULARY_ROWS, path_name

CHECKSUM_FILE = "checksums.json"


def _mix(x: jax.Array) -> jax.Array:
    """A bijection of uint32 that spreads every bit (the finaliser of MurmurHash3)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


@functools.partial(jax.jit, static_argnames=("stacked", "rows"))
def _digest_leaf(x: jax.Array, stacked: bool, rows: int | None) -> jax.Array:
    """uint32[2], or uint32[layers, 2] of a stacked leaf: two position-dependent sums, so equal on every mesh."""
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
    first = jnp.sum(_mix(bits) * (2 * position + 1), axes, dtype=jnp.uint32)
    second = jnp.sum(_mix(bits ^ _mix(position + jnp.uint32(0x9E3779B9))), axes, dtype=jnp.uint32)
    result = jnp.stack([first, second], axis=-1)
    return result if stacked else result[0]


def tree_digest(tree: Any, vocab_size: int) -> str:
    """sha256 over the sorted ``name shape dtype digest`` lines of every canonical leaf of ``tree``."""
    return lines_digest(digest_lines(tree, vocab_size))


def lines_digest(lines: list[str]) -> str:
    """sha256 over sorted :func:`digest_lines`, which may come from several trees that make one."""
    return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()


def digest_lines(tree: Any, vocab_size: int) -> list[str]:
    """``name shape dtype digest`` of every canonical leaf of ``tree``."""
    pending = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name = path_name(path)
        rows = vocab_size if name.endswith(VOCABULARY_ROWS) else None
        digest = _digest_leaf(leaf, STACKED in name, rows)
        if len(leaf.sharding.device_set) > 1 and jax.default_backend() == "cpu":
            # Independent programs with collectives deadlock on virtual CPU devices when many are in flight.
            digest.block_until_ready()
        pending.append((name, leaf, rows, digest))
    lines = []
    for name, leaf, rows, digest in pending:
        values = np.asarray(digest)
        shape = tuple(leaf.shape) if rows is None else (rows, *leaf.shape[1:])
        if STACKED in name:
            before, after = name.split(STACKED)
            for i, pair in enumerate(values):
                lines.append(f"{before}encoder/layer_{i}/{after} {shape[1:]} {leaf.dtype} {pair[0]} {pair[1]}")
        else:
            lines.append(f"{name} {shape} {leaf.dtype} {values[0]} {values[1]}")
    return lines


def json_digest(value: Any) -> str:
    """sha256 of a JSON value in one fixed spelling."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def file_checksum(path: Path) -> str:
    """crc32c of a file, in hex."""
    checksum = google_crc32c.Checksum()
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            checksum.update(block)
    return checksum.hexdigest().decode()


def write_checksums(folder: Path) -> None:
    """List size and crc32c of every file under ``folder`` in its checksum file (written beside, then renamed)."""
    files = {
        path.relative_to(folder).as_posix(): [path.stat().st_size, file_checksum(path)]
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.name.startswith(CHECKSUM_FILE)
    }
    temporary = folder / f"{CHECKSUM_FILE}.tmp"
    temporary.write_text(json.dumps({"files": files, "digest": json_digest(files)}))
    temporary.rename(folder / CHECKSUM_FILE)


def check_files(folder: Path) -> str | None:
    """What is wrong with the files of a checkpoint, or ``None``. Without a checksum file (a kill between the
    commit and its writing) nothing is said: the digest decides."""
    path = folder / CHECKSUM_FILE
    if not path.exists():
        return None
    try:
        listed = json.loads(path.read_text())
        files, digest = listed["files"], listed["digest"]
    except (ValueError, KeyError, TypeError):
        return f"{CHECKSUM_FILE} is not readable"
    if json_digest(files) != digest:
        return f"{CHECKSUM_FILE} is damaged"
    for name, (size, checksum) in files.items():
        file = folder / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != size:
            return f"{name} has {file.stat().st_size} bytes instead of {size}"
        if file_checksum(file) != checksum:
            return f"{name} differs from its checksum"
    return None
