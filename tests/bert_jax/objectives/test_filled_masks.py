"""What a run prints at its end: losses, and filled masks of a held-out batch that a reader understands."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from support import random_batch, tiny_config

from bert_jax.objectives.masked_lm import SAMPLE_MASKS, SAMPLE_PIECES, SAMPLE_ROWS, MaskedLm
from bert_jax.tokenization import SPECIAL_PIECES, WordPieceTokenizer
from bert_jax.tokenization.byte_bpe import ROBERTA_PIECES, ByteBPETokenizer, byte_bpe_content
from bert_jax.training.state import initial_params

CONFIG = tiny_config()


def filled(words, batch):
    return filled_by(WordPieceTokenizer([*SPECIAL_PIECES, *words], lower_case=True), batch)


def filled_by(tokenizer, batch, config=CONFIG):
    objective = MaskedLm(config, None)
    params = jax.device_get(initial_params(objective.model, seed=0))
    return objective.samples(params, tokenizer, batch)


@pytest.mark.slow
def test_texts_hold_few_masks_and_no_signs_of_pieces():
    batch = random_batch(CONFIG)
    before = {name: values.copy() for name, values in batch.items()}
    texts = filled([f"{'##' if i % 2 else ''}w{i}" for i in range(CONFIG.model.vocab_size - 5)], batch)
    assert all(np.array_equal(batch[name], values) for name, values in before.items())
    assert len(texts) == min(SAMPLE_ROWS, len(batch["input_ids"]))
    for row, text in enumerate(texts):
        labels = batch["mlm_labels"][row][batch["mlm_weights"][row] > 0]
        answers = [mask["answer"] for mask in text["masks"]]
        assert len(answers) == min(SAMPLE_MASKS, len(labels)) == text["text"].count("[MASK]")
        assert set(answers) <= {f"w{label - 5}" for label in labels} and "##" not in text["text"]
        best = [piece for mask in text["masks"] for piece, _ in mask["predictions"]]
        assert len(best) == SAMPLE_PIECES * len(answers) and not any("##" in piece for piece in best)


@pytest.mark.slow
def test_whole_words_are_asked_for_in_whole_sentences():
    rest = [f"w{i}" for i in range(CONFIG.model.vocab_size - 13)]
    words = ["not", "shown", ".", "laws", "un", "##just", "fail", "badly", *rest]
    ids = {word: 5 + place for place, word in enumerate(words)}
    row = [2, *(ids[word] for word in [*words[:8], ".", "not"]), 3]
    masked = [1, 4, 6, 7]  # a word of the first sentence, "laws", a piece of a word, "fail"
    batch = {name: values[:1] * 0 for name, values in random_batch(CONFIG).items()}
    batch["input_ids"][0, : len(row)] = row
    batch["sequence_ids"][0, : len(row)] = 1
    batch["mlm_positions"][0, : len(masked)] = masked
    batch["mlm_labels"][0, : len(masked)] = [row[place] for place in masked]
    batch["mlm_weights"][0, : len(masked)] = 1
    batch["input_ids"][0, masked] = 4, ids["w3"], 4, 4  # one has been replaced, not hidden
    (text,) = filled(words, batch)
    assert [mask["answer"] for mask in text["masks"]] == ["not", "laws", "fail"]
    assert text["text"] == "[MASK] shown. [MASK] unjust [MASK] badly."
    batch["mlm_weights"][0, 0], batch["input_ids"][0, 1] = 0, ids["not"]
    (text,) = filled(words, batch)
    assert text["text"] == "[MASK] unjust [MASK] badly."


def test_whole_words_of_a_byte_level_vocabulary():
    """There the piece of a whole word begins with a blank."""
    words = ["\u0120laws", "\u0120un", "just", "\u0120fail", "\u0120badly", "."]
    rest = [f"w{i}" for i in range(CONFIG.model.vocab_size - len(ROBERTA_PIECES) - len(words))]
    pieces = [*ROBERTA_PIECES, *words, *rest]
    row = [pieces.index(piece) for piece in ["<s>", *words, "</s>"]]
    batch = {name: values[:1] * 0 for name, values in random_batch(CONFIG).items()}
    batch["input_ids"][0, : len(row)] = row
    batch["sequence_ids"][0, : len(row)] = 1
    batch["mlm_positions"][0, :3] = 1, 3, 4
    batch["mlm_labels"][0, :3] = [row[position] for position in (1, 3, 4)]
    batch["mlm_weights"][0, :3] = 1
    (text,) = filled_by(ByteBPETokenizer(byte_bpe_content(pieces, [])), batch)
    assert [mask["answer"] for mask in text["masks"]] == ["laws", "fail"]
    assert all(piece == piece.strip() for piece, _ in text["masks"][0]["predictions"])


@pytest.mark.parametrize("unit", ["whole_word", "span"])
def test_what_is_masked_as_a_whole_is_asked_for_as_a_whole(unit):
    """Words of several pieces, or of several Chinese characters."""
    config = tiny_config()
    config = replace(config, data=replace(config.data, mask_unit=unit))
    words = ["人", "工", "智", "能", "un", "##just", "."]
    pieces = [*SPECIAL_PIECES, *words, *(f"w{i}" for i in range(config.model.vocab_size - 12))]
    row = [2, *(pieces.index(word) for word in words), 3]
    masked = [1, 2, 5, 6]
    batch = {name: values[:1] * 0 for name, values in random_batch(config).items()}
    batch["input_ids"][0, : len(row)] = row
    batch["input_ids"][0, masked] = 4
    batch["sequence_ids"][0, : len(row)] = 1
    batch["mlm_positions"][0, : len(masked)] = masked
    batch["mlm_labels"][0, : len(masked)] = [row[place] for place in masked]
    batch["mlm_weights"][0, : len(masked)] = 1
    (text,) = filled_by(WordPieceTokenizer(pieces, lower_case=True), batch, config)
    assert [mask["answer"] for mask in text["masks"]] == ["人", "工", "un", "just"]
    assert text["text"].count("[MASK]") == 4


def test_three_guesses_of_a_mask_are_printed():
    guesses = [(f"w{i}", 0.5 / 2**i) for i in range(5)]
    sample = {"text": "a [MASK] .", "masks": [{"answer": "cat", "predictions": guesses}]}
    text, masks = MaskedLm(CONFIG, None).result_lines({}, [sample])
    assert text == "a [MASK] ."
    assert masks == "    [MASK] was 'cat'; predicted: w0 0.50, w1 0.25, w2 0.12"


@pytest.mark.parametrize(("loss", "said"), [(4.0, "2.5000 nats better"), (7.25, "0.7500 nats worse")])
def test_the_loss_beside_that_of_the_unigram_distribution(loss, said):
    final = {"mlm_loss": loss, "mlm_accuracy": 0.1, "targets": 68, "unigram_cross_entropy": 6.5}
    (_, line) = MaskedLm(CONFIG, None).result_lines(final, [])
    assert line.endswith(f"the model is {said}")


@pytest.mark.parametrize(("constant", "said"), [(0.61, "; the constant answer has accuracy 0.6100"), (None, "")])
def test_the_accuracy_of_pairs_beside_that_of_the_constant_answer(constant, said):
    final = {"mlm_loss": 4.0, "mlm_accuracy": 0.1, "targets": 68, "nsp_accuracy": 0.63, "nsp_loss": 0.5}
    final["nsp_constant_accuracy"] = constant
    objective = MaskedLm(CONFIG, None)
    assert objective.result_lines(final, [])[-1].endswith(f"sentence pairs: accuracy 0.6300, loss 0.5000{said}")
    report = objective.report_data(final, [])
    assert report["constant_accuracy"] == constant and "nsp_constant_accuracy" not in report["evaluation"]
