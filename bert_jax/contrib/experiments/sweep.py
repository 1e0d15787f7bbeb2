"""A sweep starts several fine-tuning runs with one command, each in its own workdir, and writes a result table.

WORKDIR/runs/NAME is the workdir of a run. Finished runs are not repeated, so the same command continues a killed
sweep, and several processes on one WORKDIR divide the runs among themselves. The table is computed only from the
metrics.json files of the runs.
"""

import contextlib
import gc
import io
import itertools
import json
import operator
import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypedDict

import jax

from bert_jax.config.finetune import FinetuneConfig
from bert_jax.config.former import current_fields
from bert_jax.config.options import Setting
from bert_jax.contrib.experiments.cells import Cell, shared_settings
from bert_jax.finetuning.artifacts import ChosenBy, read_results
from bert_jax.io.files import write_whole
from bert_jax.io.folder_lock import FolderTaken, hold_folder
from bert_jax.json_values import Json
from bert_jax.process import exits, hosts
from bert_jax.process.signals import StopRequest

RUNS, TABLE, DATA, IMAGE, SHARED = "runs", "sweep.md", "sweep.json", "sweep.png", "shared.json"


class Run(TypedDict):
    """An entry of sweep.json; ``metrics``: split -> metric -> value."""

    run: str
    settings: dict[str, str]
    seed: int
    chosen_by: ChosenBy | None
    metrics: dict[str, dict[str, float | None]]


def run_sweep(
    base: FinetuneConfig,
    cells: Sequence[Cell],
    workdir: Path,
    train: Callable[[Path, Sequence[Setting]], None],
    *,
    init_from: str,
    stop: StopRequest,
    host_timeout: float,
) -> int:
    """Execute every unfinished run of ``cells``, write the table, and return the exit code.

    Args:
        base: the options that the runs share.
        train: function of (folder, settings) that trains one run with additional settings.

    Raises:
        ValueError: ``workdir`` contains a sweep with other settings, or the options or data of a run are invalid.
        exits.Stop: a signal ended the sweep.
    """
    if hosts.is_lead():
        with _alone(workdir):
            _same_sweep(workdir / SHARED, {"init_from": init_from, **shared_settings(base, cells)})
    # One cache for all runs, so that runs that differ only in their seeds compile once.
    compiled = base.training.compilation_cache or str(workdir.absolute() / "compilation_cache")
    taken, failed = 0, 0
    for number, cell in enumerate(cells):
        folder = workdir / RUNS / cell.name
        if hosts.broadcast_from_lead("is_finished", bool(read_results(folder)), host_timeout):
            _drop_checkpoints(folder)
            continue
        if hosts.broadcast_from_lead("is_taken", hosts.is_lead() and _is_taken(folder), host_timeout):
            taken += 1
            continue
        if stop.reached():
            line = f"stopped before run {number + 1}, {stop.reason()}: run the same command to continue"
            raise exits.Stop(stop.exit_code, line, agreed=True)
        _say(f"--- run {number + 1} of {len(cells)}: {folder}")
        try:
            train(folder, [Setting("--sweep", "training.compilation_cache", compiled), *cell.settings])
        except FolderTaken:
            taken += 1
        except exits.Stop as ended:
            if ended.code != exits.NON_FINITE:
                raise
            failed += 1
            _say(f"{folder}: {ended}")
        _drop_checkpoints(folder)
        jax.clear_caches()
        gc.collect()
    if hosts.is_lead():
        with _alone(workdir):
            write_results(base, cells, workdir)
        left = f"; another process executes {taken} more and completes the table" if taken else ""
        left += f"; {failed} ended early and have no values in the table" if failed else ""
        _say(f"{len(cells) - taken - failed} of {len(cells)} runs finished{left}; {workdir / TABLE}:")
        _say((workdir / TABLE).read_text(encoding="utf-8"))
    return exits.NON_FINITE if failed else exits.OK


@contextlib.contextmanager
def _alone(workdir: Path) -> Iterator[None]:
    """Lock ``workdir``, which other processes lock only briefly; raise ``FolderTaken`` after waiting a minute."""
    with contextlib.ExitStack() as held:
        for tries in range(600, -1, -1):
            try:
                held.enter_context(hold_folder(workdir, "a run is using this workdir; use another --workdir"))
                break
            except FolderTaken:
                if not tries:
                    raise
                time.sleep(0.1)
        yield


def _is_taken(folder: Path) -> bool:
    try:
        with hold_folder(folder, ""):
            return False
    except FolderTaken:
        return True


def _drop_checkpoints(folder: Path) -> None:
    """Delete the checkpoints of a finished run to save disk space; its best parameters remain."""
    if hosts.is_lead() and read_results(folder):
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)


def _same_sweep(path: Path, now: dict[str, Json]) -> None:
    """Write the shared settings of the runs to ``path``; raise ``ValueError`` if the file contains different
    settings."""
    text = json.dumps(now, indent=1, ensure_ascii=False)
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, f"{text}\n")
        return
    before = current_fields(json.loads(path.read_text(encoding="utf-8")), "model.")
    changed = [f"{key}: {before[key]} -> {now[key]}" for key in now if key in before and before[key] != now[key]]
    if changed:
        raise ValueError(
            f"{path.parent}: contains runs with other settings ({'; '.join(changed)}); use another --workdir"
        )
    if any(key not in before for key in now):  # an earlier command swept this option, the current one does not
        write_whole(path, f"{json.dumps({**before, **now}, indent=1, ensure_ascii=False)}\n")


def _say(text: str) -> None:
    if hosts.is_lead():
        print(text, flush=True)


# --- The table --------------------------------------------------------------------------------------------------


def write_results(base: FinetuneConfig, cells: Sequence[Cell], workdir: Path) -> None:
    """Write sweep.md, sweep.json and sweep.png from the finished runs; equal results produce identical files."""
    results: list[Run] = []
    for cell in cells:
        entries = read_results(workdir / RUNS / cell.name)
        values = {
            entry["split"]: {name: metric["value"] for name, metric in entry["metrics"].items()}
            for entry in entries
        }
        chosen = next((entry["chosen_by"] for entry in entries if "chosen_by" in entry), None)
        run = Run(run=cell.name, settings=dict(cell.values), seed=cell.seed, chosen_by=chosen, metrics=values)
        results.append(run)
    write_whole(workdir / DATA, f"{json.dumps(results, indent=1, ensure_ascii=False)}\n")
    done = [run for run in results if run["metrics"]]
    if not done:
        write_whole(workdir / TABLE, "No run is finished.\n")
        return
    chosen = done[0]["chosen_by"]
    assert chosen is not None
    metric, higher = chosen["metric"], chosen["higher_is_better"]
    splits = [name for name in done[0]["metrics"] if metric in done[0]["metrics"][name]]
    write_whole(workdir / TABLE, _table(results, splits, metric, higher))
    rows = [(_label(settings), _values(runs, splits[0], metric)) for settings, runs in _groups(results)]
    write_whole(workdir / IMAGE, draw_points(rows, f"{base.name}: {metric} on {splits[0]}"))


def _groups(results: Sequence[Run]) -> list[tuple[dict[str, str], list[Run]]]:
    """Return (settings, runs) for each group of runs that differ only in their seeds, in the order of the sweep."""
    groups = itertools.groupby(results, operator.itemgetter("settings"))
    return [(settings, list(runs)) for settings, runs in groups]


def _values(runs: Sequence[Run], split: str, metric: str) -> list[float]:
    values = [run["metrics"].get(split, {}).get(metric) for run in runs]
    return [value for value in values if value is not None]


def _label(settings: dict[str, str]) -> str:
    return ", ".join(f"{key.rpartition('.')[2]} {value}" for key, value in settings.items()) or "all seeds"


def _table(results: Sequence[Run], splits: Sequence[str], metric: str, higher: bool) -> str:
    """Return a Markdown table with the mean, the standard deviation and the best value over the seeds of each
    setting; the best mean is in bold."""
    sign = 1 if higher else -1
    groups = _groups(results)
    first = splits[0]
    means = [_mean(_values(runs, first, metric)) for _, runs in groups]
    best_mean = max((mean for mean in means if mean is not None), key=lambda mean: sign * mean, default=None)
    columns = [key.rpartition(".")[2] for key in groups[0][0]]
    head = [*columns, "seeds", f"{first} {metric}", "sd", "best", *(f"{split} {metric}" for split in splits[1:])]
    lines = [_row(head), _row(["---"] * len(head))]
    for (settings, runs), mean in zip(groups, means, strict=True):
        values = _values(runs, first, metric)
        is_best = mean is not None and mean == best_mean and len(groups) > 1
        shown = f"**{_figure(mean)}**" if is_best else _figure(mean)
        spread = _figure(statistics.stdev(values) if len(values) > 1 else None)
        top = _figure(max(values, key=lambda value: sign * value, default=None))
        others = [_figure(_mean(_values(runs, split, metric))) for split in splits[1:]]
        lines.append(_row([*settings.values(), str(len(values)), shown, spread, top, *others]))
    scored = [(values[0], run["run"]) for run in results if (values := _values([run], first, metric))]
    if scored:
        value, name = max(scored, key=lambda pair: sign * pair[0])
        lines += ["", f"Best run: {RUNS}/{name} ({_figure(value)}). sd: standard deviation over the seeds."]
    return "\n".join(lines) + "\n"


def _row(values: Sequence[str]) -> str:
    return f"| {' | '.join(values)} |"


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def draw_points(rows: Sequence[tuple[str, Sequence[float]]], title: str) -> bytes:
    """Return a PNG plot with one line per (label, values) of ``rows``: a point per value, a bar at the mean."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 1.3 + 0.32 * len(rows)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for number, (_, values) in enumerate(rows):
        axes.scatter(values, [number] * len(values), s=22, alpha=0.7, linewidths=0, color="#4269d0")
        if values:
            axes.plot([statistics.fmean(values)] * 2, [number - 0.3, number + 0.3], color="#e8590c", linewidth=2)
    axes.set_yticks(range(len(rows)), [label for label, _ in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.grid(axis="x", color="#e9ecef")
    axes.set_title(f"{title} (points: seeds, bar: mean)", loc="left", fontsize=10)
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=110, metadata={"Software": None})
    return image.getvalue()
