"""Classification and regression of texts with the protocol of scikit-learn, which only its own functions import."""

import inspect
from collections.abc import Mapping, Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
from numpy.typing import ArrayLike

from bert_jax.commands.task_data import records
from bert_jax.config.loader import OptionValue
from bert_jax.config.task import TaskKind
from bert_jax.io.signatures import names_parameters
from bert_jax.records import Record

# A weight for each text.
Weights = Sequence[float] | np.ndarray

if TYPE_CHECKING:
    from sklearn.utils import Tags

    from bert_jax.commands.from_python import Model
    from bert_jax.tasks.task import Prediction


class _TextEstimator:
    """Parameters, training and predictions of both estimators."""

    _kind: ClassVar[TaskKind]
    # Name of the type in scikit-learn; versions before 1.6 read this attribute.
    _estimator_type: ClassVar[str]

    @names_parameters
    def __init__(
        self,
        model: "Model",
        *,
        dev: float | None = None,
        num_steps: int | None = None,
        num_epochs: float | None = None,
        learning_rate: float | None = None,
        batch_size: int | None = None,
        max_length: int | None = None,
        seed: int | None = None,
        options: Mapping[str, OptionValue] | None = None,
        verbose: bool = False,
    ) -> None:
        """Store the parameters of :func:`bert_jax.finetune`; None is the default of that function.

        ``model``: a loaded model, a run, or the path or name of a model. ``dev``: the share of the texts that
        selects the best parameters; None: :meth:`fit` trains on all texts and keeps the last parameters.
        ``verbose``: print the lines of the run.
        """
        self.model = model
        self.dev = dev
        self.num_steps = num_steps
        self.num_epochs = num_epochs
        self.learning_rate = learning_rate
        self.batch_size = batch_size
        self.max_length = max_length
        self.seed = seed
        self.options = options
        self.verbose = verbose

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """Return the parameters of the constructor; ``deep`` has no effect, because none is an estimator."""
        names = list(inspect.signature(type(self).__init__).parameters)[1:]
        return {name: getattr(self, name) for name in names}

    def set_params(self, **params: Any) -> Self:
        """Set parameters of the constructor. Raises ``ValueError`` for another name."""
        known = self.get_params()
        for name, value in params.items():
            if name not in known:
                allowed = f"{', '.join(known)}; other options are in the mapping options"
                raise ValueError(f"{type(self).__name__}: no parameter {name!r}; allowed: {allowed}")
            setattr(self, name, value)
        return self

    def __repr__(self) -> str:
        given = {
            name: value for name, value in self.get_params().items() if value is not None and value is not False
        }
        del given["model"]
        model = repr(self.model) if isinstance(self.model, str | PathLike) else f"<{type(self.model).__name__}>"
        return (
            f"{type(self).__name__}({', '.join([model, *(f'{name}={value!r}' for name, value in given.items())])})"
        )

    def __sklearn_clone__(self) -> Self:
        """Return an estimator with the same parameters that is not trained; both share a loaded model."""
        return type(self)(**self.get_params())

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "model_")

    def __sklearn_tags__(self) -> "Tags":
        from sklearn.utils import ClassifierTags, InputTags, RegressorTags, Tags, TargetTags

        classifies = self._estimator_type == "classifier"
        return Tags(
            estimator_type=self._estimator_type,
            target_tags=TargetTags(required=True),
            classifier_tags=ClassifierTags() if classifies else None,
            regressor_tags=None if classifies else RegressorTags(),
            input_tags=InputTags(one_d_array=True, string=True),
        )

    def _train(self, data: list[Record]) -> None:
        import bert_jax

        given = {name: value for name, value in self.get_params().items() if value is not None}
        del given["model"], given["verbose"]
        report = print if self.verbose else None
        run = bert_jax.finetune(self.model, task=self._kind, train=data, report=report, **given)
        self.model_, self.metrics_ = run.model, run.metrics

    def _predictions(self, texts: ArrayLike) -> "list[Prediction]":
        if not hasattr(self, "model_"):
            raise ValueError(f"{type(self).__name__}: not trained; call fit first")
        inputs = records((texts,), self._kind, split="X")
        found: list[Prediction] = self.model_.predict(
            [one.text if one.text_pair is None else (one.text, one.text_pair) for one in inputs]
        )
        return found


class TextClassifier(_TextEstimator):
    """A classifier of texts or pairs of texts for scikit-learn, trained by ``bert_jax.finetune``.

    ``X`` is a column of texts or of pairs of texts, or a frame with one or two columns; ``y`` contains the class of
    each text: a string, number or bool. After :meth:`fit`, ``classes_`` are the sorted classes, ``model_`` is the
    trained model, and ``metrics_`` are its metrics on the share ``dev``.
    """

    _kind = "classification"
    _estimator_type = "classifier"

    def fit(self, X: ArrayLike, y: ArrayLike) -> Self:
        """Train a new copy of ``model`` on the texts ``X`` and their classes ``y``. Raises ``ValueError`` for the
        data and parameters that ``bert_jax.finetune`` refuses."""
        data = records((X, y), self._kind)
        if missing := [one.source for one in data if one.label is None]:
            raise ValueError(f"{missing[0]}: no label; every text needs a class in y")
        classes = np.unique(np.asarray(y).ravel())
        texts = [one.label or "" for one in records(([""] * len(classes), classes), self._kind)]
        if len({*texts}) < len(texts):
            raise ValueError(f"y: classes that differ only in white space: {', '.join(map(repr, classes[:20]))}")
        self._train(data)
        self.classes_, self._class_texts = classes, texts
        return self

    def predict_proba(self, X: ArrayLike) -> np.ndarray:
        """Return float64[n, classes]: the probabilities of ``classes_`` for each text."""
        found = self._predictions(X)
        return np.array([[one["probabilities"][text] for text in self._class_texts] for one in found], np.float64)

    def predict(self, X: ArrayLike) -> np.ndarray:
        """Return the most probable of ``classes_`` for each text."""
        probabilities = self.predict_proba(X)
        return self.classes_[probabilities.argmax(axis=1)]

    def score(self, X: ArrayLike, y: ArrayLike, sample_weight: Weights | None = None) -> float:
        """Return the accuracy of :meth:`predict`."""
        return float(np.average(self.predict(X) == np.asarray(y).ravel(), weights=sample_weight))


class TextRegressor(_TextEstimator):
    """A regressor of texts or pairs of texts for scikit-learn, trained by ``bert_jax.finetune``.

    ``X`` is as for :class:`TextClassifier`; ``y`` contains a number per text. After :meth:`fit`, ``model_`` is the
    trained model, and ``metrics_`` are its metrics on the share ``dev``.
    """

    _kind = "regression"
    _estimator_type = "regressor"

    def fit(self, X: ArrayLike, y: ArrayLike) -> Self:
        """Train a new copy of ``model`` on the texts ``X`` and their values ``y``. Raises ``ValueError`` for the
        data and parameters that ``bert_jax.finetune`` refuses."""
        self._train(records((X, y), self._kind))
        return self

    def predict(self, X: ArrayLike) -> np.ndarray:
        """Return float64[n]: the value of each text."""
        return np.array([one["value"] for one in self._predictions(X)], np.float64)

    def score(self, X: ArrayLike, y: ArrayLike, sample_weight: Weights | None = None) -> float:
        """Return R², the share of the variance of ``y`` that :meth:`predict` explains.

        For a constant ``y``, it is 1 if all values are predicted exactly, else 0.
        """
        values = np.asarray(y, np.float64).ravel()
        error = np.average((values - self.predict(X)) ** 2, weights=sample_weight)
        spread = np.average((values - np.average(values, weights=sample_weight)) ** 2, weights=sample_weight)
        return float(1 - error / spread) if spread else float(error == 0)
