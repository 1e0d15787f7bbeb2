"""Integer hashes (SplitMix64, Steele et al. 2014) that do not depend on the machine or the version of numpy."""

import numpy as np

GOLDEN = 0x9E3779B97F4A7C15


def mix64(values: np.ndarray) -> np.ndarray:
    """Apply the finalizer of SplitMix64 to uint64 ``values``."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def hash_key(*parts: int | np.ndarray) -> np.ndarray:
    """Combine non-negative integers into one uint64 hash per element; arrays are broadcast."""
    key = np.zeros(1, np.uint64)
    for part in parts:
        part = np.atleast_1d(np.asarray(part)).astype(np.uint64)
        key = mix64((key ^ part) * np.uint64(GOLDEN) + np.uint64(GOLDEN))
    return key


def permutation(size: int, *parts: int) -> np.ndarray:
    """Return a permutation of ``range(size)`` as int64; the integers ``parts`` determine it."""
    keys = mix64(hash_key(*parts) + np.arange(1, size + 1, dtype=np.uint64) * np.uint64(GOLDEN))
    return np.argsort(keys, kind="stable")
