"""``bert-jax report`` and ``bert_jax.report``: the report of a run at any time, and several runs side by side."""

import argparse
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bert_jax import registry
from bert_jax.commands.options import Command, option
from bert_jax.io.files import require_folder, whole_file, write_whole
from bert_jax.io.storage import Location, ObjectPath, location
from bert_jax.objectives.display import Display, Panel
from bert_jax.training.logging.run_files import CONFIG_FILE, HTML_FILE, RunFiles, read_run

if TYPE_CHECKING:
    from bert_jax.commands.trained import TrainedRun

# The file with several runs.
COMPARISON = "comparison.html"


def report(
    *workdirs: "str | os.PathLike[str] | TrainedRun", output: "str | os.PathLike[str] | None" = None
) -> Location:
    """Write the report of a run, or one page with several runs side by side; return its path.

    ``workdirs``: folders (or URLs) of runs, or runs; they may be in progress. ``output``: the file (default:
    report.html in the workdir, for several runs comparison.html in the current folder). Raises ``ValueError``
    without a workdir, and if a folder contains no run.
    """
    from bert_jax.training.logging.comparison import comparison_page
    from bert_jax.training.logging.report import run_page

    if not workdirs:
        raise ValueError("no workdir; give the folder of one or more runs")
    if any(isinstance(one, list | tuple) for one in workdirs):
        raise ValueError("workdirs: a list is not allowed; write report(*workdirs)")
    names = (one if isinstance(one, str | os.PathLike) else one.workdir for one in workdirs)
    places = [location(os.fspath(name)) for name in names]
    for place in places:
        if not (place / CONFIG_FILE).is_file():
            raise ValueError(f"{place}: no {CONFIG_FILE} in this folder; give the workdir of a run")
    runs = [(run, _display(run)) for run in map(read_run, places)]
    own = places[0] / HTML_FILE if len(runs) == 1 else Path(COMPARISON)
    target = own if output is None else location(os.fspath(output))
    _write(target, run_page(*runs[0]) if len(runs) == 1 else comparison_page(runs))
    return target


def _write(target: Location, page: str) -> None:
    """Write the file by a temporary file of this call alone, because a run in progress writes its page too."""
    if isinstance(target, ObjectPath):
        write_whole(target, page)
        return
    folder = target.resolve().parent
    require_folder(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(prefix=".bert_jax-", dir=folder) as scratch,
        whole_file(target, Path(scratch)) as part,
    ):
        part.write_text(page, encoding="utf-8")


def _display(run: RunFiles) -> Display:
    """Return the display of the objective of ``run``. The file of an objective of the user is not run; its values
    get plain panels."""
    if run.is_finetuning:
        from bert_jax.finetuning.supervision import LABELS_ONLY
        from bert_jax.finetuning.task_objective import task_display

        return task_display(LABELS_ONLY)
    name = run.option("objective.name") or "masked_lm"
    if not run.option("objective.module") and (
        registry.is_of_trunk("objectives", name) or name in registry.names("objectives")
    ):
        display: Display = registry.load("objectives", name).display
        return display
    keys = [key for key in run.last("eval") if key not in ("step", "split", "loss", "targets", "padding_fraction")]
    return Display(panels=tuple(Panel(key.replace("_", " "), key) for key in keys))


def report_command(arguments: argparse.Namespace) -> None:
    """Write a page about a run: its scores, curves, samples and options. It also works while the run is in progress
    and after it was stopped. Several runs are compared on one page, with their curves over each other."""
    names: Sequence[str] = arguments.workdirs
    print(report(*names, output=arguments.output))


COMMANDS = (
    Command("report", "a page about a run, or several runs side by side", report_command, (
        option("workdirs", nargs="+", metavar="WORKDIR", help="folder or URL of a run"),
        option(
            "--output", metavar="FILE",
            help=f"the page (default: {HTML_FILE} in the workdir; of several runs, {COMPARISON} here)",
        ),
    ), group="export and inspect", example="runs/quickstart"),
)  # fmt: skip
