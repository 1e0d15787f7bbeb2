"""Display of runs and objectives: columns of log lines, and panels, tiles and sections of the report."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, NotRequired, Required, TypedDict


class MaskSample(TypedDict):
    """Predictions for one mask: the best pieces with their probabilities, and the masked piece."""

    predictions: list[tuple[str, float]]
    answer: str


class Sample(TypedDict, total=False):
    """Predictions on a held-out text: of its masks, or of the words that follow a prompt."""

    text: str
    masks: list[MaskSample]
    prompt: str
    continuation: str


# Number of classes up to which all confusions are kept, and number of the most frequent ones that are kept of more.
MOST_CLASSES, MOST_CONFUSIONS = 200, 1000


class Confusion(TypedDict, total=False):
    """Numbers of records of the classes ``labels``: ``counts`` by correct class (rows) and predicted class
    (columns). For more than MOST_CLASSES classes, in place of ``counts``: ``sizes`` by correct class; ``right``,
    the number of correct predictions; and ``largest``, the most frequent confusions as (index of the correct class,
    index of the predicted class, number of records)."""

    labels: Required[list[str]]
    counts: list[list[int]]
    sizes: list[int]
    right: int
    largest: list[tuple[int, int, int]]


class Mistake(TypedDict, total=False):
    """A record with a wrong prediction: its texts, the correct and the predicted answer as text, and the score of
    the prediction. ``words``: the words of a tagged text with their correct and predicted tags. ``marks``: (first,
    end, "gold" or "predicted") of answers in ``text_pair``, in characters."""

    text: str
    text_pair: str
    gold: str
    predicted: str
    score: float
    words: list[tuple[str, str, str]]
    marks: list[tuple[int, int, str]]


class Counts(TypedDict):
    """Numbers of records by group, of each series."""

    title: str
    groups: list[str]
    series: dict[str, list[int]]


class Slices(TypedDict):
    """The value of ``metric`` in groups of the records: (name, number of records, value) of each. ``others``: the
    values of other metrics by name, in the order of the groups."""

    title: str
    metric: str
    groups: list[tuple[str, int, float]]
    others: NotRequired[dict[str, list[float]]]


class Points(TypedDict):
    """Pairs of values of a sample of the records."""

    title: str
    x: str
    y: str
    values: list[tuple[float, float]]


class Support(TypedDict):
    """Numbers of entities or tags (``unit``) of a split by type. ``answer`` is a constant answer in words, and
    ``accuracy`` its share of correct tags."""

    unit: str
    counts: dict[str, int]
    answer: str
    accuracy: float


class Confidence(TypedDict):
    """The mean probability of the predicted answers, the share of right ones, and the calibration error (Guo et al.
    2017)."""

    mean: float
    accuracy: float
    error: float


class Kinds(TypedDict):
    """Numbers of right answers and of the kinds of mistakes. ``unit``: what is counted."""

    unit: str
    counts: dict[str, int]


class Findings(TypedDict, total=False):
    """Findings about the predictions of a split: the numbers of scored and wrong records, the worst mistakes.
    ``types``: correct types of entities with those of the predicted entities that overlap, or "none".
    ``windows``: the number of records that are read in several windows."""

    scored: int
    wrong: int
    windows: int
    support: Support
    confidence: Confidence
    kinds: Kinds
    types: Confusion
    mistakes: list[Mistake]
    counts: Counts
    points: Points
    slices: list[Slices]


class PlainAnswer(TypedDict):
    """The value of ``metric`` for ``answer`` (in words), which needs no training."""

    answer: str
    metric: str
    value: float | None


class ReportData(TypedDict, total=False):
    """Results of a run that only its report shows, the content of report_data.json."""

    title: str
    # Lines at the top.
    summary: list[str]
    # The final evaluation; None: undefined.
    evaluation: Mapping[str, float | None]
    # Of some values of the evaluation: (sum, weight) over each of a few groups of held-out rows, in their order.
    evaluation_groups: Mapping[str, list[tuple[float, float]]]
    # By split.
    confusion: Mapping[str, Confusion]
    findings: Mapping[str, Findings]
    plain_answers: Mapping[str, PlainAnswer]
    # Baselines and samples of the objective.
    unigram_loss: float | None
    constant_accuracy: float | None
    samples: list[Sample]
    filled_masks: list[Sample]


class Examples(NamedTuple):
    """A section of a report: its heading, what its examples are, their texts, and the HTML of each of them."""

    heading: str
    note: str
    texts: Sequence[str]
    items: Sequence[str]


@dataclass(frozen=True)
class Column:
    """A column of a printed log line. It shows ``template`` filled with the value of the metric named by ``key``
    and, unless ``accuracy`` is empty, ``(acc VALUE)`` with the value of the metric named by ``accuracy``."""

    template: str
    key: str
    style: str = ".3f"
    accuracy: str = ""


@dataclass(frozen=True)
class Panel:
    """A plot of one metric over the steps."""

    title: str
    key: str
    log: bool = False
    percent: bool = False
    # True: a running mean is plotted over the values.
    noisy: bool = True
    # ``split`` of the evaluations that are plotted together with the training values.
    split: str = "eval"
    # Key in report_data.json of a value that is plotted as a dashed line, and its name in the legend.
    baseline: tuple[str, str] = ("", "")


@dataclass(frozen=True)
class Tile:
    """A number at the top of the report. ``beside``: key of a second number, shown below it, and its name."""

    label: str
    key: str
    beside: tuple[str, str] = ("", "")


@dataclass(frozen=True)
class Display:
    """Description of how one objective is shown in logs and reports; every field may be empty."""

    # Keys of every training line of metrics.jsonl; a missing value is null.
    keys: tuple[str, ...] = ()
    # The progress bar also shows the first column.
    columns: tuple[Column, ...] = ()
    panels: tuple[Panel, ...] = ()
    # Tiles of final evaluation values and baselines.
    tiles: tuple[Tile, ...] = ()
    # Each section of examples after the charts, from the content of report_data.json.
    sections: Callable[[ReportData], Sequence[Examples]] = lambda data: ()


# Columns of every run, after the columns of the objective; null is printed as n/a.
RUN_COLUMNS = (
    Column("lr {}", "learning_rate", ".2g"),
    Column("grad {}", "grad_norm", ".3g"),
    Column("{} s/step", "seconds_per_step"),
)
# Panels of every run, before and after the panels of the objective.
FIRST_PANELS = (Panel("loss", "loss"),)
LAST_PANELS = (
    Panel("learning rate", "learning_rate", noisy=False),
    Panel("gradient norm", "grad_norm", log=True),
    Panel("tokens per second", "tokens_per_second"),
    Panel("model FLOP utilization", "mfu", percent=True),
)
# Baselines of panels, and the names under which evaluations log them.
LOGGED_LEVELS = {"unigram_loss": "unigram_cross_entropy", "constant_accuracy": "nsp_constant_accuracy"}
# Tiles of every run, from the last training line; rates are means over the run.
RUN_TILES = (
    Tile("examples seen", "examples_seen", ("epoch", "passes over the data")),
    Tile("tokens per second, mean", "tokens_per_second"),
    Tile("model FLOP utilization, mean", "mfu"),
)
