"""Records losses between a student and a teacher, written out in torch, and their gradients.

    pip install -r tests/golden/requirements.lock      (an environment of its own; torch and numpy suffice)
    python tests/golden/record_distillation.py         writes tests/golden/fixtures/distillation.npz

``input/NAME`` are the inputs, in rows of which some hold two sequences and padding; ``CASE/loss`` the loss as the
papers define it for single sequences, and ``CASE/gradient`` its gradient by the student. float64 arithmetic on
float32 values, stored as float32.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional

FIXTURE = Path(__file__).parent / "fixtures" / "distillation.npz"
SEQUENCE_IDS = np.array([[1, 1, 1, 1, 1, 1, 0], [1, 1, 1, 2, 2, 0, 0], [1, 1, 1, 1, 1, 1, 1]])
WEIGHTS = np.array([[1, 1, 0], [1, 0, 0], [1, 1, 1]], np.float32)
HEADS, RELATION_HEADS, TEMPERATURE = 3, 4, 2.0


def inputs() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = {
        "student_logits": (3, 3, 11), "teacher_logits": (3, 3, 11), "student": (3, 7, 24), "teacher": (3, 7, 24),
        "student_keys": (3, 7, 24), "teacher_keys": (3, 7, 24), "wide_teacher": (3, 7, 36),
    }  # fmt: skip
    return {name: (2 * rng.normal(size=shape)).astype(np.float32) for name, shape in shapes.items()}


def sequences() -> Iterator[tuple[int, np.ndarray]]:
    """Row and columns of each sequence."""
    for row, ids in enumerate(SEQUENCE_IDS):
        for number in range(1, ids.max() + 1):
            yield row, np.flatnonzero(ids == number)


def soft(x: torch.Tensor, given: dict[str, torch.Tensor]) -> torch.Tensor:
    """As in huggingface/transformers research_projects/distillation: batchmean of KLDivLoss, times T squared."""
    chosen = torch.from_numpy(WEIGHTS > 0)
    student, teacher = (y[chosen] / TEMPERATURE for y in (x, given["teacher_logits"]))
    loss = torch.nn.KLDivLoss(reduction="batchmean")
    return loss(functional.log_softmax(student, -1), functional.softmax(teacher, -1)) * TEMPERATURE**2


def tokens(x: torch.Tensor) -> torch.Tensor:
    return x[torch.from_numpy(SEQUENCE_IDS > 0)]


def cosine(x: torch.Tensor, given: dict[str, torch.Tensor]) -> torch.Tensor:
    student, teacher = tokens(x), tokens(given["teacher"])
    return torch.nn.CosineEmbeddingLoss()(student, teacher, torch.ones(len(student), dtype=torch.float64))


def squared(x: torch.Tensor, given: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.nn.MSELoss()(tokens(x), tokens(given["teacher"]))


def parts(x: torch.Tensor, row: int, columns: np.ndarray, heads: int) -> torch.Tensor:
    """[heads, tokens, width of a head] of a sequence."""
    return x[row, columns].reshape(len(columns), heads, -1).transpose(0, 1)


def scores(x: torch.Tensor, given: dict[str, torch.Tensor]) -> torch.Tensor:
    """The mean over all entries of the score matrices of all sequences."""
    squares, count = torch.zeros((), dtype=torch.float64), 0
    for row, columns in sequences():
        matrices = []
        for queries, keys in ((x, given["student_keys"]), (given["teacher"], given["teacher_keys"])):
            q, k = (parts(y, row, columns, HEADS) for y in (queries, keys))
            matrices.append(q @ k.transpose(1, 2) / q.shape[-1] ** 0.5)
        squares = squares + ((matrices[0] - matrices[1]) ** 2).sum()
        count += matrices[0].numel()
    return squares / count


def relations(x: torch.Tensor, given: dict[str, torch.Tensor]) -> torch.Tensor:
    """The sum over tokens and relation heads of the divergences, over their number."""
    total, count = torch.zeros((), dtype=torch.float64), 0
    for row, columns in sequences():
        logs = []
        for vectors in (x, given["wide_teacher"]):
            y = parts(vectors, row, columns, RELATION_HEADS)
            logs.append(functional.log_softmax(y @ y.transpose(1, 2) / y.shape[-1] ** 0.5, -1))
        student, teacher = logs
        total = total + functional.kl_div(student, teacher, reduction="sum", log_target=True)
        count += RELATION_HEADS * len(columns)
    return total / count


def labels(x: torch.Tensor, given: dict[str, torch.Tensor]) -> torch.Tensor:
    """The divergence of the probability of each label: cross-entropy minus the entropy of the teacher."""
    chosen = torch.from_numpy(WEIGHTS > 0)
    student, teacher = (y[chosen] / TEMPERATURE for y in (x, given["teacher_logits"]))
    loss, target = functional.binary_cross_entropy_with_logits, torch.sigmoid(teacher)
    return (loss(student, target) - loss(teacher, target)) * TEMPERATURE**2


def values(x: torch.Tensor, given: dict[str, torch.Tensor]) -> torch.Tensor:
    chosen = torch.from_numpy(WEIGHTS > 0)
    return torch.nn.MSELoss()(x[chosen][:, 0], given["teacher_logits"][chosen][:, 0])


def places(x: torch.Tensor, given: dict[str, torch.Tensor]) -> torch.Tensor:
    """The divergence of the distributions over the tokens of each sequence, of its start and of its end."""
    found = []
    for row, columns in sequences():
        for column in range(2):
            student, teacher = (y[row, columns, column] / TEMPERATURE for y in (x, given["teacher"]))
            log = functional.log_softmax(student, -1)
            found.append(functional.kl_div(log, functional.softmax(teacher, -1), reduction="sum"))
    return torch.stack(found).mean() * TEMPERATURE**2


def layers(x: torch.Tensor, given: dict[str, torch.Tensor]) -> torch.Tensor:
    """Patient distillation: squared distance of normalized first tokens, summed over two layers."""
    found = []
    for row, columns in sequences():
        for student, teacher in ((x, given["teacher"]), (given["student_keys"], given["teacher_keys"])):
            both = (functional.normalize(y[row, columns[0]], dim=-1) for y in (student, teacher))
            found.append(functional.mse_loss(*both, reduction="sum"))
    return 2 * torch.stack(found).mean()


CASES = {
    "soft": ("student_logits", soft), "cosine": ("student", cosine), "squared": ("student", squared),
    "scores": ("student", scores), "relations": ("student", relations), "labels": ("student_logits", labels),
    "values": ("student_logits", values), "places": ("student", places), "layers": ("student", layers),
}  # fmt: skip


def main() -> None:
    given = {name: torch.from_numpy(array).double() for name, array in inputs().items()}
    found = {f"input/{name}": array for name, array in inputs().items()}
    found |= {"input/sequence_ids": SEQUENCE_IDS.astype(np.int32), "input/weights": WEIGHTS}
    for case, (name, loss) in CASES.items():
        x = given[name].clone().requires_grad_()
        value = loss(x, given)
        value.backward()
        found |= {f"{case}/loss": np.float32(value.item()), f"{case}/gradient": x.grad.numpy().astype(np.float32)}
    np.savez_compressed(FIXTURE, **found)
    print(f"{FIXTURE}: {len(CASES)} cases")


if __name__ == "__main__":
    main()
