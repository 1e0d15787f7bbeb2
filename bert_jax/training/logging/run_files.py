"""Facts about a run from the files of its workdir, for the reports of complete, stopped and running runs, also of
older versions. Missing and damaged files count as empty. This module does not import jax."""

import contextlib
import datetime
import fcntl
import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from bert_jax.io.storage import Location, ObjectPath
from bert_jax.objectives.display import PlainAnswer, ReportData
from bert_jax.tokenization.tokenizer import without_surrogates
from bert_jax.training.checkpoint.folder import saved_steps
from bert_jax.training.launch import RECORD
from bert_jax.training.logging.logger import Row
from bert_jax.training.logging.metrics_file import METRICS_FILE, rows_of

HTML_FILE = "report.html"
IMAGE_FILE = "report.png"
DATA_FILE = "report_data.json"
LOG_FILE = "train.log"
CONFIG_FILE = "config.yaml"
# Results of the checks of a run (training.doctor, bert-jax doctor).
DOCTOR_FILE = "doctor.json"
# The last line of an attempt in train.log that ends early begins with this; the reason follows.
ENDED = "ended early: "
# Beginnings of two lines at the start of an attempt in train.log: of the host with its processor and the versions
# of jax and bert_jax, and of the command.
PLACE, COMMAND = "runs on ", "command: "
State = Literal["complete", "running", "stopped"]
STATES: Mapping[State, str] = {"complete": "complete", "running": "in progress", "stopped": "stopped, not complete"}

_STAMPED = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)  (.*)")
# The line that begins every attempt at a run (training/run.py).
_MODEL_LINE = re.compile(r"([\d,]+) parameters, (.+), mesh (\S+), (\w+)")
_START_LINE = re.compile(r"start-up ([\d.]+) s, data ([\d.]+) s, compiling the training step ([\d.]+) s")
_MESSAGES = datetime.timedelta(seconds=2)
_STEP_LINE = re.compile(r"(\S+ )?step [\d,]+/[\d,]+ ")


@dataclass
class LogFacts:
    """Facts from train.log: the number of parameters, the devices, the mesh, the dtype, the seconds of all
    attempts together, those of start-up and compilation among them, how many attempts there were, the lines that
    are not about a step, the host with its processor, the versions of jax and bert_jax, the command, the times of
    the first line, of the start of the process and of the last line (empty: unknown), and the reason why the last
    attempt ended early (empty: not recorded). ``interval`` and ``longest_interval``: mean and longest seconds
    between two lines about steps of the last attempt (0: unknown)."""

    parameters: int = 0
    devices: str = ""
    mesh: str = ""
    dtype: str = ""
    seconds: float = 0.0
    start_seconds: float = 0.0
    attempts: int = 0
    lines: list[str] = field(default_factory=list)
    place: str = ""
    versions: str = ""
    command: str = ""
    first_time: str = ""
    began: str = ""
    last_time: str = ""
    ending: str = ""
    interval: float = 0.0
    longest_interval: float = 0.0


@dataclass(frozen=True)
class RunFiles:
    """The content of a workdir. ``data`` and ``results`` (metrics.json) are empty unless the run is complete."""

    name: str
    state: State
    rows: list[dict[str, Any]]
    config: Mapping[str, Any]
    config_text: str
    data: ReportData
    results: list[Mapping[str, Any]]
    log: LogFacts
    # True if the run starts from no other model.
    from_random: bool
    # The folder or URL, and the steps of the complete checkpoints.
    workdir: str = ""
    saved_steps: Sequence[int] = ()
    # The content of doctor.json; empty without it.
    doctor: Mapping[str, Any] = field(default_factory=dict)
    # Time of the last change of train.log in seconds since 1970; 0: unknown.
    last_line: float = 0.0

    @property
    def is_finetuning(self) -> bool:
        """True for a fine-tuning run."""
        return "task" in self.config

    @property
    def title(self) -> str:
        """The title of the report."""
        return str(self.data.get("title", self.name))

    @property
    def step(self) -> int:
        """The last logged step."""
        return max((row["step"] for row in self.rows), default=0)

    @property
    def num_steps(self) -> int:
        """The number of steps of the config; 0 if it is unknown."""
        value = self.option("training.num_steps")
        return value if isinstance(value, int) else 0

    @property
    def training_examples(self) -> int:
        """The number of training examples; 0 if it is unknown."""
        last = self.last()
        epoch, seen = last.get("epoch"), last.get("examples_seen")
        if isinstance(epoch, int | float) and isinstance(seen, int | float) and epoch > 0:
            return round(seen / epoch)
        return 0

    def option(self, name: str) -> Any:
        """Return the option SECTION.NAME of the config; None if the config lacks it."""
        section, _, key = name.partition(".")
        values = self.config.get(section)
        return values.get(key) if isinstance(values, Mapping) else None

    def last(self, split: str = "train") -> Row:
        """Return the last values by name of the rows of ``split``."""
        found: dict[str, Any] = {}
        for row in self.rows:
            if row.get("split", "train") == split:
                found |= row
        return found

    def splits(self) -> list[str]:
        """Return the names of the evaluated splits, in the order of their first evaluation."""
        return list(dict.fromkeys(str(row["split"]) for row in self.rows if "split" in row))

    def scores(self) -> dict[str, Mapping[str, float | None]]:
        """Return the scores of a fine-tuning run by split: the final ones or, before these, the last ones."""
        final: dict[str, Mapping[str, float | None]] = {
            entry["split"]: {name: one["value"] for name, one in entry["metrics"].items()} for entry in self.results
        }
        return final or {split: _numbers(self.last(split)) for split in self.splits()}

    def start_scores(self, split: str) -> Mapping[str, float | None]:
        """Return the scores of a split before training; empty if they were not computed."""
        return next((_numbers(row) for row in self.rows if (row["step"], row.get("split")) == (0, split)), {})

    def plain_answers(self) -> Mapping[str, PlainAnswer]:
        """Return what an answer without training scores, by split."""
        known: dict[str, Any] = {entry["split"]: entry["baseline"] for entry in self.results if "baseline" in entry}
        return known or self.data.get("plain_answers") or {}


def read_run(
    workdir: Location,
    state: State | None = None,
    data: ReportData | None = None,
    name: str = "",
    place: Location | None = None,
) -> RunFiles:
    """Return the content of ``workdir``. ``state`` is the state of its run (default: determined from the files),
    ``data`` the content of report_data.json (default: the file), ``name`` the name of the run (default: that of the
    folder), ``place`` its workdir if ``workdir`` is only the local folder of its logs."""
    if state is None:
        # A run that is not complete removes this file when it starts; the lease of a store can outlive its run.
        is_complete = (workdir / DATA_FILE).is_file()
        state = "complete" if is_complete else "running" if is_running(workdir) else "stopped"
    is_complete = state == "complete"
    if data is None:
        data = read_data(workdir) if is_complete else {}
    text = _text(workdir / CONFIG_FILE)
    try:
        config = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError):  # ValueError: a date that does not exist
        config = {}
    results = _json(workdir / "metrics.json", []) if is_complete else []
    results = [one for one in results if isinstance(one, dict) and "split" in one and "metrics" in one]
    own = workdir.name if isinstance(workdir, ObjectPath) else workdir.resolve().name
    return RunFiles(
        name=without_surrogates(name or own or str(workdir)),  # of bytes that are not UTF-8
        state=state,
        rows=[row for _, row in rows_of(_bytes(workdir / METRICS_FILE))],
        config=config if isinstance(config, dict) else {},
        config_text=text,
        data=data,
        results=results,
        log=read_log(_text(workdir / LOG_FILE)),
        from_random=isinstance(config, dict) and "task" not in config and not (workdir / RECORD).is_file(),
        workdir=without_surrogates(str(place or workdir)),
        saved_steps=_saved_steps(place or workdir),
        doctor=_json(workdir / DOCTOR_FILE, {}),
        last_line=_changed(workdir / LOG_FILE),
    )


def _changed(path: Location) -> float:
    if isinstance(path, ObjectPath):  # the time of the last upload
        return 0.0
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _saved_steps(workdir: Location) -> Sequence[int]:
    try:
        return saved_steps(workdir)
    except OSError:
        return ()


def read_data(workdir: Location) -> ReportData:
    """Return the content of report_data.json; empty if the run is not complete."""
    data: ReportData = _json(workdir / DATA_FILE, {})
    return data


def has_report(folder: Location) -> bool:
    """Return True if ``folder`` has the report of a complete run. A run writes report_data.json last; while it is
    in progress, only the page exists."""
    return (folder / HTML_FILE).is_file() and (folder / DATA_FILE).is_file()


def remove_report(folder: Path) -> None:
    """Delete the report of an earlier, shorter run in ``folder``."""
    (folder / DATA_FILE).unlink(missing_ok=True)
    (folder / HTML_FILE).unlink(missing_ok=True)


def is_running(workdir: Location) -> bool:
    """Return True if a process has locked ``workdir``."""
    if isinstance(workdir, ObjectPath):
        return (workdir / ".lease").is_file()
    with contextlib.suppress(OSError), (workdir / ".lock").open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def read_log(text: str) -> LogFacts:
    """Return what the lines of train.log tell."""
    facts, stamps, lines = LogFacts(), list[datetime.datetime](), dict[str, None]()
    of_steps = list[datetime.datetime]()
    for stamp, line in _stamped(text):
        if model := _MODEL_LINE.fullmatch(line):
            # The messages of an attempt precede its first line by less than a second.
            facts.seconds += _seconds([one for one in stamps if one < stamp - _MESSAGES] if facts.attempts else [])
            facts.parameters = int(model[1].replace(",", ""))
            facts.devices, facts.mesh, facts.dtype = model[2], model[3], model[4]
            facts.attempts += 1
            stamps, of_steps = [], []
        elif start := _START_LINE.fullmatch(line):
            before = float(start[1]) + float(start[2])
            facts.seconds += before
            facts.start_seconds += before + float(start[3])
            if facts.attempts == 1 and stamps:  # the log begins after the start-up
                facts.began = str(stamps[0] - datetime.timedelta(seconds=round(before)))
        elif line.startswith(PLACE):
            facts.place, _, versions = line.removeprefix(PLACE).partition(", jax ")
            facts.versions = f"jax {versions}" if versions else ""
        elif line.startswith(COMMAND):
            facts.command = line.removeprefix(COMMAND)
        elif _STEP_LINE.match(line):
            of_steps.append(stamp)
        else:
            lines[line] = None
        stamps.append(stamp)
        facts.first_time, facts.last_time = facts.first_time or str(stamp), str(stamp)
        facts.ending = line.removeprefix(ENDED) if line.startswith(ENDED) else ""
    facts.lines += lines
    if len(of_steps) > 2:
        facts.interval = _seconds(of_steps) / (len(of_steps) - 1)
        facts.longest_interval = max(_seconds(pair) for pair in itertools.pairwise(of_steps))
    facts.seconds += _seconds(stamps) if facts.attempts else 0.0
    return facts


def _seconds(stamps: Sequence[datetime.datetime]) -> float:
    return (stamps[-1] - stamps[0]).total_seconds() if stamps else 0.0


def _stamped(text: str) -> Iterator[tuple[datetime.datetime, str]]:
    for line in text.splitlines():
        if match := _STAMPED.fullmatch(line):
            with contextlib.suppress(ValueError):
                yield datetime.datetime.fromisoformat(match[1]), match[2]


def _numbers(row: Row) -> dict[str, float | None]:
    return {
        name: value
        for name, value in row.items()
        if name not in ("step", "split") and (value is None or isinstance(value, int | float))
    }


def _bytes(path: Location) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def _text(path: Location) -> str:
    return _bytes(path).decode("utf-8", "replace")


def _json(path: Location, default: Any) -> Any:
    try:
        value = json.loads(_bytes(path))
    except (ValueError, RecursionError):
        return default
    return value if isinstance(value, type(default)) else default
