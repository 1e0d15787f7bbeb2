"""Small random models for the tests of inference, and the plain way to run them: one text at a time, unpacked."""

import functools

import jax
import numpy as np
from builders import drawn, tiny_model, words

from bert_jax.config import HeadsConfig, ModelSpec, TokenizerConfig
from bert_jax.inference.loaded import prepare

# Compiled once per model.
PLAIN: dict = {}
PIECES = [*words(40), "##x", "##y", ",", "?"]


def make_weights(heads=None, sentence=None, max_length=0, positions=70, family="bert", seed=0, layers=2, types=2):
    """A model with every weight drawn, so that each of them shows in the outputs."""
    offset = 2 if family == "roberta" else 0
    spec = ModelSpec(
        model=tiny_model(
            len(PIECES) + 3, num_layers=layers, num_attention_heads=4, max_position_embeddings=positions,
            position_offset=offset, type_vocab_size=types,
        ),
        heads=heads or HeadsConfig(pooler=True),
        sentence=sentence,
        tokenizer=TokenizerConfig(max_length=max_length),
        family=family,
    )  # fmt: skip
    return drawn(spec, 0.2, PIECES, seed=seed)


def make_model(*arguments, **options):
    """:func:`make_weights`, ready for use and for changes."""
    return prepare(make_weights(*arguments, **options), name="small")


@functools.cache
def shared_model(*arguments, layers=1, **options):
    """A model of one layer with its compiled programs, for all tests that do not change it."""
    return make_model(*arguments, layers=layers, **options)


def plain(loaded, a, b=None):
    """``BertOutput`` of one text or pair that has the batch to itself, numpy; token outputs without padding."""
    tokenizer = loaded.tokenizer
    second = None if b is None else tokenizer.encode(b)
    ids, types = tokenizer.build_inputs(tokenizer.encode(a), second, loaded.spec.max_length)
    size = loaded.spec.max_length
    features = {name: np.zeros((1, size), np.int32) for name in ("input_ids", "token_type_ids", "sequence_ids")}
    features["input_ids"][0, : len(ids)] = ids
    if loaded.spec.model.type_vocab_size > 1:
        features["token_type_ids"][0, : len(ids)] = types
    features["sequence_ids"][0, : len(ids)] = 1
    features["position_ids"] = np.arange(size)[None]
    if "apply" not in PLAIN.setdefault(id(loaded), {"loaded": loaded}):
        PLAIN[id(loaded)]["apply"] = jax.jit(lambda params, batch: loaded.model.apply({"params": params}, batch))
    output = jax.tree.map(np.asarray, PLAIN[id(loaded)]["apply"](loaded.params, features))
    return output.replace(
        **{
            name: getattr(output, name)[:, : len(ids)]
            for name in ("sequence_output", "mlm_logits", "token_logits", "start_logits", "end_logits")
            if getattr(output, name) is not None
        }
    )


def random_texts(count, longest, seed=0):
    """Texts of 0 to ``longest`` words of the vocabulary."""
    rng = np.random.default_rng(seed)
    return [" ".join(f"w{i}" for i in rng.integers(0, 40, rng.integers(0, longest + 1))) for _ in range(count)]
