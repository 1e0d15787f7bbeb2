"""Pictures: their numbers against loops over the definitions, and a page that is whole, small and safe."""

import base64
import dataclasses
import html.parser
import json
import re

import numpy as np
import pytest
from builders import content, drawn, tiny_model, words
from drawn_families import drawn_specs, random_params
from inference_models import PIECES, make_model, make_weights, shared_model

from bert_jax.commands.main import main
from bert_jax.config import HeadsConfig, ModelSpec, TokenizerConfig
from bert_jax.contrib.pictures import picture as module
from bert_jax.contrib.pictures.attention import (
    entropy,
    equal_attention,
    mean_distance,
    place_heads,
    rollout,
    special_share,
)
from bert_jax.contrib.pictures.nearest_words import NearestWords, above_random
from bert_jax.contrib.pictures.page import _map_verdict, _nearest_verdict, direction
from bert_jax.contrib.pictures.words_map import principal_components, read_words
from bert_jax.inference.loaded import prepare
from bert_jax.interop.hf.families import FAMILIES
from bert_jax.interop.model_bundle import ModelBundle
from bert_jax.interop.saved_model import write_saved

TEXT = "w1 w2 w30 w4x w5"


@pytest.fixture(scope="module")
def loaded():
    return make_model()


@pytest.fixture(scope="module")
def found(loaded):
    return loaded.picture(TEXT, words=["w1", "w2", "w3", "w4xy"], layer=2, head=3)


class Page(html.parser.HTMLParser):
    """The tags of a page, and what its elements with an id contain."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.open, self.of_id, self.attributes = [], [], {}, []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [name for name, _ in attrs]
        self.open.append(dict(attrs).get("id"))
        if tag in ("meta", "input"):
            self.open.pop()

    def handle_endtag(self, tag):
        self.open.pop()

    def handle_data(self, data):
        if self.open and self.open[-1]:
            self.of_id[self.open[-1]] = data

    @property
    def data(self):
        return json.loads(self.of_id["data"])

    @property
    def values(self):
        data, count = self.data, len(self.data["tokens"])
        flat = np.frombuffer(base64.b64decode(self.of_id["values"]), np.uint8)
        return (flat.reshape(data["layers"], data["heads"] + 1, count, count) / 255) ** 2


def test_numbers_of_attention_follow_their_definitions():
    rng = np.random.default_rng(0)
    attentions = rng.dirichlet(np.full(4, 0.5), (3, 2, 4)).astype(np.float32)
    attentions[0, 0, 0] = [1, 0, 0, 0]
    flows = rollout(attentions)
    entropies, distances = entropy(attentions), mean_distance(attentions)
    before = [[float(i == j) for j in range(4)] for i in range(4)]
    for layer in range(3):
        after = [[0.0] * 4 for _ in range(4)]
        for i in range(4):
            for k in range(4):
                step = 0.5 * sum(float(attentions[layer, head, i, k]) for head in range(2)) / 2 + 0.5 * (i == k)
                for j in range(4):
                    after[i][j] += step * before[k][j]
        assert np.allclose(flows[layer], after, atol=1e-6) and np.allclose(flows[layer].sum(axis=1), 1)
        before = after
        for head in range(2):
            rows = attentions[layer, head].tolist()
            own = [-sum(p * np.log(p) for p in row if p) for row in rows]
            far = [sum(p * abs(i - j) for j, p in enumerate(row)) for i, row in enumerate(rows)]
            assert np.isclose(entropies[layer, head], np.mean(own), atol=1e-6)
            assert np.isclose(distances[layer, head], np.mean(far), atol=1e-6)


def test_heads_of_places_have_the_largest_means():
    size, special = 5, [True, False, False, False, True]
    attentions = np.full((2, 3, size, size), 0.1)
    attentions[1, 2, [1, 2, 3], [0, 1, 2]] = 0.6  # the token before
    attentions[0, 1, [1, 2, 3], [4, 4, 4]] = [0.9, 0.9, 0.3]  # the separator
    attentions[0, 0, 0, 1] = attentions[0, 2, 4, 0] = 1.0  # of special tokens, which do not count
    found = place_heads(attentions, special)
    assert [one[:4] for one in found[:2]] == [
        ("separators", 1, 2, pytest.approx(0.7)), ("previous token", 2, 3, pytest.approx(0.6)),
    ]  # fmt: skip
    assert [one.equal for one in found] == [pytest.approx(0.2)] * 5
    assert {one.place: one.mean for one in found[2:]} == {
        "first token": pytest.approx((0.6 + 0.1 + 0.1) / 3), "next token": pytest.approx((0.1 + 0.1 + 0.3) / 3),
        "the token itself": pytest.approx(0.1),
    }  # fmt: skip


def test_equal_attention_is_that_to_the_tokens_that_a_layer_can_read():
    attentions = np.full((3, 2, 4, 4), 0.25)
    attentions[1] = np.tril(attentions[1])  # causal
    attentions[2, 0, 0, 1] = 0.0  # only in one of the heads
    equal = equal_attention(attentions)
    assert equal.shape == (3, 1, 4, 4) and (equal[[0, 2]] == 0.25).all()
    assert equal[1, 0].tolist() == [[1, 0, 0, 0], [0.5, 0.5, 0, 0], pytest.approx([1 / 3] * 3 + [0]), [0.25] * 4]
    means = {one.place: one.equal for one in place_heads(attentions[1:2], [False] * 4)}
    assert means == pytest.approx(
        {"previous token": (1 / 2 + 1 / 3 + 1 / 4) / 3, "next token": 0.0, "the token itself": (1 + 13 / 12) / 4,
         "first token": (1 + 13 / 12) / 4}
    )  # fmt: skip


def test_the_page_compares_with_random_parameters(loaded, found):
    """The same network with parameters that the initialization draws; the parameters of the model stay."""
    before = np.array(loaded.params["embeddings"]["word_embeddings"]["embedding"])
    random = module._random_parameters(loaded)
    table = np.asarray(random.params["embeddings"]["word_embeddings"]["embedding"])
    assert table.shape == before.shape and np.isclose(table.std(), loaded.config.initializer_range, rtol=0.2)
    assert np.array_equal(before, np.asarray(loaded.params["embeddings"]["word_embeddings"]["embedding"]))
    data, other = Page(found.html).data, random.picture(TEXT, words=found.map.words)
    means = {one.place: one.mean for one in place_heads(other.attentions, data["special"])}
    assert {place: mean for place, *_, mean in data["patterns"]} == pytest.approx(means)
    cosines = np.stack([other.nearest.cosines[..., 0], other.nearest.medians], axis=-1)
    assert np.abs(np.array(data["nearest"]["random"]) / 100 - cosines).max() < 0.0051
    assert data["map"]["random_variance"] == pytest.approx(sum(other.map.variance))
    assert other.map.variance != found.map.variance
    equal = equal_attention(found.attentions)
    assert np.allclose(np.array(data["equal"])[:, 0], np.log(8), atol=1e-4)
    assert np.allclose(np.array(data["equal"])[:, 1], mean_distance(equal)[:, 0], atol=1e-4)


def test_share_of_special_tokens():
    attentions = np.random.default_rng(0).dirichlet(np.full(4, 0.5), (2, 3, 4))
    shares = special_share(attentions, [True, False, False, True])
    assert shares.shape == (2, 3)
    assert np.isclose(shares[1, 2], np.mean([attentions[1, 2, i, 0] + attentions[1, 2, i, 3] for i in (1, 2)]))
    assert (special_share(attentions, [True] * 4) == 0).all() and (
        special_share(attentions, [False] * 4) == 0
    ).all()


def test_rows_above_random_parameters_exceed_their_medians_by_much_more():
    def words(margins):
        margins = np.array(margins, np.float32)
        medians = np.full(margins.shape, 0.1, np.float32)
        cosines = np.stack([medians + margins, medians], axis=-1)
        return NearestWords([], ["a", "b"], np.zeros(cosines.shape, int), cosines, medians)

    random = words([[0.2, 0.2, 0.4], [0.2, 0.2, 0.2]])
    found = words([[0.31, 0.29, 0.31], [0.9, 0.1, 0.31]])
    assert above_random(found, random).tolist() == [[True, False, False], [True, False, True]]
    assert not above_random(random, random).any()


def test_the_page_states_what_its_comparisons_show(loaded, found):
    """Of the same network with random parameters, no row can be above random parameters."""
    page = module._random_parameters(loaded).picture(TEXT, words=["w1", "w2", "w3", "w4xy"]).html
    assert not np.any(Page(page).data["nearest"]["above"])
    assert "For all 6 tokens of this text that are not special, no row is above random parameters: by" in page
    assert "not at least a tenth less than" in page and "show little that the model has learned" in page
    special = [True, False, False, False]
    above = [[True, False, False, True], [False, True, True, True]]
    verdict = _nearest_verdict(["input table", "layer 1"], above, special)
    assert (
        "Of the 3 tokens of this text that are not special" in verdict
        and ": 1 in input table, 3 in layer 1." in verdict
    )
    assert verdict.endswith(" Rows with at most half of the tokens show little that the model has learned.")
    assert "at most half" not in _nearest_verdict(["layer 1"], above[1:], special)
    assert _nearest_verdict(["layer 1"], [[True]], [True]).startswith("All tokens of this text are special")
    assert "no row is above" in _nearest_verdict(["layer 1"], [special], special)
    assert "59%, which is not at least a tenth less than the 63%" in _map_verdict(0.59, 0.63)
    assert "show something" in _map_verdict(0.56, 0.63) and "show little" in _map_verdict(0.0, 0.0)
    numbers, data = special_share(found.attentions, [True, *[False] * 6, True]), Page(found.html).data
    assert np.allclose(np.array(data["numbers"])[..., 2], numbers, atol=1e-4)
    assert np.allclose(np.array(data["equal"])[:, 2], 0.25)


def test_principal_components_are_those_of_the_covariance():
    for seed in range(6):  # both signs of the largest coordinate occur
        vectors = np.random.default_rng(seed).normal(size=(9, 5)) * [3, 2, 1, 0.5, 0.1]
        points, shares = principal_components(vectors)
        scales, axes = np.linalg.eigh(np.cov(vectors.T, bias=True))
        expected = (vectors - vectors.mean(axis=0)) @ axes[:, [-1, -2]]
        assert np.allclose(np.abs(points), np.abs(expected))
        assert np.allclose(shares, scales[[-1, -2]] / scales.sum())
        assert (points[np.abs(points).argmax(axis=0), [0, 1]] > 0).all()
    flat, of_two = principal_components(np.array([[0.0, 0.0], [0.0, 2.0]]))
    assert np.allclose(np.abs(flat), [[1, 0], [1, 0]]) and np.allclose(of_two, (1, 0))


def test_the_page_holds_the_attention_of_the_model(loaded, found):
    page = Page(found.html)
    data, values = page.data, page.values
    assert data["tokens"] == ["[CLS]", "w1", "w2", "w30", "w4", "##x", "w5", "[SEP]"] == found.tokens
    assert data["special"] == [True, *[False] * 6, True]
    expected = loaded.attentions(TEXT)
    assert np.array_equal(found.attentions, expected) and expected.shape == (2, 4, 8, 8)
    assert np.abs(values[:, :4] - expected).max() < 0.004 and np.abs(values[:, 4] - found.rollout).max() < 0.004
    assert np.allclose(np.array(data["numbers"])[..., 0], found.entropy, atol=1e-4)
    assert (data["layer"], data["head"], data["read"]) == (2, 3, 8)
    assert [one[:5] for one in data["patterns"]] == [
        [*one] for one in place_heads(expected, data["special"])
    ] and len(data["patterns"]) == 5
    points = np.array(data["map"]["points"])
    assert data["map"]["words"] == ["w1", "w2", "w3", "w4xy"] and np.allclose(points, found.map.points, atol=1e-5)
    assert found._repr_html_().startswith("<iframe srcdoc=") and "8 tokens, 2 layers of 4 heads" in repr(found)


def test_nearest_words_are_those_of_brute_force(loaded, found):
    """The token w30, by the hidden states of each word alone; its own word is left out."""
    nearest, place = found.nearest, 3
    assert nearest.sources == ["input table", "embeddings", "layer 1", "layer 2"]
    states = loaded.hidden_states(TEXT)[:, place]
    alone = np.stack([loaded.hidden_states(word)[:, 1] for word in nearest.words], axis=1)
    table = np.asarray(loaded.params["embeddings"]["word_embeddings"]["embedding"])
    ids = [loaded.tokenizer.piece_id(word) for word in nearest.words]
    queries = np.concatenate([table[[loaded.tokenizer.piece_id("w30")]], states])
    candidates = np.concatenate([table[ids][None], alone])
    for row, (query, own) in enumerate(zip(queries, candidates, strict=True)):
        cosines = own @ query / np.linalg.norm(own, axis=1) / np.linalg.norm(query)
        order = [i for i in np.argsort(-cosines) if nearest.words[i] != "w30"][:5]
        assert nearest.indices[row, place].tolist() == order
        assert np.allclose(nearest.cosines[row, place], cosines[order], atol=1e-5)
        assert np.isclose(nearest.medians[row, place], np.median(cosines), atol=1e-5)
    data = Page(found.html).data["nearest"]
    shown = [data["words"][i] for i in data["indices"][2][place]]
    assert shown == [nearest.words[i] for i in nearest.indices[2, place]]


def test_candidates_are_near_the_tokens_or_have_low_ids(loaded):
    nearest = loaded.picture("w30 w31", candidates=14, top=2).nearest
    assert len(nearest.words) == 14 and {"w0", "w1"} <= {*nearest.words}
    table = np.asarray(loaded.params["embeddings"]["word_embeddings"]["embedding"])
    vocabulary = [f"w{i}" for i in range(40)]
    units = table / np.linalg.norm(table, axis=1, keepdims=True)
    whole = [loaded.tokenizer.piece_id(word) for word in vocabulary]
    cosines = units[whole] @ units[loaded.tokenizer.piece_id("w30")]
    best = [vocabulary[i] for i in np.argsort(-cosines) if i != 30][:2]
    assert [nearest.words[i] for i in nearest.indices[0, 1]] == best


HOSTILE = "</script><script>alert(1)</script> <img src=x onerror=alert(2)> $DATA & \"w1\" 'w2'"


def test_a_hostile_text_stays_text(loaded):
    page = loaded.picture((HOSTILE, HOSTILE), words=[HOSTILE, "w2"], candidates=0).html
    parsed = Page(page)
    assert parsed.tags.count("script") == 3 and "img" not in parsed.tags
    assert not [name for name in parsed.attributes if name.startswith("on") or name in ("src", "href")]
    assert not re.search(r"https?:|//[a-z]|@import|url\(", page)
    assert parsed.data["tokens"].count("w1") == 2 and parsed.data["map"]["words"] == [HOSTILE, "w2"]


@pytest.mark.parametrize(
    ("text", "expected"), [("w1", "ltr"), ("123 שלום", "rtl"), ("مرحبا abc", "rtl"), ("你好", "ltr"), ("", "ltr")]
)
def test_direction_of_a_text(text, expected):
    assert direction(text) == expected


def test_a_long_text_is_cut_with_a_line(monkeypatch):
    loaded = shared_model()
    monkeypatch.setattr(module, "_ATTENTION_BYTES", 20 * 20 * 5 * 4 // 3 + 1)
    found = loaded.picture(" ".join(["w1"] * 90), candidates=0)
    assert found.notes[0] == "The text has 92 tokens; the model reads the first 70."
    assert found.notes[1].startswith("The page shows the first 20 of 70 tokens") and len(found.notes) == 2
    page = Page(found.html)
    assert all(note in found.html for note in found.notes) and page.data["read"] == 70
    assert page.values.shape == (1, 5, 20, 20) and found.attentions.shape == (1, 4, 70, 70)
    assert np.abs(page.values[:, :4] - found.attentions[..., :20, :20]).max() < 0.004


def test_the_largest_page_is_below_five_megabytes():
    assert 12 * 13 * 128 * 128 * 4 / 3 < module._ATTENTION_BYTES < 4_600_000


def test_a_model_without_attention_says_so():
    spec = ModelSpec(
        model=tiny_model(len(PIECES) + 3, encoder="lstm", num_layers=1),
        heads=HeadsConfig(), tokenizer=TokenizerConfig(),
    )  # fmt: skip
    found = prepare(drawn(spec, 0.2, PIECES), name="lstm").picture("w1 w2", words=["w1", "w2"])
    assert found.notes[0] == "The encoder of this model (lstm) has no attention to show."
    assert found.attentions is None and found.map is not None
    page = Page(found.html)
    assert 'id="grid"' not in found.html and 'id="map"' in found.html and page.data["layers"] == 0


def test_layers_with_different_numbers_of_heads():
    weights = make_weights()
    model = dataclasses.replace(weights.spec.model, layer_heads=(4, 2))
    spec = dataclasses.replace(weights.spec, model=model)
    found = prepare(drawn(spec, 0.2, PIECES), name="pruned").picture("w1 w2", candidates=0)
    assert found.notes == ("Attention is not shown: the layers have different numbers of heads (4, 2).",)


def test_windows_of_local_attention_are_named():
    weights = make_weights(types=1)
    model = dataclasses.replace(weights.spec.model, attention_windows=(0, 2))
    loaded = prepare(drawn(dataclasses.replace(weights.spec, model=model), 0.2, PIECES), name="local")
    found = loaded.picture("w1 w2 w3 w4 w5 w6", candidates=0)
    assert Page(found.html).data["windows"] == [0, 2]
    assert not found.attentions[1, :, 0, 3:].any() and found.attentions[0, :, 0, 3:].all()


@pytest.mark.slow  # a model of each family
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_a_picture(family):
    _, spec = next(drawn_specs(family))
    model = dataclasses.replace(spec.model, separator_id=3)
    spec = dataclasses.replace(spec, model=model, tokenizer=TokenizerConfig())
    bundle = ModelBundle(spec=spec, params=random_params(spec), tokenizer_content=content(words(36)))
    loaded = prepare(bundle, name=family)
    found = loaded.picture("w1 w2 w3 w4 w5 w6 w7 w8")
    assert found.notes == () and found.attentions.shape == (3, 2, 10, 10) and len(found.nearest.sources) == 5
    assert np.allclose(found.attentions.sum(axis=-1), 1, atol=1e-5) and np.allclose(found.rollout.sum(axis=-1), 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "text: missing; give a text, words for a map, or both"),
        ({"text": " "}, "text: ' ' is not allowed; give a text that is not blank"),
        ({"text": "w1", "layer": 3}, "layer: 3 is not allowed; use 1 to 1"),
        ({"text": "w1", "head": 0}, "head: 0 is not allowed; use 1 to 4"),
        ({"text": "w1", "top": 0}, "top: 0, candidates: 2000: not allowed"),
        ({"words": ["w1", "w1"]}, "words: 1 word is not enough for a map; give two or more"),
    ],
)
def test_what_is_refused(arguments, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        shared_model().picture(**arguments)


def test_words_of_the_option(tmp_path):
    (tmp_path / "words.txt").write_text("w1\n\n w2 \n")
    assert read_words(str(tmp_path / "words.txt")) == ["w1", "w2"] == read_words("w1, w2,")
    with pytest.raises(ValueError, match=r"--words: words.txt: no such file; give a file with a word per line, or"):
        read_words("words.txt")
    (tmp_path / "words.txt").write_bytes(b"sch\xf6n\n")
    with pytest.raises(ValueError, match=r"words.txt:1: not valid UTF-8; convert the file to UTF-8"):
        read_words(str(tmp_path / "words.txt"))
    many = [f"word{number}" for number in range(1000)]
    assert read_words(",".join(many)) == many  # longer than a file name


def test_bytes_that_are_no_text_do_not_prevent_the_page(loaded, tmp_path):
    path = loaded.picture("w1 \udcff w2", candidates=0).save(tmp_path / "page.html")
    assert "w1 \ufffd w2" in path.read_text(encoding="utf-8")


def test_command(tmp_path, capsys):
    write_saved(tmp_path / "saved", make_weights(layers=1))
    place, target = str(tmp_path / "saved"), tmp_path / "page.html"
    words = ["w1 w2", "--pair", "w3", "--words", "w1,w2", "--head", "2", "--candidates", "3"]
    assert main(["picture", place, *words, "--output", str(target)]) == 0
    assert capsys.readouterr().out.startswith(f"{target}: 6 tokens, 0.0 MB;")
    page = Page(target.read_text(encoding="utf-8"))
    assert page.data["tokens"] == ["[CLS]", "w1", "w2", "[SEP]", "w3", "[SEP]"] and page.data["head"] == 2
    assert main(["picture", "--model", place, "w1", "--candidates", "0", "--output", str(target)]) == 0
    assert Page(target.read_text(encoding="utf-8")).data["nearest"] is None
    capsys.readouterr()
    for arguments, message in (
        ([], "arguments: none; write bert-jax picture MODEL TEXT"),
        ([place], "TEXT: missing; write a text after the model, or set --words"),
        ([place, "w1", "--model", place], "write bert-jax picture MODEL TEXT"),
        ([place, "w1", "--layer", "2"], "layer: 2 is not allowed; use 1 to 1"),
        ([place, "--pair", "w1", "--words", "w1,w2"], "--pair: requires a first text"),
    ):
        assert main(["picture", *arguments]) == 2
        error = capsys.readouterr().err
        assert message in error and len(error.splitlines()) == 1
