"""Starting from a model that is there: added words, grown positions, what must agree with the source."""

import dataclasses
import json

import jax
import numpy as np
import pytest
import yaml

from bert_jax.config import (
    ExecutionConfig,
    HeadsConfig,
    MeshConfig,
    ModelConfig,
    ModelSpec,
    PretrainConfig,
    TokenizerConfig,
)
from bert_jax.config.loader import RunOptions, Setting, build_config
from bert_jax.interop.exchange import Weights, parameter_shapes
from bert_jax.interop.extension import (
    compare,
    extend_positions,
    extend_rows,
    read_words,
    require_wordpiece,
    with_words,
)
from bert_jax.interop.native import write_saved
from bert_jax.interop.warm_start import resolve
from bert_jax.model import BertForPretraining, to_canonical
from bert_jax.optim import make_optimizer
from bert_jax.parallel import make_mesh
from bert_jax.tokenization import ByteBPETokenizer, WordPieceTokenizer, byte_bpe_content, load_tokenizer
from bert_jax.training.state import abstract_state, initial_state
from bert_jax.training.warm_start import RECORD

SPECIALS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
PIECES = [
    *SPECIALS,
    "[unused0]",
    "[unused1]",
    "co",
    "##vid",
    "##ien",
    "the",
    "cat",
    "##s",
    "a",
    "re",
    "##sume",
    "\u4e2d",
]
MODEL = ModelConfig(
    vocab_size=len(PIECES), hidden_size=8, num_layers=2, num_attention_heads=2, intermediate_size=16,
    max_position_embeddings=16,
)  # fmt: skip
ALL = HeadsConfig(mlm=True, nsp=True, pooler=True)


def tokenizer(**settings):
    return WordPieceTokenizer(PIECES, **({"lower_case": True} | settings))


def arrays(spec, seed=0):
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in parameter_shapes(spec).items()}


def save(folder, *, model=MODEL, heads=ALL, config=TokenizerConfig(), content="\n".join(PIECES).encode()):  # noqa: B008
    spec = ModelSpec(
        model=model, heads=heads, tokenizer=config, family="roberta" if model.position_offset else "bert"
    )
    write_saved(folder, Weights(spec=spec, params=arrays(spec), tokenizer_content=content if config else None))
    return arrays(spec)


def refused():
    return pytest.raises(ValueError, match=r"^[^\n]+$")  # in one line


def byte_bpe():
    letters = [*map(chr, range(97, 123)), "\u0120"]
    pieces = ["<s>", "<pad>", "</s>", "<unk>", *letters, "<mask>"]
    return byte_bpe_content({piece: i for i, piece in enumerate(pieces)}, [])


@pytest.fixture
def words(tmp_path):
    def write(*lines):
        path = tmp_path / "words.txt"
        path.write_text("\n".join(lines), encoding="utf-8")
        return path

    return write


# ------------------------------------------------------------------ words


def test_words_are_written_as_the_tokenizer_writes_them_and_known_ones_left_out(words):
    found, notes = read_words(words("Covid", "", "cats", "cat", "covid", "R\u00e9sum\u00e9 "), tokenizer())
    assert found == ["covid", "cats", "resume"]
    assert notes == [
        "2 word(s) as the tokenizer writes them: Covid -> covid, R\u00e9sum\u00e9 -> resume",
        "1 word(s) are pieces already: cat",
    ]
    cased, notes = read_words(words("Covid", "R\u00e9sum\u00e9"), tokenizer(lower_case=False))
    assert (cased, notes) == (["Covid", "R\u00e9sum\u00e9"], [])


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["cats", "covid-19"], "words.txt:2: 'covid-19' is cut into covid | - | 19 before pieces are looked up"),
        (["new york"], "words.txt:1: 'new york' is cut into new | york before"),
        (["##ing"], "words.txt:1: '##ing' is cut into # | # | ing before"),
        (["\u4e2d\u6587"], "is cut into \u4e2d | \u6587 before"),
        (["\u200b"], "words.txt:1: '\\u200b' is no text to the tokenizer"),
        (["a" * 201], "words.txt:1: a word of 201 characters; more than 200 are [UNK]"),
        (["", " "], "words.txt holds no word; give one a line"),
    ],
)
def test_a_line_that_can_never_be_found_is_refused(words, lines, message):
    with refused() as error:
        read_words(words(*lines), tokenizer())
    assert message in str(error.value)


def test_words_that_cannot_be_read(tmp_path):
    with pytest.raises(ValueError, match=r"--add_words: cannot read .*none.txt: No such file"):
        read_words(tmp_path / "none.txt", tokenizer())
    (tmp_path / "latin.txt").write_bytes("caf\u00e9".encode("latin-1"))
    with pytest.raises(ValueError, match=r"--add_words: .*latin.txt: not UTF-8 text"):
        read_words(tmp_path / "latin.txt", tokenizer())


def test_words_at_the_end_keep_every_id_and_are_found():
    old = tokenizer()
    extension = with_words(old, ["covid", "cats", "zzz"], in_slots=False)
    assert list(extension.pieces) == [*PIECES, "covid", "cats", "zzz"]
    size = len(PIECES)
    assert extension.made_of == {size: (7, 8), size + 1: (11, 12), size + 2: (old.unk_id,)}
    assert extension.notes == (
        "3 word(s) added, each the mean of its pieces",
        "1 of them start from [UNK]: zzz",
    )
    new = WordPieceTokenizer(extension.pieces, lower_case=True)
    assert new.encode("the cats") == [10, size + 1]
    # The longest match from the left: a longer word that begins with an added one is cut behind it.
    assert (old.encode("covidien"), new.encode("covidien")) == ([7, 8, 9], [size, 9])


def test_words_in_slots_take_the_first_ones_and_the_size_stays():
    extension = with_words(tokenizer(), ["covid"], in_slots=True)
    assert list(extension.pieces) == [*SPECIALS, "covid", *PIECES[6:]]
    assert extension.made_of == {5: (7, 8)}
    with pytest.raises(ValueError, match=r"3 words to add, but the vocabulary has 2 \[unusedN\] pieces"):
        with_words(tokenizer(), ["covid", "cats", "resume"], in_slots=True)


def test_a_given_vocabulary_may_only_add_words():
    old = tokenizer()
    both = compare(old, [*SPECIALS, "covid", *PIECES[6:], "cats", "[unused2]"], "v")
    assert both.made_of == {5: (7, 8), len(PIECES): (11, 12)}
    assert compare(old, PIECES, "v").made_of == {}
    for pieces, message in [
        (PIECES[:-1], "v: 16 pieces, but the model's own vocabulary has 17"),
        ([*PIECES[:-1], "covid"], "v: piece 16 is 'covid', the model's own vocabulary has '\u4e2d' there"),
        ([*PIECES, "##xx"], "v: piece 17: '##xx' is cut into # | # | xx"),
        ([*PIECES, "Covid"], "v: piece 17 is 'Covid', which the tokenizer's case or accent rules never give"),
    ]:
        with refused() as error:
            compare(old, pieces, "v")
        assert message in str(error.value)


def test_new_rows_are_means_and_all_others_bitwise_what_they_were():
    rng = np.random.default_rng(0)
    table = rng.normal(size=(6, 4)).astype(np.float32)
    params = {
        "embeddings/word_embeddings/embedding": table,
        "mlm_head/output_bias": np.arange(6, dtype=np.float32),
        "pooler/bias": np.ones(4, np.float32),
    }
    grown = extend_rows(params, {2: (4, 5), 6: (0, 1, 3)}, 8)
    rows = grown["embeddings/word_embeddings/embedding"]
    np.testing.assert_array_equal(rows[[0, 1, 3, 4, 5]], table[[0, 1, 3, 4, 5]])
    np.testing.assert_allclose(rows[2], (table[4] + table[5]) / 2, rtol=1e-6)
    np.testing.assert_allclose(rows[6], (table[0] + table[1] + table[3]) / 3, rtol=1e-6)
    np.testing.assert_array_equal(rows[7], 0)
    np.testing.assert_allclose(grown["mlm_head/output_bias"], [0, 1, 4.5, 3, 4, 5, 4 / 3, 0])
    assert rows.dtype == np.float32 and grown["pooler/bias"] is params["pooler/bias"]
    encoder_only = {"embeddings/word_embeddings/embedding": table}
    assert list(extend_rows(encoder_only, {}, 6)) == list(encoder_only)


def test_words_need_wordpiece(words):
    bpe = ByteBPETokenizer(byte_bpe())
    with pytest.raises(ValueError, match="--add_words: byte-level BPE makes pieces by merging"):
        require_wordpiece(bpe, "--add_words")


# ------------------------------------------------------------------ positions


def test_tiled_positions_repeat_behind_the_rows_in_front():
    table = np.arange(10, dtype=np.float32).reshape(5, 2)
    np.testing.assert_array_equal(extend_positions(table, 8, 0, "tile")[:, 0], [0, 2, 4, 6, 8, 0, 2, 4])
    np.testing.assert_array_equal(extend_positions(table, 9, 2, "tile")[:, 0], [0, 2, 4, 6, 8, 4, 6, 8, 4])


def test_interpolated_positions_stretch_between_first_and_last():
    table = np.array([[9.0], [0.0], [1.0], [4.0]], np.float32)
    stretched = extend_positions(table, 6, 1, "interpolate")
    np.testing.assert_allclose(stretched[:, 0], [9, 0, 0.5, 1, 2.5, 4])
    assert stretched.dtype == np.float32
    np.testing.assert_array_equal(extend_positions(table, 4, 1, "interpolate"), table)
    np.testing.assert_array_equal(extend_positions(table[:2], 4, 1, "interpolate")[:, 0], [9, 0, 0, 0])


# ------------------------------------------------------------------ resolve


def plan(tmp_path, *flags, settings=None, workdir="run", **options):
    """(start, config) of ``resolve`` on the model in ``tmp_path / "source"``."""
    options = {"init_from": str(tmp_path / "source")} | options
    given = {"data.shards": str(tmp_path / "shards"), "data.seq_length": "16"} | (settings or {})
    listed = [Setting("recipe", key, value) for key, value in given.items()]
    start, resolved = resolve(RunOptions(**options), tmp_path / workdir, listed)
    return start, build_config(PretrainConfig, resolved)


def test_the_source_gives_model_vocabulary_and_parameters(tmp_path):
    params = save(tmp_path / "source")
    start, config = plan(tmp_path, settings={"model.hidden_dropout": "0", "optimizer.learning_rate": "1e-5"})
    assert config.model == dataclasses.replace(MODEL, hidden_dropout=0.0)
    assert config.optimizer.learning_rate == 1e-5
    assert config.data.vocab == str(tmp_path / "shards" / "vocab.txt")
    assert start.vocabulary == (tmp_path / "shards" / "vocab.txt", "\n".join(PIECES).encode())
    assert list(start.warm_start.params) == list(params)
    for name, values in params.items():
        np.testing.assert_array_equal(start.warm_start.params[name], values)
    assert not (tmp_path / "shards").exists() and not (tmp_path / "run").exists()


def test_the_source_decides_over_the_preset(tmp_path):
    save(tmp_path / "source")
    _, config = plan(tmp_path, settings={"training.mode": "bert2018"})
    assert (config.model.activation, config.optimizer.name) == ("gelu", "bert_adam")


def test_what_contradicts_the_source_names_both_values(tmp_path):
    save(tmp_path / "source", config=TokenizerConfig(lower_case=False))
    for key, value, message in [
        ("model.num_layers", "12", f"recipe: model.num_layers: 12, but {tmp_path}/source has 2; leave it out"),
        ("model.vocab_size", "30522", "recipe: model.vocab_size: 30522, but"),
        ("model.max_position_embeddings", "8", "recipe: model.max_position_embeddings: 8, but"),
        ("data.lower_case", "true", "recipe: data.lower_case: True, but"),
        ("data.seq_length", "17", f"recipe: data.seq_length: 17, but {tmp_path}/source has 16 positions; add "
         "--extend_positions tile or interpolate"),
    ]:  # fmt: skip
        with refused() as error:
            plan(tmp_path, settings={key: value})
        assert message in str(error.value)


def test_heads_that_are_not_there_start_fresh_and_others_are_left_out(tmp_path):
    save(tmp_path / "source", heads=HeadsConfig(pooler=True, sequence_labels=("no", "yes")))
    start, _ = plan(tmp_path)
    assert {name.partition("/")[0] for name in start.warm_start.params} == {"embeddings", "encoder", "pooler"}
    said = start.warm_start.messages
    assert "MLM head: not in the source, starts fresh" in said
    assert "sentence-pair head: not in the source, starts fresh" in said
    assert "sequence_head: not part of this pretraining, left out" in said
    start, config = plan(tmp_path, settings={"data.next_sentence": "none"})
    assert "pooler: not part of this pretraining, left out" in start.warm_start.messages
    assert not config.has_nsp and not any(name.startswith("pooler") for name in start.warm_start.params)


def test_added_words_grow_the_model_and_its_vocabulary(tmp_path, words):
    params = save(tmp_path / "source")
    path = str(words("covid", "cats", "the"))
    # The source's own size in a recipe is no contradiction.
    start, config = plan(tmp_path, add_words=path, settings={"model.vocab_size": "17"})
    assert config.model.vocab_size == 19
    (tmp_path / "vocab.txt").write_bytes(start.vocabulary[1])
    assert load_tokenizer(tmp_path / "vocab.txt").encode("covid cats the") == [17, 18, 10]
    name = "embeddings/word_embeddings/embedding"
    new = start.warm_start.params[name]
    np.testing.assert_array_equal(new[:17], params[name])
    np.testing.assert_allclose(new[17], (params[name][7] + params[name][8]) / 2, rtol=1e-6)
    assert start.warm_start.params["mlm_head/output_bias"].shape == (19,)
    assert "1 word(s) are pieces already: the" in start.warm_start.messages
    slots, config = plan(tmp_path, add_words=path, vocab_slots=True)
    assert config.model.vocab_size == 17
    assert slots.vocabulary[1].decode().split("\n")[5:8] == ["covid", "cats", "co"]
    # The vocabulary that came out can be named, by itself or with the same flags.
    grown = str(tmp_path / "vocab.txt")
    named, config = plan(tmp_path, settings={"data.vocab": grown})
    assert (config.data.vocab, config.model.vocab_size, named.vocabulary) == (grown, 19, None)
    np.testing.assert_array_equal(named.warm_start.params[name], new)
    with pytest.raises(
        ValueError, match=r"data.vocab: --add_words makes the run's vocabulary, .*leave data.vocab out"
    ):
        plan(tmp_path, add_words=path, settings={"data.vocab": grown})


def test_rows_that_no_piece_has_are_used_first(tmp_path, words):
    save(tmp_path / "source", model=dataclasses.replace(MODEL, vocab_size=18))
    _, config = plan(tmp_path, add_words=str(words("covid")))
    assert config.model.vocab_size == 18
    _, config = plan(tmp_path, add_words=str(words("covid", "cats")))
    assert config.model.vocab_size == 19


def test_a_vocabulary_that_is_not_the_sources(tmp_path, words):
    save(tmp_path / "source")
    other = tmp_path / "other.txt"
    other.write_text("\n".join([*SPECIALS, *(f"w{i}" for i in range(12))]))
    with pytest.raises(ValueError, match=r"data.vocab: .*other.txt: piece 5 is 'w0', .*has '\[unused0\]'|piece 7"):
        plan(tmp_path, settings={"data.vocab": str(other)})


def test_a_source_without_a_tokenizer_needs_a_vocabulary(tmp_path, words):
    save(tmp_path / "source", config=None)
    with pytest.raises(ValueError, match=r"data.vocab: .* comes without a tokenizer; name its vocabulary"):
        plan(tmp_path)
    with pytest.raises(ValueError, match=r"--add_words: .* comes without a tokenizer"):
        plan(tmp_path, add_words=str(words("covid")))
    vocab = tmp_path / "vocab.txt"
    vocab.write_text("\n".join(PIECES))
    start, config = plan(tmp_path, settings={"data.vocab": str(vocab)})
    assert config.model == MODEL and start.vocabulary is None
    assert any("is taken for its vocabulary" in line for line in start.warm_start.messages)
    vocab.write_text("\n".join([*PIECES, "more"]))
    with pytest.raises(ValueError, match=r"has 18 pieces, but .* 17 rows"):
        plan(tmp_path, settings={"data.vocab": str(vocab)})


def test_a_tokenizer_that_shards_cannot_be_made_with(tmp_path):
    save(tmp_path / "source", config=TokenizerConfig(strip_accents=False))
    with pytest.raises(
        ValueError, match="lower_case True, strip_accents False, split_cjk True; shards are made with"
    ):
        plan(tmp_path)


def test_positions_grow_when_asked_for(tmp_path):
    table = save(tmp_path / "source")["embeddings/position_embeddings/embedding"]
    longer = {"data.seq_length": "24", "model.max_position_embeddings": "16"}
    start, config = plan(tmp_path, extend_positions="tile", settings=longer)
    assert config.model.max_position_embeddings == config.data.seq_length == 24
    np.testing.assert_array_equal(
        start.warm_start.params["embeddings/position_embeddings/embedding"], np.concatenate([table, table[:8]])
    )
    assert "positions: 16 -> 24 (tile)" in start.warm_start.messages
    wider = {"model.max_position_embeddings": "40"}
    start, config = plan(tmp_path, extend_positions="interpolate", settings=wider)
    assert config.model.max_position_embeddings == 40
    start, config = plan(tmp_path, extend_positions="tile")
    assert config.model == MODEL
    assert "--extend_positions: not needed" in " ".join(start.warm_start.messages)


def test_a_roberta_keeps_the_rows_before_its_first_position(tmp_path, words):
    content = byte_bpe()
    model = dataclasses.replace(
        MODEL, vocab_size=32, max_position_embeddings=18, position_offset=2, type_vocab_size=1
    )
    config = TokenizerConfig(file="tokenizer.json", lower_case=False)
    params = save(tmp_path / "source", model=model, heads=HeadsConfig(mlm=True), config=config, content=content)
    longer = {"data.seq_length": "20", "data.next_sentence": "none"}
    start, config = plan(tmp_path, extend_positions="tile", settings=longer)
    assert (config.model.max_position_embeddings, config.model.position_offset) == (22, 2)
    table = params["embeddings/position_embeddings/embedding"]
    np.testing.assert_array_equal(
        start.warm_start.params["embeddings/position_embeddings/embedding"], np.concatenate([table, table[2:6]])
    )
    assert start.vocabulary == (tmp_path / "shards" / "tokenizer.json", content)
    with pytest.raises(ValueError, match=r"model.type_vocab_size: 1 is not allowed; allowed: 2 or more"):
        plan(tmp_path)
    with pytest.raises(ValueError, match="--add_words: byte-level BPE"):
        plan(tmp_path, add_words=str(words("covid")), settings={"data.next_sentence": "none"})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"continue_from": "runs/a"},
            "--init_from starts at step 0 with a fresh optimizer, --continue_from goes on",
        ),
        ({"init_from": "", "add_words": "w.txt"}, "--add_words: needs --init_from"),
        ({"init_from": "", "extend_positions": "tile"}, "--extend_positions: needs --init_from"),
        ({"vocab_slots": True}, "--vocab_slots: needs --add_words"),
        ({"init_from": "nowhere/at/all"}, "nowhere/at/all"),
    ],
)
def test_options_that_do_not_go_together(tmp_path, options, message):
    save(tmp_path / "source")
    with refused() as error:
        plan(tmp_path, **options)
    assert message in str(error.value)


def test_a_workdir_that_was_to_start_from_a_model_does_not_start_from_nothing(tmp_path):
    save(tmp_path / "source")
    start, _ = plan(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / RECORD).write_text(start.warm_start.record)
    with pytest.raises(ValueError, match=r"was to start from .*source and saved no checkpoint; give the same"):
        plan(tmp_path, init_from="")
    for text in ("{", "format: 7", "[]", "format: 1"):
        (tmp_path / "run" / RECORD).write_text(text)
        with pytest.raises(ValueError, match=f"{RECORD}: not readable .*; delete it and give --config"):
            plan(tmp_path, init_from="")


def test_a_checkpoint_goes_before_every_flag_and_needs_none(tmp_path, words):
    save(tmp_path / "source")
    start, config = plan(tmp_path, add_words=str(words("covid")), settings={"model.vocab_size": "17"})
    run = tmp_path / "run"
    (run / "checkpoints" / "5").mkdir(parents=True)
    (run / RECORD).write_text(start.warm_start.record)
    assert json.loads(json.dumps(yaml.safe_load(start.warm_start.record)))["init_from"] == str(tmp_path / "source")
    again, same = plan(tmp_path, init_from="gone", add_words="gone.txt", settings={"model.vocab_size": "17"})
    assert same == config and not again.warm_start.params and again.vocabulary is None
    assert again.warm_start.messages == (
        "--init_from, --add_words: not looked at, the run continues from its own checkpoint",
    )
    bare, same = plan(tmp_path, init_from="")
    assert same == config and not bare.warm_start.messages
    # The next phase has the same model without flags.
    _, same = plan(tmp_path, init_from="", workdir="two", continue_from=str(run))
    assert same == config
    with pytest.raises(ValueError, match=f"recipe: model.num_layers: 3, but .*{RECORD} has 2"):
        plan(tmp_path, init_from="", settings={"model.num_layers": "3"})


# ------------------------------------------------------------------ state


@pytest.mark.parametrize("scan_layers", [False, True])
def test_the_state_holds_what_was_loaded_and_draws_the_rest(scan_layers):
    mesh = make_mesh(MeshConfig(), jax.devices()[:2])
    model = BertForPretraining(MODEL, ExecutionConfig(scan_layers=scan_layers), True, mesh)
    optimizer = make_optimizer(PretrainConfig().optimizer)
    abstract = abstract_state(model, optimizer, mesh, with_ema=True)
    drawn = to_canonical(initial_state(model, optimizer, abstract, 3).params, MODEL.vocab_size)
    loaded = arrays(ModelSpec(model=MODEL, heads=HeadsConfig(mlm=True)))
    state = initial_state(model, optimizer, abstract, 3, loaded)
    for tree in (state.params, state.ema):
        params = to_canonical(tree, MODEL.vocab_size)
        assert sorted(params) == sorted(drawn)
        for name, values in params.items():
            np.testing.assert_array_equal(values, loaded.get(name, drawn[name]), err_msg=name)
    assert int(state.step) == 0
    assert all(not np.any(moment) for moment in jax.tree.leaves(state.opt_state))
    with pytest.raises(ValueError, match="left over token_head/bias"):
        initial_state(model, optimizer, abstract, 3, {"token_head/bias": np.zeros(3, np.float32)})
