"""What torch, transformers and sentence-transformers computed (tests/golden/record_objectives.py)."""

import functools
from pathlib import Path

import jax
import numpy as np

FIXTURE = Path(__file__).parents[2] / "golden" / "fixtures" / "objectives.npz"


@functools.cache
def recorded() -> dict[str, np.ndarray]:
    """Every array of the fixture by name."""
    with np.load(FIXTURE) as stored:
        return dict(stored)


def given(name: str) -> np.ndarray:
    """An input."""
    return recorded()[f"input/{name}"]


class Slots:
    """Examples in a batch with empty slots among them: examples go to the ``places`` of ``shape``, in order."""

    def __init__(self, count: int, shape: tuple[int, int]) -> None:
        self.shape = shape
        self.places = np.sort(np.random.default_rng(count).permutation(shape[0] * shape[1])[:count])
        self.weights = self.fill(np.ones(count, np.float32), 0)

    def fill(self, examples: np.ndarray, filler: float) -> np.ndarray:
        """[B, U, ...] of [examples, ...], ``filler`` in the empty slots."""
        filled = np.full((self.shape[0] * self.shape[1], *examples.shape[1:]), filler, examples.dtype)
        filled[self.places] = examples
        return filled.reshape(*self.shape, *examples.shape[1:])

    def take(self, batch: jax.Array) -> np.ndarray:
        """[examples, ...] of [B, U, ...]; nothing but 0 may stand in the empty slots."""
        flat = np.asarray(batch).reshape(-1, *batch.shape[2:])
        assert not np.any(np.delete(flat, self.places, axis=0))
        return flat[self.places]


def assert_recorded(case: str, loss: jax.Array, gradient: np.ndarray, bar: float, gradient_bar: float) -> None:
    """|loss - recorded| <= bar, norm(gradient - recorded) <= gradient_bar * norm(recorded)."""
    difference = abs(float(loss) - float(recorded()[f"{case}/loss"]))
    expected = recorded()[f"{case}/gradient"]
    relative = np.linalg.norm(gradient - expected) / np.linalg.norm(expected)
    print(f"{case}: loss {difference:.1e}, gradient {relative:.1e}")
    assert difference <= bar
    assert relative <= gradient_bar
