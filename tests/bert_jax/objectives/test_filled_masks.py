"""Filled masks of a held-out batch: texts and answers that a reader understands."""

import jax
from support import random_batch, tiny_config

from bert_jax.objectives.masked_lm import SAMPLE_PIECES, SAMPLE_ROWS, MaskedLm
from bert_jax.tokenization import SPECIAL_PIECES, WordPieceTokenizer
from bert_jax.training.state import initial_params


def test_texts_predictions_and_answers_carry_no_signs_of_pieces():
    config = tiny_config()
    words = [f"{'##' if i % 2 else ''}w{i}" for i in range(config.model.vocab_size - 5)]
    tokenizer = WordPieceTokenizer([*SPECIAL_PIECES, *words], lower_case=True)
    objective = MaskedLm(config, None)
    params = jax.device_get(initial_params(objective.model, seed=0))
    batch = random_batch(config)
    texts = objective.samples(params, tokenizer, batch)
    assert len(texts) == min(SAMPLE_ROWS, len(batch["input_ids"]))
    for row, text in enumerate(texts):
        answers = batch["mlm_labels"][row][batch["mlm_weights"][row] > 0]
        assert [mask["answer"] for mask in text["masks"]] == [f"w{label - 5}" for label in answers]
        assert text["text"].count("[MASK]") == len(answers) and "##" not in text["text"]
        best = [piece for mask in text["masks"] for piece, _ in mask["predictions"]]
        assert len(best) == SAMPLE_PIECES * len(answers) and not any("##" in piece for piece in best)
