"""A small model learns tags by heart, from the loss to the predictions."""

import jax
import optax
import pytest
from builders import tiny_model
from tagging_cases import TOKENIZER, batch_of, config, outputs_of, record

from bert_jax.config import ExecutionConfig
from bert_jax.metrics import value
from bert_jax.model.bert import BertModel
from bert_jax.tasks.intent_slots import JointTask
from bert_jax.tasks.tagging import TaggingTask, predicted_tags

RECORDS = [
    record("1 2x 3 4", "B-a I-a O B-b", "play"),
    record("4 5 6", "O B-b O", "rate"),
    record("7xx 1 2 3 9 10 11 12 13 14 15", "O B-a I-a I-a O O O B-b I-b O B-a", "play"),
    record("3 3", "O B-a", "rate"),
]
MODEL = tiny_model(
    TOKENIZER.vocab_size, hidden_size=32, num_layers=1, intermediate_size=64, max_position_embeddings=16
)


LEARNERS = [
    *(pytest.param(TaggingTask, crf, marks=pytest.mark.slow) for crf in (False, True)),
    (JointTask, True),
]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "crf"), LEARNERS)
def test_a_small_model_learns_by_heart(kind, crf):
    task = kind(
        kind.from_data(config(task={"max_length": 12}, tagging={"crf": crf}), {"train": RECORDS}), TOKENIZER
    )
    units = task.featurize(RECORDS, training=True)
    assert len(units) == 5  # one record has two windows
    batch, places = batch_of(task, units, 24)
    model = BertModel(MODEL, ExecutionConfig(scan_layers=False), task.heads)
    params = model.init(jax.random.key(0), batch)["params"]
    optimizer = optax.adam(3e-3)
    denominators = task.denominators(batch)

    def loss(params):
        sums = task.loss(model.apply({"params": params}, batch), batch, axis=None)
        return sum(sums[name][0] / denominators[name] for name in denominators)

    @jax.jit
    def step(params, state):
        value, gradients = jax.value_and_grad(loss)(params)
        updates, state = optimizer.update(gradients, state)
        return optax.apply_updates(params, updates), state, value

    state, losses = optimizer.init(params), []
    for _ in range(100):
        params, state, last = step(params, state)
        losses.append(float(last))
    assert losses[-1] < 0.1 * losses[0]
    outputs = outputs_of(task.outputs(model.apply({"params": params}, batch), batch), places)
    predictions = task.decode(RECORDS, units, outputs)
    assert [tuple(predicted_tags(p)) for p in predictions] == [r.tags for r in RECORDS]
    assert value(task.scores(RECORDS, predictions)[0], len(RECORDS)) == 1
