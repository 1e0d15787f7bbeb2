"""Continuation of texts by causal language models, against transformers and against the network without a cache."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden.family_cases import values
from golden.generation_case import FILTERS, NEW, drawn, logits, prompts
from hf_folders import FIXTURES, save
from inference_models import make_weights

from bert_jax.config import HeadsConfig
from bert_jax.contrib.generation.generate import (
    Sampling,
    cached_logits,
    filtered,
    generate,
    generate_ids,
    language_model,
)
from bert_jax.inference.loaded import load, prepare
from bert_jax.model import BertModel


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
    """The model of ``record_generation.py``."""
    folder = tmp_path_factory.mktemp("gpt2")
    told = json.loads((FIXTURES / "generation.json").read_text())
    (folder / "config.json").write_text(json.dumps(told["config"]))
    save(folder, {key: drawn(key, tuple(shape), values) for key, shape in told["tensors"].items()})
    return load(folder)


@pytest.fixture(scope="module")
def recorded():
    with np.load(FIXTURES / "generation.npz") as arrays:
        return dict(arrays)


def causal(heads=None, **options):
    """A small causal model with a vocabulary of words."""
    weights = make_weights(heads or HeadsConfig(), positions=100, **options)
    model = dataclasses.replace(weights.spec.model, attention="causal")
    return prepare(dataclasses.replace(weights, spec=dataclasses.replace(weights.spec, model=model)), name="small")


@pytest.mark.slow
def test_greedy_tokens_are_those_of_transformers(gpt2, recorded):
    assert json.loads((FIXTURES / "generation.json").read_text())["margin"] > 1e-4
    assert len(np.unique(recorded["tokens"])) > 20
    rows = generate_ids(gpt2, prompts(), max_new_tokens=NEW)
    assert [ids for ids, _ in rows] == recorded["tokens"].tolist()
    assert not any(ended for _, ended in rows)


@pytest.mark.slow
def test_a_row_ends_before_the_end_token_and_others_go_on(gpt2, recorded):
    tokens = recorded["tokens"][:, :40].tolist()
    end = next(token for token in tokens[0][5:] if 0 < sum(token in row for row in tokens) < len(tokens))
    rows = generate_ids(gpt2, prompts(), max_new_tokens=40, end_id=end)
    for (ids, ended), row in zip(rows, tokens, strict=True):
        assert ended == (end in row)
        assert ids == (row[: row.index(end)] if end in row else row)
    assert {ended for _, ended in rows} == {True, False}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gpt2", "rotary", "windows"])
def test_logits_with_a_cache_are_those_without(gpt2, kind):
    if kind == "gpt2":
        loaded = gpt2
    else:
        change = {"position_embeddings": "rotary"} if kind == "rotary" else {"attention_windows": (0, 3)}
        plain = causal()
        weights = make_weights(HeadsConfig(), positions=100)
        model = dataclasses.replace(plain.spec.model, **change)
        names = {name: array for name, array in weights.params.items() if "position_emb" not in name}
        params = names if kind == "rotary" else weights.params
        loaded = prepare(
            dataclasses.replace(weights, params=params, spec=dataclasses.replace(weights.spec, model=model))
        )
    network, vocabulary = language_model(loaded), loaded.spec.model.vocab_size
    rng = np.random.default_rng(0)
    lengths, columns, total = np.array([5, 2, 4]), 5, 17
    ids = rng.integers(1, vocabulary, (3, total))
    mask = (np.arange(total) >= columns - lengths[:, None]).astype(np.int32)
    positions = np.maximum(np.cumsum(mask, axis=1) - 1, 0)
    features = {"input_ids": ids, "token_type_ids": 0 * ids, "position_ids": positions, "sequence_ids": mask}
    apply = jax.jit(network.apply)
    whole = apply({"params": loaded.params}, {name: jnp.asarray(x) for name, x in features.items()})
    run = jax.jit(cached_logits, static_argnums=0)
    expected = np.asarray(whole.mlm_logits)
    cache, visible = {}, jnp.asarray(np.pad(mask, ((0, 0), (0, 3)), constant_values=1))
    for start, end in ((0, 5), *((i, i + 1) for i in range(5, 12)), (12, 17)):
        part = (jnp.asarray(x[:, start:end]) for x in (ids, mask, positions))
        found, cache = run(network, loaded.params, cache, *part, visible, jnp.int32(start))
        np.testing.assert_allclose(found, expected[:, end - 1], atol=1e-5 * max(1, np.abs(expected).max()), rtol=0)


@pytest.mark.parametrize("case", range(len(FILTERS)))
def test_filters_keep_the_tokens_that_transformers_keeps(recorded, case):
    temperature, top_k, top_p = FILTERS[case]
    given = jnp.asarray(logits() / np.float32(temperature))
    found = np.asarray(filtered(given, jnp.int32(top_k), jnp.float32(top_p)))
    kept = recorded[f"kept_{case}"]
    assert np.array_equal(np.isfinite(found), kept) and kept.any(axis=1).all()
    assert np.array_equal(found[kept], np.asarray(given)[kept])


class TestDraws:
    def run(self, gpt2, given, **settings):
        first = settings.pop("first", 0)
        return [ids for ids, _ in generate_ids(
            gpt2, given, max_new_tokens=12, sampling=Sampling(**settings), first=first
        )]  # fmt: skip

    @pytest.mark.slow
    def test_depend_on_the_seed_and_the_number_of_the_text_only(self, gpt2):
        given = prompts()
        rows = self.run(gpt2, given, temperature=1.0, seed=3)
        assert rows == self.run(gpt2, given, temperature=1.0, seed=3)
        assert rows != self.run(gpt2, given, temperature=1.0, seed=4)
        assert rows[2:] == self.run(gpt2, given[2:], temperature=1.0, seed=3, first=2)
        same = self.run(gpt2, [given[0]] * 3, temperature=1.0, seed=3)
        assert same[0] != same[1] != same[2]

    def test_of_one_token_are_greedy(self, gpt2, recorded):
        greedy = recorded["tokens"][:, :12].tolist()
        assert self.run(gpt2, prompts(), temperature=2.0, top_k=1, seed=5) == greedy
        assert self.run(gpt2, prompts(), temperature=2.0, top_p=1e-6, seed=5) == greedy

    @pytest.mark.slow
    def test_have_the_probabilities_of_the_filtered_logits(self, gpt2):
        count = 400
        rows = [ids[0] for ids, _ in generate_ids(
            gpt2, [prompts()[0]] * count, max_new_tokens=1, sampling=Sampling(temperature=3.0, top_k=3, seed=1)
        )]  # fmt: skip
        network = language_model(gpt2)
        ids = jnp.asarray([prompts()[0]])
        ones = jnp.ones_like(ids)
        given, _ = cached_logits(
            network, gpt2.params, {}, ids, ones, jnp.cumsum(ones, axis=1) - 1, ones, jnp.int32(0)
        )
        kept = np.float64(filtered(given / 3.0, jnp.int32(3), jnp.float32(1))[0])
        shares = np.exp(kept - kept.max()) / np.exp(kept - kept.max()).sum()
        found = np.bincount(rows, minlength=len(kept)) / count
        assert (found[shares == 0] == 0).all()
        assert np.abs(found - shares).max() < 4 * 0.5 / np.sqrt(count)


class TestTexts:
    @pytest.mark.slow
    def test_batches_and_padding_do_not_change_a_continuation(self):
        loaded = causal()
        texts = ["w1 w2 w3 w4 w5 w6 w7", "w3", "", "w9 w9", "w20 w21 w3 w4 w1"]
        for settings in ({}, {"temperature": 1.0, "seed": 2}):
            options = {"max_new_tokens": 9, "sampling": Sampling(**settings)}
            alone = list(generate(loaded, texts, batch_size=1, **options))
            assert alone == list(generate(loaded, iter(texts), batch_size=3, **options))
            assert [row.prompt for row in alone] == texts
            assert all(len(row.ids) == 9 or row.ended for row in alone)
            assert alone[0].text == loaded.tokenizer.decode(alone[0].ids)

    @pytest.mark.slow
    def test_the_most_probable_token_follows_the_framed_text_without_its_separator(self):
        loaded = causal()
        tokenizer = loaded.tokenizer
        (row,) = generate(loaded, ["w1 w2"], max_new_tokens=3)
        ids = [tokenizer.cls_id, *tokenizer.encode("w1 w2")]
        network: BertModel = language_model(loaded)
        apply = jax.jit(network.apply)
        for token in row.ids:
            padded = jnp.asarray([ids + [0] * (10 - len(ids))])
            features = {"input_ids": padded, "token_type_ids": 0 * padded, "sequence_ids": 0 * padded + 1}
            features["position_ids"] = jnp.arange(10)[None]
            output = apply({"params": loaded.params}, features)
            assert token == int(output.mlm_logits[0, len(ids) - 1, : tokenizer.vocab_size].argmax())
            ids.append(token)

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            ({"max_new_tokens": 0}, "max_new_tokens: 0 is not allowed; use 1 or more"),
            ({"batch_size": 0}, "batch_size: 0 is not allowed"),
            (
                {"max_new_tokens": 99},
                "text 0: 2 tokens and 99 new ones are not allowed",
            ),
        ],
    )
    def test_what_is_refused(self, options, words):
        with pytest.raises(ValueError, match=words):
            list(generate(causal(), ["w1"], **options))

    @pytest.mark.parametrize(
        ("name", "value"), [("temperature", -1.0), ("top_k", -1), ("top_p", 0.0), ("top_p", 1.5), ("seed", -1)]
    )
    def test_refused_settings(self, name, value):
        with pytest.raises(ValueError, match=f"{name}: {value} is not allowed; use "):
            Sampling(**{name: value})

    def test_models_that_cannot_generate(self):
        plain = prepare(make_weights(HeadsConfig(mlm=True)), name="small")
        with pytest.raises(ValueError, match="small: a bidirectional model cannot generate text"):
            list(generate(plain, ["w1"]))
        with pytest.raises(ValueError, match="small: no language-model head, only token; use a model that has one"):
            list(generate(causal(HeadsConfig(token_labels=("a", "b"))), ["w1"]))
        alibi = causal()
        alibi.spec = dataclasses.replace(
            alibi.spec, model=dataclasses.replace(alibi.spec.model, relative_positions="alibi")
        )
        with pytest.raises(ValueError, match=r"does not support model\.relative_positions alibi"):
            list(generate(alibi, ["w1"]))
