"""Models, weights and batches that the recording scripts and the parity tests share. Needs numpy alone.

Nothing here is stored: every array follows from its name through raw PCG64 output, which numpy keeps stable
across versions (its distributions are not). Weights carry the project's canonical parameter names; kernels
are [in, out].
"""

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np


@dataclass(frozen=True, kw_only=True)
class Case:
    """One model and one batch. ``model`` holds fields of ``ModelConfig``; every dropout rate is 0."""

    name: str
    model: dict[str, int | str] = field(hash=False)
    seq_length: int
    lengths: tuple[int, ...]  # real tokens of each row, the rest is padding
    masked: tuple[int, ...]  # masked positions of each row, of max_predictions slots
    max_predictions: int
    gradients: bool = True  # whether the fixture holds the gradient of every parameter


def _model(layers: int, hidden: int, heads: int, inner: int, vocab: int, positions: int, **other) -> dict:
    sizes = {
        "num_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "intermediate_size": inner,
        "vocab_size": vocab,
        "max_position_embeddings": positions,
        "type_vocab_size": 2,
        "activation": "gelu",
    }
    return sizes | other


MODEL_CASES = (
    Case(
        name="padded", model=_model(2, 32, 4, 64, 97, 24),
        seq_length=16, lengths=(16, 9, 5), masked=(3, 2, 1), max_predictions=3,
    ),
    Case(  # head size 7, odd length, odd vocabulary, three segments
        name="odd_sizes", model=_model(3, 35, 5, 51, 101, 17, type_vocab_size=3),
        seq_length=13, lengths=(13, 11), masked=(4, 1), max_predictions=5,
    ),
    Case(  # one layer, one head, one segment, a row without masked positions
        name="one_layer", model=_model(1, 24, 1, 40, 64, 7, type_vocab_size=1),
        seq_length=7, lengths=(7, 4, 7, 3), masked=(2, 0, 1, 1), max_predictions=2,
    ),
    Case(name="deep", model=_model(5, 32, 2, 48, 89, 32),
         seq_length=24, lengths=(24, 17), masked=(4, 3), max_predictions=4),
    Case(  # longer than 128, mostly padding
        name="long", model=_model(2, 16, 2, 32, 300, 160),
        seq_length=131, lengths=(131, 29), masked=(20, 4), max_predictions=20,
    ),
    Case(name="no_padding", model=_model(2, 48, 3, 96, 150, 20),
         seq_length=20, lengths=(20,) * 4, masked=(3,) * 4, max_predictions=3),
    Case(name="tanh_gelu", model=_model(2, 32, 2, 64, 97, 16, activation="gelu_tanh"),
         seq_length=12, lengths=(12, 7), masked=(2, 1), max_predictions=2),
    Case(  # width and depth of BERT-base
        name="base_width", model=_model(12, 768, 12, 3072, 1009, 64),
        seq_length=31, lengths=(31, 20), masked=(5, 3), max_predictions=5, gradients=False,
    ),
)  # fmt: skip

CURVE_MODEL = _model(2, 32, 2, 64, 120, 24)
CURVE_STEPS = 50
CURVE_WARMUP = 10
CURVE_PEAK = 3e-3
# Different batches, each seen several times, so that the loss falls.
CURVE_BATCHES = 7


def curve_case(step: int) -> Case:
    """The batch of one step of the recorded loss curves."""
    k = step % CURVE_BATCHES
    return Case(
        name=f"curve_{k}", model=CURVE_MODEL, seq_length=16, max_predictions=3,
        lengths=(16, 16, 12, 16, 7, 16, 9, 14 - k), masked=(3, 3, 2, 3, 1, 3, 1, 2),
    )  # fmt: skip


def uniform(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """float64 in [0, 1), from the name alone."""
    raw = np.random.PCG64(zlib.crc32(name.encode())).random_raw(int(np.prod(shape)))
    return ((raw >> np.uint64(11)) * 2.0**-53).reshape(shape)


def integers(name: str, low: int, high: int, shape: tuple[int, ...]) -> np.ndarray:
    """int32 in [low, high), from the name alone."""
    return (low + uniform(name, shape) * (high - low)).astype(np.int32)


def parameter_shapes(model: Mapping[str, int | str]) -> dict[str, tuple[int, ...]]:
    """Canonical name -> shape of every parameter, both heads included."""
    hidden, inner, vocab = model["hidden_size"], model["intermediate_size"], model["vocab_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings/word_embeddings/embedding": (vocab, hidden),
        "embeddings/token_type_embeddings/embedding": (model["type_vocab_size"], hidden),
        "embeddings/position_embeddings/embedding": (model["max_position_embeddings"], hidden),
        "embeddings/layer_norm/scale": (hidden,),
        "embeddings/layer_norm/bias": (hidden,),
    }

    def dense(name: str, inputs: int, outputs: int) -> None:
        shapes[f"{name}/kernel"] = (inputs, outputs)
        shapes[f"{name}/bias"] = (outputs,)

    def layer_norm(name: str) -> None:
        shapes[f"{name}/layer_norm/scale"] = (hidden,)
        shapes[f"{name}/layer_norm/bias"] = (hidden,)

    for i in range(model["num_layers"]):
        layer = f"encoder/layer_{i}"
        for part in ("query", "key", "value", "output"):
            dense(f"{layer}/attention/{part}", hidden, hidden)
        layer_norm(f"{layer}/attention")
        dense(f"{layer}/feed_forward/intermediate", hidden, inner)
        dense(f"{layer}/feed_forward/output", inner, hidden)
        layer_norm(f"{layer}/feed_forward")
    dense("pooler", hidden, hidden)
    dense("mlm_head/transform", hidden, hidden)
    layer_norm("mlm_head")
    shapes["mlm_head/output_bias"] = (vocab,)
    dense("nsp_head", hidden, 2)
    return shapes


def weights(model: Mapping[str, int | str]) -> dict[str, np.ndarray]:
    """float32 parameters under canonical names, scaled so that no activation is degenerate: attention is
    uneven, LayerNorm scales lie around 1, no bias is 0, logits have a standard deviation of about 1.5."""
    result = {}
    for name, shape in parameter_shapes(model).items():
        u = 2 * uniform(name, shape) - 1
        if name.endswith("layer_norm/scale"):
            value = 1 + 0.2 * u
        elif name.endswith("bias"):
            value = 0.2 * u
        else:
            fan_in = model["hidden_size"] if name.endswith("embedding") else shape[0]
            gain = 1.5 if name.endswith("embedding") else 1.0
            value = u * gain * (3 / fan_in) ** 0.5
        result[name] = value.astype(np.float32)
    return result


def batch(case: Case) -> dict[str, np.ndarray]:
    """The case's batch, with the names, shapes and dtypes of ``bert_jax.batch``.

    Padding has id 0 and real tokens never have: transformers gives row 0 of its word embeddings no gradient
    from the lookup.
    """
    rows, length, slots = len(case.lengths), case.seq_length, case.max_predictions
    vocab, segments = int(case.model["vocab_size"]), int(case.model["type_vocab_size"])
    steps = np.broadcast_to(np.arange(length), (rows, length))
    lengths = np.asarray(case.lengths)[:, None]
    real = steps < lengths
    filled = np.arange(slots) < np.asarray(case.masked)[:, None]

    positions = np.zeros((rows, slots), np.int32)
    for row, count in enumerate(case.masked):
        order = np.argsort(uniform(f"{case.name}/positions/{row}", (case.lengths[row] - 1,)))
        positions[row, :count] = np.sort(order[:count] + 1)
    return {
        "input_ids": np.where(real, integers(f"{case.name}/ids", 1, vocab, (rows, length)), 0),
        "token_type_ids": np.where(real, steps * segments // lengths, 0).astype(np.int32),
        "sequence_ids": real.astype(np.int32),
        "position_ids": steps.astype(np.int32),
        "sequence_keys": np.arange(rows, dtype=np.uint32)[:, None],
        "mlm_positions": positions,
        "mlm_labels": np.where(filled, integers(f"{case.name}/labels", 1, vocab, (rows, slots)), 0),
        "mlm_weights": filled.astype(np.float32),
        "cls_positions": np.zeros((rows, 1), np.int32),
        "nsp_labels": integers(f"{case.name}/nsp", 0, 2, (rows, 1)),
        "nsp_weights": np.ones((rows, 1), np.float32),
    }


def causal_batch(step: int) -> dict[str, np.ndarray]:
    """The batch of one step of the causal language model's curve: ``curve_case`` with two sequences in two rows."""
    features = batch(curve_case(step))
    for row, first in ((1, 9), (3, 4)):
        length = features["sequence_ids"].shape[1]
        features["sequence_ids"][row, first:] = 2
        features["position_ids"][row, first:] = np.arange(length - first)
    return features


def original_tokens(features: Mapping[str, np.ndarray]) -> np.ndarray:
    """The ids before masking: the label stands where its slot says."""
    tokens = features["input_ids"].copy()
    rows, slots = np.nonzero(features["mlm_weights"])
    tokens[rows, features["mlm_positions"][rows, slots]] = features["mlm_labels"][rows, slots]
    return tokens


def learning_rate(step: int, *, bert2018: bool) -> float:
    """Rate of the recorded curves at a step counted from 0: linear warmup from 0, then linear decay to 0 at
    the last step; from the peak, or (``bert2018``) counted from step 0."""
    if step < CURVE_WARMUP:
        return CURVE_PEAK * step / CURVE_WARMUP
    first = 0 if bert2018 else CURVE_WARMUP
    return CURVE_PEAK * (CURVE_STEPS - step) / (CURVE_STEPS - first)


def is_decayed(name: str) -> bool:
    """Whether weight decay applies to the parameter with this canonical name."""
    return not (name.endswith("bias") or "/layer_norm/" in name)


# ------------------------------------------------------------------ replaced token detection

SHARINGS = ("shared", "none", "disentangled")
# The generator has half the width of the discriminator (CURVE_MODEL), and one head.
GENERATOR_MODEL = CURVE_MODEL | {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 1}


def rtd_weights(sharing: str) -> dict[str, np.ndarray]:
    """float32 parameters of generator and discriminator under canonical names, scaled as in :func:`weights`."""
    width, narrow, vocab = CURVE_MODEL["hidden_size"], GENERATOR_MODEL["hidden_size"], CURVE_MODEL["vocab_size"]
    result = {}
    for network, model in (("discriminator", CURVE_MODEL), ("generator", GENERATOR_MODEL)):
        for name, value in weights(model).items():
            if name.startswith("encoder/"):
                result[f"{network}/{name}"] = value
    tables = {name: value for name, value in weights(CURVE_MODEL).items() if name.startswith("embeddings/")}
    small = {name: value for name, value in weights(GENERATOR_MODEL).items() if name.startswith("embeddings/")}
    of_discriminator = dict(tables)
    if sharing == "disentangled":
        for part in ("word", "position"):
            name = f"embeddings/{part}_embeddings/embedding"
            of_discriminator[name] = np.zeros_like(tables[name])
    result |= {f"discriminator/{name}": value for name, value in of_discriminator.items()}
    if sharing != "shared":
        of_generator = small if sharing == "none" else tables
        result |= {f"generator/{name}": value for name, value in of_generator.items()}

    def dense(name: str, inputs: int, outputs: int) -> None:
        kernel = 2 * uniform(f"{name}/kernel", (inputs, outputs)) - 1
        result[f"{name}/kernel"] = (kernel * (3 / inputs) ** 0.5).astype(np.float32)
        result[f"{name}/bias"] = (0.2 * (2 * uniform(f"{name}/bias", (outputs,)) - 1)).astype(np.float32)

    embedding = narrow if sharing == "none" else width
    if embedding != narrow:
        dense("generator/embeddings/projection", embedding, narrow)
    dense("generator/mlm_head/transform", narrow, embedding)
    head = "generator/mlm_head"
    result[f"{head}/layer_norm/scale"] = (0.8 + 0.4 * uniform(f"{head}/scale", (embedding,))).astype(np.float32)
    result[f"{head}/layer_norm/bias"] = (0.4 * uniform(f"{head}/norm_bias", (embedding,)) - 0.2).astype(np.float32)
    result[f"{head}/output_bias"] = (0.4 * uniform(f"{head}/output_bias", (vocab,)) - 0.2).astype(np.float32)
    dense("discriminator/rtd_head/transform", width, width)
    dense("discriminator/rtd_head/output", width, 1)
    return result


def rtd_batch(step: int) -> dict[str, np.ndarray]:
    """The batch of one step, with Gumbel noise float32[B, M, V] for the samples of the generator as ``noise``."""
    features = causal_batch(step)
    shape = (*features["mlm_positions"].shape, CURVE_MODEL["vocab_size"])
    noise = -np.log(-np.log(uniform(f"gumbel/{step}", shape) * (1 - 2e-7) + 1e-7))
    return features | {"noise": noise.astype(np.float32)}


# ------------------------------------------------------------------ classes of documents

CURVE_CLASSES = ("law", "medicine", "code")
CURVE_CLASS_WEIGHT = 0.7


def class_weights() -> dict[str, np.ndarray]:
    """The shared weights, and those of the class head."""
    shape = (CURVE_MODEL["hidden_size"], len(CURVE_CLASSES))
    kernel = (2 * uniform("sequence_head/kernel", shape) - 1) * (3 / shape[0]) ** 0.5
    bias = 0.2 * (2 * uniform("sequence_head/bias", shape[1:]) - 1)
    head = {"sequence_head/kernel": kernel.astype(np.float32), "sequence_head/bias": bias.astype(np.float32)}
    return weights(CURVE_MODEL) | head


def class_batch(step: int) -> dict[str, np.ndarray]:
    """The batch of one step: ``curve_case`` with the classes of its rows, about a third of which have none."""
    features = batch(curve_case(step))
    rows = len(features["input_ids"])
    name = f"classes/{step % CURVE_BATCHES}"
    return features | {"document_classes": integers(name, 0, 1 + len(CURVE_CLASSES), (rows, 1))}


# ------------------------------------------------------------------ masked language models

# Name -> options of the masks (``bert_jax.config.DataConfig``). With nsp and sop there is a sentence-pair head.
MASKED_LENGTH, MASKED_SLOTS = 24, 8
MASKINGS: dict[str, dict[str, object]] = {
    "none": {"next_sentence": "none"},
    "nsp": {"next_sentence": "nsp"},
    "sop": {"next_sentence": "sop"},
    "whole_word": {"next_sentence": "none", "mask_unit": "whole_word"},
    "span": {"next_sentence": "none", "mask_unit": "span", "mask_fraction": 0.25},
    "all_mask": {"next_sentence": "nsp", "mask_unit": "span", "mask_token_share": 1.0, "random_token_share": 0.0},
    "special": {"next_sentence": "nsp", "mask_special_tokens": True},
    "annealed": {
        "next_sentence": "none",
        "masking": "dynamic",
        "mask_fraction": 0.35,
        "final_masking": (0.1, CURVE_STEPS),
    },
}
MASKED_ARRAYS = ("input_ids", "mlm_positions", "mlm_labels", "mlm_weights")
MASKED_BATCHES = Path(__file__).parent / "fixtures" / "masked_batches.npz"
CLS, SEP, MASK = 1, 2, 3


def unmasked_batch(pairs: str, step: int) -> dict[str, np.ndarray]:
    """Rows [CLS] A [SEP] (``pairs`` none) or [CLS] A [SEP] B [SEP] before masking. Where the label is 1, B is that
    of another row (nsp) or in the place of A (sop). ``words`` marks the first tokens of words."""
    k, rows, length = step % CURVE_BATCHES, 8, MASKED_LENGTH
    sizes = integers(f"masked_{k}/lengths", 4, 10, (rows, 2))
    texts = integers(f"masked_{k}/ids", 4, CURVE_MODEL["vocab_size"], (rows, 2, length))
    labels = integers(f"masked_{k}/labels", 0, 2, (rows,)) * (pairs != "none")
    features = {
        name: np.zeros((rows, length), np.int32) for name in ("input_ids", "token_type_ids", "sequence_ids")
    }
    for row in range(rows):
        a, b = (texts[row, part, : sizes[row, part]] for part in (0, 1))
        if labels[row]:
            other = texts[(row + 3) % rows, 1, : sizes[row, 1]]
            a, b = (a, other) if pairs == "nsp" else (b, a)
        ids = [CLS, *a, *([*b] if pairs == "none" else [SEP, *b]), SEP]
        features["input_ids"][row, : len(ids)] = ids
        features["sequence_ids"][row, : len(ids)] = 1
        if pairs != "none":
            features["token_type_ids"][row, len(a) + 2 : len(ids)] = 1
    column = np.broadcast_to(np.arange(length, dtype=np.int32), (rows, length))
    return features | {
        "words": uniform(f"masked_{k}/words", (rows, length)) < 0.6,
        "position_ids": column,
        "sequence_keys": np.arange(rows, dtype=np.uint32)[:, None],
        "cls_positions": np.zeros((rows, 1), np.int32),
        "nsp_labels": labels[:, None].astype(np.int32),
        "nsp_weights": np.full((rows, 1), pairs != "none", np.float32),
    }


def masked_batch(name: str, step: int) -> dict[str, np.ndarray]:
    """The batch of a step, masked by this library (``test_masked_curves.py`` makes the file)."""
    with np.load(MASKED_BATCHES) as stored:
        arrays = {key: stored[f"{name}/{key}"] for key in MASKED_ARRAYS}
    given = unmasked_batch(str(MASKINGS[name]["next_sentence"]), step)
    del given["words"]
    place = step % len(arrays["input_ids"])
    dtypes = dict.fromkeys(MASKED_ARRAYS, np.int32) | {"mlm_weights": np.float32}
    return given | {key: array[place].astype(dtypes[key]) for key, array in arrays.items()}


def masked_weights(name: str) -> dict[str, np.ndarray]:
    """float32 parameters of the model, without a pooler and a sentence-pair head if there are no pairs."""
    is_pair, of_pairs = MASKINGS[name]["next_sentence"] != "none", ("pooler/", "nsp_head/")
    return {key: value for key, value in weights(CURVE_MODEL).items() if is_pair or not key.startswith(of_pairs)}


# ------------------------------------------------------------------ fine-tuning of a causal model

GPT_CLASSES, GPT_WEIGHT = 3, 0.5


def gpt_weights() -> dict[str, np.ndarray]:
    """float32 parameters of the encoder and of the sequence head, which has no bias."""
    given = {k: v for k, v in weights(CURVE_MODEL).items() if k.startswith(("embeddings/", "encoder/"))}
    kernel = 2 * uniform("gpt/sequence_head", (CURVE_MODEL["hidden_size"], GPT_CLASSES)) - 1
    return given | {"sequence_head/kernel": (kernel * (3 / len(kernel)) ** 0.5).astype(np.float32)}


def gpt_batch(step: int) -> dict[str, np.ndarray]:
    """Pairs start A delimiter B extract (ids 1, 2, 3), two in each row, in a row with an empty place only one."""
    k, rows, length = step % CURVE_BATCHES, 8, MASKED_LENGTH
    sizes = integers(f"gpt_{k}/lengths", 2, 5, (rows, 2, 2))
    texts = integers(f"gpt_{k}/ids", 4, CURVE_MODEL["vocab_size"], (rows, 2, 2, 5))
    names = "input_ids", "token_type_ids", "sequence_ids", "position_ids"
    features = {name: np.zeros((rows, length), np.int32) for name in names}
    weights = np.ones((rows, 2), np.float32)
    weights[k % rows, 1] = 0
    for row in range(rows):
        end = 0
        for slot in range(int(weights[row].sum())):
            a, b = (texts[row, slot, part, : sizes[row, slot, part]] for part in (0, 1))
            ids = [1, *a, 2, *b, 3]
            start, end = end, end + len(ids)
            features["input_ids"][row, start:end] = ids
            features["sequence_ids"][row, start:end] = slot + 1
            features["position_ids"][row, start:end] = np.arange(len(ids))
    labels = integers(f"gpt_{k}/labels", 0, GPT_CLASSES, (rows, 2)) * (weights > 0)
    places = np.zeros((rows, 2), np.int32)  # read by no model that pools the last token
    keys = np.arange(2 * rows, dtype=np.uint32).reshape(rows, 2)
    more = {"cls_positions": places, "sequence_keys": keys, "labels": labels.astype(np.int32), "weights": weights}
    return features | more
