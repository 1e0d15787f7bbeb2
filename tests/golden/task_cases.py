"""Tasks, their examples and the weights of their models, for the recorder and for the tests. Needs numpy alone.

Every weight and every text follows from its name through raw PCG64 output, which numpy keeps stable, so the fixture
holds losses and gradients only. Parameters have the project's canonical names; kernels are [in, out].
"""

import zlib
from dataclasses import dataclass, field

import numpy as np

PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{i}" for i in range(50)), "##x", "##y"]
LABELS = ("no", "perhaps", "yes")
TAGS = ("O", "B-A", "I-A", "B-B")
# Fields of ModelConfig; no dropout.
MODEL = {
    "vocab_size": len(PIECES), "hidden_size": 16, "num_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 24, "max_position_embeddings": 64, "type_vocab_size": 2, "activation": "gelu",
    "hidden_dropout": 0.0, "attention_dropout": 0.0,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class TaskCase:
    """A task and its batch. ``records`` hold fields of ``Record``, ``options`` those of a config by section."""

    name: str
    kind: str
    records: tuple[dict, ...]
    options: dict[str, dict] = field(default_factory=dict)
    # The last four layers of five are not all layers.
    layers: int = 2

    @property
    def model(self) -> dict:
        """Fields of ``ModelConfig``."""
        return MODEL | {"num_layers": self.layers}


def _uniform(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """float64 in [0, 1), from the name alone."""
    raw = np.random.PCG64(zlib.crc32(name.encode())).random_raw(int(np.prod(shape)))
    return ((raw >> np.uint64(11)) * 2.0**-53).reshape(shape)


def weight(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """float32 value of a parameter: attention is uneven, scales lie around 1, nothing that is learnt is 0."""
    u = 2 * _uniform(name, shape) - 1
    if name.endswith(("scale", "gamma")):
        value = 1 + 0.2 * u
    elif name.endswith("embedding"):
        value = 1.5 * u * (3 / shape[1]) ** 0.5
    elif name.endswith(("kernel", "recurrent")):
        value = u * (3 / shape[0]) ** 0.5
    else:
        value = (1.0 if name.startswith(("crf", "feature_mix")) else 0.2) * u
    return value.astype(np.float32)


def _words(name: str, count: int) -> tuple[str, ...]:
    """Words of one to three pieces."""
    numbers = (50 * _uniform(f"{name}/words", (count,))).astype(int)
    endings = ["xy" if u > 0.85 else "x" if u > 0.6 else "" for u in _uniform(f"{name}/ends", (count,))]
    return tuple(f"w{n}{ending}" for n, ending in zip(numbers, endings, strict=True))


def _text(name: str, count: int) -> str:
    return " ".join(_words(name, count))


def _tagged(name: str, count: int) -> dict:
    tags = [TAGS[int(u * len(TAGS))] for u in _uniform(f"{name}/tags", (count,))]
    # An entity goes on only where one began.
    for i, tag in enumerate(tags):
        if tag == "I-A" and (i == 0 or not tags[i - 1].endswith("A")):
            tags[i] = "B-A"
    return {"words": _words(name, count), "tags": tuple(tags)}


def _asked(name: str, question: int, passage: int, answer: tuple[int, int] | None) -> dict:
    """A question, with the words ``answer`` (first, last) of its passage as answer."""
    words = _words(f"{name}/passage", passage)
    record = {"text": _text(f"{name}/question", question), "text_pair": " ".join(words), "answers": ()}
    if answer is not None:
        first, last = answer
        start = len("".join(f"{word} " for word in words[:first]))
        record["answers"] = ({"text": " ".join(words[first : last + 1]), "start": start},)
    return record


_SINGLE = tuple({"text": _text(f"single{i}", n)} for i, n in enumerate((3, 11, 6, 1, 8)))
_PAIRS = tuple(
    {"text": _text(f"pair{i}", a), "text_pair": _text(f"other{i}", b)}
    for i, (a, b) in enumerate(((2, 6), (5, 3), (7, 7), (1, 1), (4, 9)))
)
_SENTENCES = tuple(_tagged(f"tagged{i}", n) for i, n in enumerate((4, 9, 1, 6, 3)))


def _with(records: tuple[dict, ...], name: str, values: tuple) -> tuple[dict, ...]:
    return tuple(record | {name: value} for record, value in zip(records, values, strict=True))


_CLASSES = ("yes", "no", "perhaps", "yes", "yes")
_CLASS_OPTIONS = {"data": {"labels": LABELS}}
_TAG_OPTIONS = {"data": {"tags": TAGS}}

TASK_CASES = (
    TaskCase(  # single texts and pairs in one batch
        name="classification", kind="classification", options=_CLASS_OPTIONS,
        records=_with(_SINGLE[:2] + _PAIRS[2:], "label", _CLASSES),
    ),
    TaskCase(name="regression", kind="regression",
             records=_with(_PAIRS, "label", ("0.5", "2", "-1.25", "3.75", "1"))),
    TaskCase(
        name="multi_label", kind="multi_label", options=_CLASS_OPTIONS,
        records=_with(_SINGLE, "labels", (("yes",), (), ("no", "yes"), LABELS, ("perhaps",))),
    ),
    TaskCase(
        name="choice", kind="choice", options={"data": {"labels": ("0", "1", "2")}},
        records=tuple(
            {"text": _text(f"begin{i}", n), "choices": tuple(_text(f"choice{i}{k}", 2 + k) for k in range(3)),
             "label": label}
            for i, (n, label) in enumerate(((4, "2"), (1, "0"), (6, "1"), (2, "1")))
        ),
    ),
    TaskCase(
        name="qa", kind="qa", options={"qa": {"no_answer": True}},
        records=(_asked("qa0", 3, 9, (2, 4)), _asked("qa1", 2, 5, (0, 0)), _asked("qa2", 4, 7, (6, 6)),
                 _asked("qa3", 1, 6, None)),
    ),
    TaskCase(name="tagging", kind="tagging", options=_TAG_OPTIONS, records=_SENTENCES),
    TaskCase(
        name="joint", kind="joint", options={"data": {"tags": TAGS, "labels": LABELS}},
        records=_with(_SENTENCES, "label", _CLASSES),
    ),
    TaskCase(name="crf", kind="tagging", options=_TAG_OPTIONS | {"tagging": {"crf": True}}, records=_SENTENCES),
    TaskCase(name="bilstm", kind="tagging", options=_TAG_OPTIONS | {"features": {"bilstm_size": 6}},
             records=_SENTENCES),
    TaskCase(name="weighted_all", kind="tagging", options=_TAG_OPTIONS | {"features": {"layers": "weighted_all"}},
             records=_SENTENCES),
    TaskCase(
        name="weighted_last_four", kind="tagging", layers=5, records=_SENTENCES,
        options=_TAG_OPTIONS | {"features": {"layers": "weighted_last_four"}},
    ),
    TaskCase(  # through the pooler
        name="concat_last_four", kind="classification", layers=5,
        options=_CLASS_OPTIONS | {"features": {"layers": "concat_last_four"}},
        records=_with(_SINGLE, "label", _CLASSES),
    ),
    TaskCase(
        name="pair_softmax", kind="sentence", options=_CLASS_OPTIONS | {"sentence": {"loss": "softmax"}},
        records=_with(_PAIRS, "label", _CLASSES),
    ),
    TaskCase(
        name="pair_hidden", kind="sentence", records=_with(_PAIRS, "label", _CLASSES),
        options=_CLASS_OPTIONS
        | {"sentence": {"loss": "softmax", "hidden_size": 10, "normalize": True, "pooling": "max"}},
    ),
    TaskCase(  # with a hard negative each
        name="negatives", kind="sentence", options={"sentence": {"loss": "negatives"}},
        records=_with(_PAIRS, "negatives", tuple((_text(f"hard{i}", 3 + i),) for i in range(5))),
    ),
)  # fmt: skip
