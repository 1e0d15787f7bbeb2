"""The arrays of transformers that studies/xlnet/reference.py stored, and the models that computed them."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from bert_jax_xlnet.config import xlnet_config
from bert_jax_xlnet.folder import _from_tensor, _names
from bert_jax_xlnet.objective import TwoStreamModel
from flax import linen as nn

from bert_jax.config import ExecutionConfig, HeadsConfig, ModelSpec
from bert_jax.interop.model_bundle import parameter_shapes
from bert_jax.model import BertModel
from bert_jax.model.canonical import abstract_params, from_canonical, to_canonical

FILE = Path(__file__).with_name("reference.npz")
SIZES = {"vocab_size": 29, "hidden_size": 8, "num_layers": 2, "num_attention_heads": 2, "intermediate_size": 12}
EXECUTION = ExecutionConfig(vocab_multiple=1)
LABELS = ("LABEL_0", "LABEL_1", "LABEL_2")


def spec_of(heads, **values):

    dropout = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
    return ModelSpec(model=xlnet_config(**SIZES | dropout | values), heads=heads)


def lm_spec():
    return spec_of(HeadsConfig(mlm=True), memory_length=7, largest_distance=5)


def class_spec():
    return spec_of(HeadsConfig(pooler=True, sequence_labels=LABELS))


def params_of(spec, flat):
    """The canonical parameters of ``spec`` from the values of ``flat``, sorted by the names of the tensors."""

    names, shapes, found, at = _names(spec.model, spec.heads), parameter_shapes(spec), {}, 0
    for ours, (_, is_turned, shape) in sorted(names.items(), key=lambda item: item[1][0]):
        count = int(np.prod(shape))
        found[ours] = _from_tensor(flat[at : at + count].reshape(shape), is_turned, shapes[ours])
        at += count
    assert at == len(flat)
    return found


def tree_of(model, params):
    return from_canonical(params, nn.unbox(abstract_params(model)), model.config.vocab_size)


def batch_of(stored, which):
    """The features of one of the stored batches, in the order of bert_jax."""
    own = {name: stored[f"{which}/{name}"].astype(np.int32) for name in ("own_ids", "own_types", "own_targets")}
    batch, length = own["own_ids"].shape
    sizes = stored[f"{which}/sizes"].astype(int)
    return {
        "input_ids": own["own_ids"], "token_type_ids": own["own_types"], "target_positions": own["own_targets"],
        "position_ids": np.broadcast_to(np.arange(length, dtype=np.int32), (batch, length)),
        "sequence_ids": (np.arange(length) < sizes[:, None]).astype(np.int32),
        "perm_mask": stored[f"{which}/own_perm_mask"],
    }  # fmt: skip


def lm_of(spec):

    return TwoStreamModel(spec.model, EXECUTION, spec.heads)


def worst(found, expected):
    """Largest difference relative to the largest expected value."""
    return float(np.abs(np.asarray(found, np.float64) - expected).max() / np.abs(expected).max())


def differences(stored):
    """Largest relative difference of each output, and of the gradient of each parameter."""
    spec = lm_spec()
    model, params = lm_of(spec), params_of(spec, stored["weights"] / np.float32(64))
    tree, second = tree_of(model, params), batch_of(stored, "second")
    first = batch_of(stored, "first") | {"cache_start": jnp.zeros((), jnp.int32)}
    own_places, found = stored["second/own_places"].astype(int), {}

    @jax.jit
    def compute(tree, first, second, cache, any_mask):
        variables = {"params": tree}
        ids = [second[n] for n in ("input_ids", "token_type_ids", "position_ids")]
        x, table = model.apply(variables, *ids, None, method=lambda m, *rest: m.embeddings(*rest))
        tokens = {n: second[n] for n in ("sequence_ids", "position_ids", "token_type_ids")}
        head = lambda m, x, table: m.mlm_head(m.encoder(x, tokens, None)[0], table)  # noqa: E731
        one = model.apply(variables, x, table, method=head)
        anyone = model.apply(variables, second | {"perm_mask": any_mask}).mlm_logits
        filled = model.apply({**variables, "cache": cache}, first, mutable=["cache"])[1]["cache"]

        def loss(tree):
            features = second | {"cache_start": jnp.zeros((), jnp.int32)}
            output, _ = model.apply({"params": tree, "cache": filled}, features, mutable=["cache"])
            labels = jnp.take_along_axis(second["input_ids"], second["target_positions"], axis=1)
            log_p = jax.nn.log_softmax(output.mlm_logits)
            return -jnp.mean(jnp.take_along_axis(log_p, labels[..., None], axis=-1)), output.mlm_logits

        (value, two), grads = jax.value_and_grad(loss, has_aux=True)(tree)
        return one, anyone, filled, value, two, grads

    empty = {"encoder": {"memory": jnp.zeros((2, 2, 7, 8)), "held": jnp.zeros((2, 7), bool)}}
    mask = np.take_along_axis(stored["logits/any_mask/mask"], own_places[:, :, None], 1)
    mask = np.take_along_axis(mask, own_places[:, None], 2)
    with jax.default_matmul_precision("highest"):
        one, anyone, filled, value, two, grads = compute(tree, first, second, empty, mask)
    theirs = np.take_along_axis(stored["logits/one_stream"], own_places[..., None], 1)
    real = second["sequence_ids"] > 0
    found["logits, one stream"] = worst(np.asarray(one)[real], theirs[real])
    found["logits, any perm_mask"] = worst(anyone, stored["logits/any_mask"])
    found["memory"] = worst(np.asarray(filled["encoder"]["memory"])[:, :, 1:], stored["memory"])
    found["logits, two streams and memory"] = worst(two, stored["logits/two_streams"])
    found["loss"] = abs(float(value) - float(stored["loss"])) / float(stored["loss"])
    expected = params_of(spec, stored["gradients"])
    ours = {name: np.asarray(x) for name, x in to_canonical(grads, 29).items()}
    found |= {f"gradient {name}": worst(ours[name], expected[name]) for name in expected}
    return found


def classes(stored):
    """The logits of a classifier, for the one stored row without padding."""
    spec = class_spec()
    model = BertModel(spec.model, EXECUTION, spec.heads)
    tree = tree_of(model, params_of(spec, stored["classifier"] / np.float32(64)))
    # The encoder of fine-tuning gets no token types: only the class token is a segment of its own.
    row = {name: x[:1] for name, x in batch_of(stored, "second").items()}
    apply = jax.jit(lambda row: model.apply({"params": tree}, row).sequence_logits)
    return np.asarray(apply({n: x for n, x in row.items() if n not in ("perm_mask", "target_positions")}))[:, 0]


def random_features(rows, length, targets):
    """A batch without padding, whose targets are those of a permutation language model."""
    rng = np.random.default_rng(3)
    places = np.stack([np.sort(1 + rng.permutation(length - 2)[:targets]) for _ in range(rows)])
    ids = rng.integers(5, 28, (rows, length))
    return {
        "input_ids": ids.astype(np.int32), "token_type_ids": np.zeros((rows, length), np.int32),
        "sequence_ids": np.ones((rows, length), np.int32),
        "sequence_keys": np.arange(rows, dtype=np.uint32)[:, None],
        "position_ids": np.tile(np.arange(length, dtype=np.int32), (rows, 1)),
        "mlm_positions": places.astype(np.int32), "mlm_weights": np.ones((rows, targets), np.float32),
        "mlm_labels": np.take_along_axis(ids, places, 1).astype(np.int32),
    }  # fmt: skip
