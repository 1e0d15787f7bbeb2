"""Faults of rows: each is named by its check, and rows without faults have no remark."""

import numpy as np
import pytest
from builders import content
from support import tiny_config

from bert_jax.contrib.doctor.audit import audit, held_out_text, original_ids, sample, unigram_loss
from bert_jax.contrib.doctor.findings import ordered
from bert_jax.tokenization import SPECIAL_PIECES, load_tokenizer
from data_pipeline.build.masking import mask_batch

ROWS, LENGTH = 400, 32
LETTERS = "abcdefgh"


def vocabulary(seed):
    """Letters, pairs and some triples of letters, as first pieces and as continuations, in an order of its own."""
    rng = np.random.default_rng(seed)
    pieces = [*LETTERS, *(a + b for a in LETTERS for b in LETTERS)]
    pieces += [a + b for a in rng.permutation(pieces[8:])[:24] for b in LETTERS[:4]]
    every = [*pieces, *(f"##{piece}" for piece in pieces)]
    return [*SPECIAL_PIECES, *(every[i] for i in rng.permutation(len(every)))]


def tokenizer_of(folder, seed=0):
    folder.mkdir(exist_ok=True)
    (folder / "vocab.txt").write_bytes(content(vocabulary(seed)))
    return load_tokenizer(folder / "vocab.txt")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return tokenizer_of(tmp_path_factory.mktemp("vocabulary"))


def rows_of(tokenizer, data, text="", rows=ROWS):
    """Masked rows of one sequence of random words (or of words of ``text``) and some padding."""
    rng = np.random.default_rng(1)
    ids = np.zeros((rows, LENGTH), np.int32)
    for row in range(rows):
        lengths = rng.integers(1, 9, 40)
        made = " ".join("".join(rng.choice(list(LETTERS), n)) for n in lengths)
        own = tokenizer.encode(text or made)[: int(rng.integers(20, LENGTH - 1))]
        ids[row, : len(own) + 2] = [tokenizer.cls_id, *own, tokenizer.sep_id]
    used = ids > 0
    maskable = used & ~tokenizer.special[ids]
    keys = rng.integers(0, 2**63, rows, dtype=np.uint64)
    masked = mask_batch(
        ids, used, maskable, keys, data=data, mask_id=tokenizer.mask_id, vocab_size=tokenizer.vocab_size
    )
    names = ("input_ids", "mlm_positions", "mlm_labels", "mlm_weights")
    positions = np.broadcast_to(np.arange(LENGTH), ids.shape)
    return dict(zip(names, masked, strict=True)) | {
        "sequence_ids": used.astype(np.int32), "position_ids": positions * used,
        "nsp_weights": np.ones((rows, 1), np.float32), "nsp_labels": (np.arange(rows) % 2)[:, None],
        "sequence_keys": np.arange(rows, dtype=np.uint32)[:, None],
        "token_type_ids": np.zeros_like(ids),
    }  # fmt: skip


def data_of(*options):
    return tiny_config(
        "--data.seq_length 32 --data.max_predictions 30 --data.next_sentence none --data.dupe_factor 1", *options
    ).data


def remarks(found):
    return {one.check: one.status for one in ordered(found) if one.status != "OK"}


def test_rows_without_faults_have_no_remark(tokenizer):
    data = data_of()
    found = audit(data, tokenizer, rows_of(tokenizer, data), predicts_masks=True)
    assert remarks(found) == {}
    assert len(found) == 8


def test_another_vocabulary(tokenizer, tmp_path):
    data = data_of()
    rows = rows_of(tokenizer_of(tmp_path, seed=5), data)
    found = audit(data, tokenizer, rows, predicts_masks=True)
    assert ordered(found)[0].check == "vocabulary"
    assert ordered(found)[0].status == "FAIL"


def test_unknown_tokens(tokenizer):
    data = data_of()
    rows = rows_of(tokenizer, data, "abc def XYZ ade bed " * 8)
    assert remarks(audit(data, tokenizer, rows, predicts_masks=True))["unknown tokens"] == "FAIL"


def test_repeated_rows(tokenizer):
    """The same text with keys of its own each time, and copies of rows with their masks or keys."""
    data = data_of("--data.masking dynamic")
    rows = rows_of(tokenizer, data)
    copies = {name: np.concatenate([values[:20]] * 20) for name, values in rows.items()}
    few = copies | {"sequence_keys": rows["sequence_keys"]}
    assert remarks(audit(data, tokenizer, few, predicts_masks=True)) == {"repeated text": "FAIL"}
    for masking in ("dynamic", "static"):
        passes = data_of(f"--data.dupe_factor 20 --data.masking {masking}")
        assert remarks(audit(passes, tokenizer, copies, predicts_masks=True)) == {"copied rows": "FAIL"}
    passes = data_of("--data.dupe_factor 20 --data.masking dynamic")
    assert remarks(audit(passes, tokenizer, few, predicts_masks=True)) == {}


def test_random_second_segments_are_no_repetition(tokenizer):
    """Two segments per row, of which the second or the first ones are drawn from 20 rows."""
    data = data_of("--data.masking dynamic")
    rows = rows_of(tokenizer, data)
    rows |= {"input_ids": original_ids(rows), "mlm_weights": np.zeros_like(rows["mlm_weights"])}
    drawn = {name: np.concatenate([values[:20]] * (ROWS // 20)) for name, values in rows.items()}

    def found(first, second):
        names = ("input_ids", "sequence_ids", "position_ids", "token_type_ids")
        both = rows | {name: np.concatenate([first[name], second[name]], axis=1) for name in names}
        both["token_type_ids"][:, LENGTH:] = 1
        return remarks(audit(data, tokenizer, both, predicts_masks=False)).get("repeated text")

    assert found(rows, drawn) is None
    assert found(drawn, rows) == "FAIL"


@pytest.mark.parametrize(
    "built, options, words",
    [
        ("--data.mask_fraction 0.8", "--data.mask_fraction 0.8", "too little text remains"),
        ("--data.mask_fraction 0.3", "", "other masks than the options"),
        ("--data.mask_token_share 0.1 --data.random_token_share 0.1", "", "other masks than the options"),
    ],
)
def test_masks(tokenizer, built, options, words):
    found = audit(data_of(options), tokenizer, rows_of(tokenizer, data_of(built)), predicts_masks=True)
    (one,) = [one for one in found if one.check == "masks"]
    assert one.status == "FAIL"
    assert words in one.advice


def test_another_id_than_that_of_the_mask_token(tokenizer):
    data, piece = data_of(), tokenizer.special.argmin()
    rows = rows_of(tokenizer, data)
    rows["input_ids"] = np.where(rows["input_ids"] == tokenizer.mask_id, piece, rows["input_ids"])
    one = ordered(audit(data, tokenizer, rows, predicts_masks=True))[0]
    assert (one.check, one.status) == ("masks", "FAIL")
    assert f"{tokenizer.pieces([piece])[0]!r} (id {piece})" in one.value
    assert "for the id of [MASK], which is 4" in one.advice


def test_too_few_predictions(tokenizer):
    data = data_of("--data.max_predictions 2")
    found = audit(data, tokenizer, rows_of(tokenizer, data), predicts_masks=True)
    assert remarks(found) == {"masks": "LOOK"}


def test_special_tokens_are_predicted(tokenizer):
    data = data_of()
    rows = rows_of(tokenizer, data)
    rows["mlm_labels"] = np.where(rows["mlm_positions"] == 1, tokenizer.sep_id, rows["mlm_labels"])
    (one,) = [one for one in audit(data, tokenizer, rows, predicts_masks=True) if one.check == "masks"]
    assert "special tokens" in one.value


@pytest.mark.parametrize("distance, side", [(1, "after"), (-1, "before")])
def test_shifted_labels(tokenizer, distance, side):
    data = data_of()
    rows = rows_of(tokenizer, data)
    ids = original_ids(rows)
    places = np.clip(rows["mlm_positions"] + distance, 0, LENGTH - 1)
    rows["mlm_labels"] = np.take_along_axis(ids, places, axis=1)
    one = ordered(audit(data, tokenizer, rows, predicts_masks=True))[0]
    assert (one.check, one.status) == ("labels", "FAIL")
    assert side in one.value


def test_labels_of_other_rows(tokenizer):
    data = data_of()
    rows = rows_of(tokenizer, data)
    rows["mlm_labels"] = np.roll(rows["mlm_labels"], 1, axis=0)
    assert remarks(audit(data, tokenizer, rows, predicts_masks=True))["labels"] == "FAIL"


@pytest.mark.parametrize("masking, words", [("static", "the shards"), ("dynamic", "the code that masks")])
def test_labels_that_are_read_after_masking(tokenizer, masking, words):
    data = data_of(f"--data.masking {masking}")
    rows = rows_of(tokenizer, data)
    places = np.take_along_axis(rows["input_ids"], rows["mlm_positions"], axis=1)
    rows["mlm_labels"] = np.where(rows["mlm_weights"] > 0, places, 0)
    found = ordered(audit(data, tokenizer, rows, predicts_masks=True))
    assert [(one.check, one.status) for one in found[:2]] == [("labels", "FAIL"), ("masks", "FAIL")]
    assert "after tokens were replaced" in found[0].advice
    assert words in found[1].advice


def test_positions_that_do_not_restart(tokenizer):
    data = data_of()
    rows = rows_of(tokenizer, data)
    packed = rows | {"sequence_ids": rows["sequence_ids"] * np.where(np.arange(LENGTH) < 8, 1, 2)}
    assert remarks(audit(data, tokenizer, packed, predicts_masks=True)) == {"position ids": "FAIL"}


def test_padding_pairs_and_documents(tokenizer):
    data = data_of("--data.next_sentence nsp")
    rows = rows_of(tokenizer, data, "ab cd ef gh abc")
    rows["nsp_labels"][:] = 1
    found = remarks(audit(data, tokenizer, rows, predicts_masks=True, documents=3))
    assert found == {"documents": "FAIL", "sentence pairs": "LOOK", "padding share": "LOOK"}


def pairs_of(tokenizer, data, *, neighbors_differ):
    """Rows of two segments of words of one topic, of which there are 20. The second segment of a random pair has
    another topic; with ``neighbors_differ``, so has that of a neighbor."""
    rng = np.random.default_rng(2)
    topics = rng.integers(5, tokenizer.vocab_size, (20, 8))
    rows = rows_of(tokenizer, data, rows=1000)
    first = rng.integers(0, 20, 1000)
    is_random = np.arange(1000) % 2 == 1
    second = np.where(is_random | neighbors_differ, rng.integers(0, 20, 1000), first)
    rows["token_type_ids"] = np.broadcast_to(np.arange(LENGTH) >= 16, (1000, LENGTH)).astype(np.int32)
    topic = np.where(rows["token_type_ids"], second[:, None], first[:, None])
    ids = topics[topic, rng.integers(0, 8, (1000, LENGTH))].astype(np.int32)
    rows |= {"input_ids": ids, "sequence_ids": np.ones_like(ids), "mlm_weights": 0 * rows["mlm_weights"]}
    return rows


@pytest.mark.parametrize("neighbors_differ", [False, True])
def test_neighbors_that_are_unrelated(tokenizer, neighbors_differ):
    data = data_of("--data.next_sentence nsp")
    rows = pairs_of(tokenizer, data, neighbors_differ=neighbors_differ)
    found = {one.check: one for one in audit(data, tokenizer, rows, predicts_masks=False)}
    assert found["sentence order"].status == ("LOOK" if neighbors_differ else "OK")
    assert abs(found["sentence order"].number - 0.5) < 0.05 or not neighbors_differ


def test_few_pairs_say_nothing_about_the_order(tokenizer):
    data = data_of("--data.next_sentence nsp")
    rows = {name: values[:300] for name, values in pairs_of(tokenizer, data, neighbors_differ=True).items()}
    assert "sentence order" not in {one.check for one in audit(data, tokenizer, rows, predicts_masks=False)}


def test_held_out_rows_that_are_in_the_training_text(tokenizer):
    data = data_of()
    rows = rows_of(tokenizer, data)
    train, apart = ({name: values[part] for name, values in rows.items()} for part in (slice(300), slice(300, 400)))
    leaked = {name: np.concatenate([values[:50], apart[name][:50]]) for name, values in train.items()}
    status = {"clean": apart, "half": leaked, "whole": train}
    for name, expected in {"clean": 0.0, "half": 0.5, "whole": 1.0}.items():
        (one,) = held_out_text(data, tokenizer, train, status[name], 300)
        assert one.number == pytest.approx(expected, abs=0.02)
        assert one.status == ("OK" if name == "clean" else "FAIL")
    # A third of the training rows is in the sample, so a sixth of the rows stands for a half.
    third = {name: values[:100] for name, values in train.items()}
    (one,) = held_out_text(data, tokenizer, third, train, 300)
    assert one.number == pytest.approx(1.0, abs=0.05)
    assert held_out_text(data, tokenizer, train, leaked, 30_000) == []


NOTICE = "ab cd ef gh ba dc fe hg ac bd eg fh ca db ge hf ad be cf dg eh af bg"


@pytest.mark.parametrize("line", ["XYZ XYW " * 16, "abc def abc def " * 8, NOTICE, " XYZ ".join(NOTICE.split())])
def test_unknown_tokens_and_boilerplate_are_no_held_out_text(tokenizer, line):
    """Rows that begin with their own words, so that they differ, and end with the same ones."""
    data = data_of()
    rows = rows_of(tokenizer, data)
    ids = original_ids(rows)
    own = tokenizer.encode(line)[:23]
    ids[:, 8 : 8 + len(own)] = own
    rows |= {"input_ids": ids, "sequence_ids": (ids > 0).astype(np.int32), "mlm_weights": 0 * rows["mlm_weights"]}
    train, apart = ({name: values[part] for name, values in rows.items()} for part in (slice(300), slice(300, 400)))
    assert all(one.number < 0.05 for one in held_out_text(data, tokenizer, train, apart, 300))


def test_a_sample_has_whole_batches_up_to_its_size(tokenizer):
    rows = rows_of(tokenizer, data_of(), rows=8)
    blank = {name: np.zeros_like(values) for name, values in rows.items()}
    assert len(sample(iter([rows, blank, rows, rows]), 20)["input_ids"]) == 16


def test_the_unigram_loss_of_equal_counts():
    labels = np.arange(16, dtype=np.int32)[:, None]
    rows = {"mlm_labels": labels, "mlm_weights": np.ones((16, 1), np.float32)}
    assert unigram_loss(rows, rows, 16, predicts_masks=True) == pytest.approx(np.log(16))
    empty = {"mlm_labels": labels, "mlm_weights": np.zeros((16, 1), np.float32)}
    assert unigram_loss(rows, empty, 16, predicts_masks=True) is None
