"""``TextClassifier`` and ``TextRegressor``, also with scikit-learn; a count of words stands for training."""

import collections
import pickle
import types

import numpy as np
import pandas as pd
import pytest

import bert_jax

TEXTS = [f"{word} {i}" for i in range(12) for word in ("good", "bad")]
CLASSES = [text.split()[0] for text in TEXTS]


class Counts:
    """A model that knows the label of each word of its training texts."""

    def __init__(self, data):
        self.found = collections.defaultdict(collections.Counter)
        for one in data:
            for word in one.text.split():
                self.found[word][one.label] += 1
        self.labels = sorted({one.label for one in data})

    def predict(self, texts):
        return [self.of(text if isinstance(text, str) else " ".join(text)) for text in texts]

    def of(self, text):
        first = self.found[text.split()[0]]
        total = sum(first.values()) or 1
        probabilities = {label: first[label] / total for label in self.labels}
        value = sum(float(one) * n for one, n in first.items()) / total if self.labels[0][0].isdecimal() else None
        return {"probabilities": probabilities, "value": value}


@pytest.fixture
def calls(monkeypatch):
    """The arguments of each call of ``finetune``."""
    made = []

    def finetune(model, **options):
        made.append((model, options))
        return types.SimpleNamespace(model=Counts(options["train"]), metrics={"accuracy": 1.0})

    monkeypatch.setattr(bert_jax, "finetune", finetune, raising=False)
    return made


@pytest.mark.parametrize(
    "classes",
    [
        CLASSES,
        np.array(CLASSES),
        pd.Series(CLASSES, dtype="category"),
        [int(name == "good") for name in CLASSES],
        np.array([float(name == "good") for name in CLASSES]),
        [name == "good" for name in CLASSES],
        np.array([[name == "good"] for name in CLASSES]),
        pd.DataFrame({"y": [3 if name == "good" else 20 for name in CLASSES]}),
    ],
)
def test_classes_are_those_of_y(calls, classes):
    own = np.asarray(classes).ravel()
    model = bert_jax.TextClassifier("m").fit(TEXTS, classes)
    assert model.classes_.tolist() == sorted({*own.tolist()}) and model.classes_.dtype == own.dtype
    assert model.predict(TEXTS).tolist() == own.tolist() and model.score(TEXTS, classes) == 1.0
    assert model.predict(TEXTS).dtype == own.dtype
    proba = model.predict_proba(TEXTS[:2])
    assert proba.dtype == np.float64 and proba.shape == (2, 2)
    assert model.classes_[proba.argmax(1)].tolist() == own[:2].tolist()


@pytest.mark.parametrize(
    "texts",
    [np.array(TEXTS), pd.Series(TEXTS, index=[7] * 24), pd.DataFrame({"a": TEXTS}), tuple(TEXTS), iter(TEXTS)],
)
def test_texts_of_every_type(calls, texts):
    model = bert_jax.TextClassifier("m").fit(texts, CLASSES)
    assert [one.text for one in calls[0][1]["train"]] == TEXTS and model.predict(TEXTS).tolist() == CLASSES


def test_pairs_of_texts(calls):
    pairs = pd.DataFrame({"first": TEXTS, "second": CLASSES})
    for X in (pairs, pairs.to_numpy(), list(zip(TEXTS, CLASSES, strict=True))):
        model = bert_jax.TextClassifier("m").fit(X, CLASSES)
        assert [one.text_pair for one in calls[-1][1]["train"]] == CLASSES
        assert model.predict(X).tolist() == CLASSES


def test_only_parameters_that_are_set_are_passed_on(calls):
    bert_jax.TextClassifier("m", num_steps=3, options={"training.patience": 2}, dev=0.5).fit(TEXTS, CLASSES)
    bert_jax.TextRegressor("m", verbose=True, seed=0).fit(["a", "b"], [1, 2])
    (model, given), (_, other) = calls
    assert model == "m" and [one.label for one in given.pop("train")] == CLASSES
    options = {"training.patience": 2}
    assert given == {"task": "classification", "num_steps": 3, "options": options, "dev": 0.5, "report": None}
    assert other | {"train": 0} == {"task": "regression", "train": 0, "seed": 0, "report": print}


def test_parameters():
    model = bert_jax.TextClassifier("m", seed=1)
    assert model.get_params()["seed"] == 1 and model.get_params()["dev"] is None
    assert model.set_params(seed=2, max_length=32) is model and (model.seed, model.max_length) == (2, 32)
    assert repr(model) == "TextClassifier('m', max_length=32, seed=2)"
    assert repr(bert_jax.TextRegressor(Counts([]))) == "TextRegressor(<Counts>)"
    with pytest.raises(
        ValueError, match=r"TextClassifier: no parameter 'epochs'; allowed: model, dev, num_steps, num"
    ):
        model.set_params(epochs=3)


def test_values(calls):
    model = bert_jax.TextRegressor("m").fit(TEXTS, [2.5 if name == "good" else 1.0 for name in CLASSES])
    assert model.predict(["good x", "bad y"]).tolist() == [2.5, 1.0]
    assert model.score(["good", "bad"], [2.5, 1.0]) == 1.0
    assert model.score(["good", "bad"], [2.5, 2.0]) < 0
    assert [model.score(["good", "bad"], [2.5, 2.5]), model.score(["good"], [2.5])] == [0, 1]
    assert model.score(["good", "bad", "bad"], [2.5, 2.0, 1.0], sample_weight=[1, 0, 1]) == 1.0
    assert calls[0][1]["task"] == "regression"


@pytest.mark.parametrize(
    ("X", "y", "message"),
    [
        (["a", "b"], ["x"], "train: the columns differ in length"),
        (["a", "b"], [1, np.nan], r"train\[1\]: no label; every text needs a class in y"),
        (["a", "b"], ["x", " x"], "y: classes that differ only in white space"),
        (
            ["a", "b"],
            [[1, 0], [0, 1]],
            r"train\[0\]: label is a list of 2; several labels need task.kind multi_label",
        ),
        (["a", None], ["x", "y"], r"train\[1\]: text is missing"),
        ("a text", ["x"], "train: a tuple contains columns"),
        (["a"], None, "train: a tuple contains columns"),
    ],
)
def test_one_line_for_bad_data(calls, X, y, message):
    with pytest.raises(ValueError, match=message):
        bert_jax.TextClassifier("m").fit(X, y)
    assert not calls


def test_predictions_before_training():
    with pytest.raises(ValueError, match="TextClassifier: not trained; call fit first"):
        bert_jax.TextClassifier("m").predict(["a"])


def test_a_trained_estimator_is_pickled(calls):
    model = pickle.loads(pickle.dumps(bert_jax.TextClassifier("m").fit(TEXTS, CLASSES)))
    assert model.predict(TEXTS).tolist() == CLASSES


@pytest.mark.slow
def test_an_estimator_trains_and_predicts_as_finetune_does(source):
    options = {"num_steps": 12, "batch_size": 8, "max_length": 16, "learning_rate": 3e-3}
    texts, classes = [f"w{i % 2 + 5} w{i}" for i in range(24)], ["ab"[i % 2] for i in range(24)]
    own = bert_jax.TextClassifier(str(source), **options).fit(texts, classes)
    run = bert_jax.finetune(source, train=(texts, classes), report=None, **options)
    expected = [list(one["probabilities"].values()) for one in run.model.predict(texts)]
    np.testing.assert_array_equal(own.predict_proba(texts), expected)
    assert own.score(texts, classes) > 0.9
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(own)).predict_proba(texts), expected)
    values = bert_jax.TextRegressor(run.model, **options).fit(texts, [0.0, 2.0] * 12).predict(texts)
    assert values.shape == (24,) and values[1] > values[0]


# ------------------------------------------------------------------ scikit-learn


@pytest.fixture
def sklearn():
    return pytest.importorskip("sklearn", reason="scikit-learn is not installed")


def test_clone(sklearn, calls):
    from sklearn.base import clone, is_classifier, is_regressor

    source = object()
    model = bert_jax.TextClassifier(source, seed=3).fit(TEXTS, CLASSES)
    copy = clone(model)
    assert copy is not model and copy.get_params() == model.get_params() and not hasattr(copy, "classes_")
    assert (
        is_classifier(copy)
        and is_regressor(bert_jax.TextRegressor("m"))
        and not is_classifier(bert_jax.TextRegressor("m"))
    )


def test_cross_validation_and_search(sklearn, calls):
    from sklearn.model_selection import GridSearchCV, cross_val_predict, cross_val_score

    assert cross_val_score(bert_jax.TextClassifier("m"), TEXTS, CLASSES, cv=3).tolist() == [1.0] * 3
    assert cross_val_score(bert_jax.TextClassifier("m"), TEXTS, CLASSES, cv=3, scoring="neg_log_loss").max() <= 0
    proba = cross_val_predict(bert_jax.TextClassifier("m"), TEXTS, CLASSES, cv=3, method="predict_proba")
    assert proba.shape == (24, 2)
    values = [float(name == "good") for name in CLASSES]
    assert cross_val_score(bert_jax.TextRegressor("m"), np.array(TEXTS), values, cv=3).tolist() == [1.0] * 3
    calls.clear()
    search = GridSearchCV(bert_jax.TextClassifier("m"), {"learning_rate": [1e-4, 1e-3], "num_epochs": [1]}, cv=2)
    search.fit(pd.Series(TEXTS), CLASSES)
    assert [one["learning_rate"] for _, one in calls] == [1e-4, 1e-4, 1e-3, 1e-3, 1e-4]
    assert search.best_params_ == {"learning_rate": 1e-4, "num_epochs": 1} and search.predict(["good"]) == ["good"]


def test_pipelines_and_fitted_checks(sklearn, calls):
    from sklearn.exceptions import NotFittedError
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import FunctionTransformer
    from sklearn.utils.validation import check_is_fitted

    with pytest.raises(NotFittedError):
        check_is_fitted(bert_jax.TextClassifier("m"))
    lower = FunctionTransformer(lambda texts: [text.lower() for text in texts])
    pipeline = make_pipeline(lower, bert_jax.TextClassifier("m"))
    assert pipeline.fit(TEXTS, CLASSES).score([text.upper() for text in TEXTS], CLASSES) == 1.0
    check_is_fitted(pipeline[-1])
