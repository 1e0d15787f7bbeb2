"""The result of a run in a few sentences, the first part of its report."""

import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from bert_jax.objectives.display import LOGGED_LEVELS, Display, Findings
from bert_jax.training.logging.curves import baselines, different_scores, series
from bert_jax.training.logging.page import card, command, escape, format_value, words_of
from bert_jax.training.logging.progress import format_duration
from bert_jax.training.logging.run_files import RunFiles

# The beginning of the warning about a run that is not better than its baseline, and what to do.
WEAK = "WARNING: not better than an answer that needs no training: "
REMEDY = "try another optimizer.learning_rate, longer training, more records or another model"
# The baseline of a question answering task.
NEAREST_SENTENCE = "the sentence most like the question"
# True: good, False: doubtful, None: neither; and a sentence.
Finding = tuple[bool | None, str]
# Names of scores that are better if they are lower end with one of these.
_LOWER_IS_BETTER = ("loss", "mse", "mae", "perplexity")
# Relative change from which on a held-out score counts as changed.
_CHANGE = 0.005
# Relative rise of a loss above its lowest value from which on the model overfits.
_RISE = 0.05
# Share of the standard deviation of the labels below which predictions count as nearly constant.
_CONSTANT = 0.25
# Share of the range of the labels below which the range of the predictions is named.
_NARROW = 0.8
# Difference between the mean probability and the accuracy from which on the probabilities are too high or too low.
_GAP = 0.05
# Factor above the median from which on the last steps of a stopped run count as slow.
_SLOW = 1.5
# The workdir in the command of a run.
_WORKDIR = re.compile(r"(--workdir[ =])('[^']*'|\S+)")


def verdict(run: RunFiles, display: Display) -> str:
    """Return the box with the result of a run: for a stopped run also the cause and how to continue it."""
    stopped = _stopped(run) if run.state == "stopped" else []
    later = [*_warnings(run), *(_progress(run) if run.state == "running" else ())]
    later += [_added(run)] if run.state != "complete" else []
    found = _task_result(run) if run.is_finetuning else _loss_result(run, display)
    if run.state == "complete" and found and not any("more steps" in line for _, line in found):
        later += _advice(run, display)
    is_good = bool(found) and run.state == "complete" and all(good is not False for good, _ in found)
    is_good &= any(good for good, _ in found)
    doubtful = any(good is False for good, _ in found)
    css = "stopped" if stopped else "doubtful" if doubtful else "good" if is_good else ""
    parts = [
        f"<p>{' '.join(map(escape, part))}</p>" for part in (stopped, [line for _, line in found], later) if part
    ]
    if stopped and (line := command_of(run) or _from_config(run)):
        parts.insert(1, command(line))
    return card("".join(parts), css=f"verdict {css}".strip())


def lower_is_better(name: str) -> bool:
    """Return True if lower values of the score are better."""
    return name.endswith(_LOWER_IS_BETTER)


def _stopped(run: RunFiles) -> list[str]:
    """Return the time and the cause of the end, the newest checkpoint, and what the report lacks."""
    where = f"step {run.step:,} of {run.num_steps:,}" if run.num_steps else f"step {run.step:,}"
    when = (
        f"The last line of train.log is from {run.log.last_time} (local time)"
        if run.log.last_time
        else "train.log is empty"
    )
    lines = [f"The run is not complete ({where}). {when}."]
    if run.log.ending:
        lines.append(f"It ended early: {run.log.ending.removesuffix('.')}.")
    else:
        lines.append(
            "No end was recorded: the process was killed, or the machine went down. Memory use is not recorded, "
            "so it is unknown whether memory ran out; on Linux, the command dmesg lists the processes that were "
            "killed for this reason."
        )
    lines += _last_speed(run)
    if run.saved_steps:
        lost = run.step - run.saved_steps[-1]
        which = (
            f"the {lost:,} steps after it that the log shows are" if lost > 0 else "no step that the log shows is"
        )
        lines.append(f"The newest checkpoint is of step {run.saved_steps[-1]:,}; {which} lost.")
        lines.append("This command continues the run:")
    else:
        lines.append("No checkpoint is saved; the same command begins at the first step again.")
    return lines


def _last_speed(run: RunFiles) -> list[str]:
    """Return whether the last steps of a stopped run were slow, and how much is left."""
    values, lines = series(run.rows, "train", "seconds_per_step")[1], list[str]()
    if len(values) > 2:
        usual, last, least = (
            format_value("seconds", float(one)) for one in (np.median(values), values[-1], values.min())
        )
        how = "slow" if values[-1] > _SLOW * np.median(values) else "not slow"
        lines.append(
            f"The last steps are {how}, compared with the median of all lines of the log: {last} s per step, "
            f"median {usual} s, fastest line {least} s."
        )
    # A continued run begins at its newest checkpoint.
    left = run.num_steps - (run.saved_steps[-1] if run.saved_steps else 0)
    if run.num_steps and left > 0:
        time = f", about {format_duration(left * float(np.median(values)))} of training" if len(values) else ""
        lines.append(f"A continued run has {left:,} steps left{time}.")
    return lines


def _warnings(run: RunFiles) -> list[str]:
    """Return how many warnings the log has, if there is a log. That about the only baseline is in the result."""
    lines = dict.fromkeys([*(run.data.get("summary") or ()), *run.log.lines])
    warnings = [line for line in lines if line.startswith("WARNING")]
    shown = [line for line in warnings if WEAK not in line or len(run.scores()) > 1]
    other, so_far = " other" * (len(shown) < len(warnings)), " so far" * (run.state == "running")
    if shown:
        return [f"The log has {len(shown):,}{other} warning{'s' if len(shown) > 1 else ''}{so_far}, shown below."]
    return [f"The log has no{other} warning{so_far}."] if run.log.last_time else []


def _progress(run: RunFiles) -> list[str]:
    """Return what a run in progress has found so far, and how to stop and continue it."""
    lines = list[str]()
    if run.saved_steps:
        steps = run.step - run.saved_steps[-1]
        lost = f"the {steps:,} steps from there to the last line and those" if steps > 0 else "only the steps"
        lines.append(
            f"The newest checkpoint is of step {run.saved_steps[-1]:,}. If the process were killed now, {lost} "
            "since then would be lost."
        )
    elif run.step:
        lines.append("No checkpoint is saved yet: if the process were killed now, all steps would be lost.")
    lines.append("You can stop the run (Ctrl-C saves a checkpoint) and continue it later with the same command.")
    return lines


def _added(run: RunFiles) -> str:
    """Return what the report lacks before the run is complete."""
    what = "final scores of the best parameters" if run.is_finetuning else "final evaluation and its examples"
    return f"The {what} are added when the run is complete."


def command_of(run: RunFiles) -> str:
    """Return the command of the run with its folder, which may have been moved or renamed; empty if it is
    unknown."""
    folder = shlex.quote(run.workdir.rstrip("/"))
    return _WORKDIR.sub(lambda found: f"{found[1]}{folder}", run.log.command)


def _from_config(run: RunFiles) -> str:
    """Return a command that continues the run in its folder with the options in its files; empty if these are not
    all options."""
    folder = run.workdir.rstrip("/")
    if not run.from_random or not run.config:
        return ""
    return shlex.join(["bert-jax", "pretrain", "--config", f"{folder}/config.yaml", "--workdir", folder])


def _loss_result(run: RunFiles, display: Display) -> list[Finding]:
    """Return the held-out value of the first tile of a pretraining run, its baseline, and its direction."""
    values = run.data.get("evaluation") or run.last("eval")
    tile = next((one for one in display.tiles if isinstance(values.get(one.key), int | float)), None)
    if tile is None:
        return []
    value, known = float(values[tile.key] or 0.0), known_levels(run, display).get(tile.beside[0])
    text = f"{tile.label[:1].upper()}{tile.label[1:]}: {format_value(tile.key, value)}"
    line: Finding = (None, f"{text}.")
    if known is not None:
        ahead = (known - value) if lower_is_better(tile.key) else (value - known)
        than = f"than {format_value(tile.key, known)} {tile.beside[1]}"
        how = f"{format_value(tile.key, ahead)} better" if ahead > 0 else "not better"
        line = (ahead > 0, f"{text}, {how} {than}.")
    label = tile.label.removeprefix("held-out ")
    return [line, *(_direction(run, "eval", tile.key) or _training_direction(run, tile.key, label))]


def known_levels(run: RunFiles, display: Display) -> dict[str, float]:
    """Return the baselines of the panels by key; before the end of a run, those that its evaluations contain."""
    found, logged = baselines(run.data, display.panels), run.last("eval")
    for key, name in LOGGED_LEVELS.items():
        if isinstance(value := logged.get(name), int | float):
            found.setdefault(key, value)
    return found


def _direction(run: RunFiles, split: str, name: str) -> list[Finding]:
    """Return a sentence if the held-out values still improve at the end, or were clearly better before."""
    steps, values = series(run.rows, split, name)
    if len(values) < 2 or not np.isfinite(values).all():
        return []
    better = -values if lower_is_better(name) else values
    margin, best = _CHANGE * (abs(values[-1]) or 1.0), int(better.argmax())
    if better[-1] > better[:-1].max() + margin:
        before = f"{format_value(name, float(values[-2]))} at step {steps[-2]:,.0f}"
        if rises := _overfits(run, split, name):
            return [(None, f"It still improved at the last evaluation ({before}), but {rises}.")]
        more = ", so more steps may help" if run.state == "complete" else ""
        return [(None, f"It still improved at the last evaluation ({before}){more}.")]
    if better[-1] < better[best] - margin:
        return [(None, f"It was better at step {steps[best]:,.0f}: {format_value(name, float(values[best]))}.")]
    return []


def _training_direction(run: RunFiles, name: str, label: str) -> list[Finding]:
    """Return a sentence about the end of the training curve of the loss ``name`` of a run with one evaluation."""
    steps, values = series(run.rows, "train", name)
    if len(values) < 2 or len(series(run.rows, "eval", name)[0]) != 1 or not lower_is_better(name):
        return []
    before, last = (format_value(name, float(values[place])) for place in (-2, -1))
    falls = values[-1] < values[-2] * (1 - _CHANGE)
    how = f"still fell at the end ({before} at step {steps[-2]:,.0f}, {last} at step {steps[-1]:,.0f})"
    if not falls:
        how = f"no longer fell at the end ({before}, then {last})"
    more = ", so more steps may help" if falls and run.state == "complete" else ""
    return [(None, f"The {label} in training {how}{more}.")]


def _advice(run: RunFiles, display: Display) -> list[str]:
    """Return a sentence about the number of steps if the held-out loss still falls at the end, or if it rises while
    the training loss falls."""
    split = next(iter(run.scores()), "") if run.is_finetuning else "eval"
    names = ("log_loss", "loss") if run.is_finetuning else [tile.key for tile in display.tiles[:1]]
    trained = series(run.rows, "train", "loss" if run.is_finetuning else names[0])
    for name in names:
        steps, values = series(run.rows, split, name)
        if len(values) < 2 or not np.isfinite(values).all() or not lower_is_better(name):
            continue
        label, lowest = words_of(name), int(values.argmin())
        ends = f"{format_value(name, float(values[lowest]))} at step {steps[lowest]:,.0f}"
        last = format_value(name, float(values[-1]))
        if values[-1] < values[-2] * (1 - _CHANGE) and lowest == len(values) - 1:
            return [f"The {split} {label} still falls at the end ({last}): more steps may help."]
        before = trained[1][trained[0] <= steps[lowest]]
        falls = len(before) > 0 and trained[1][-1] < before[-1] * (1 - _RISE)
        if values[-1] > values[lowest] * (1 + _CHANGE) and falls:
            return [
                f"The {split} {label} rises ({ends}, {last} at the end) while the training loss falls: the run "
                f"overfits since step {steps[lowest]:,.0f}; fewer steps or more records may help."
            ]
    return []


def _overfits(run: RunFiles, split: str, name: str) -> str:
    """Return a clause if the loss of the same predictions rises while the score ``name`` improves."""
    for loss in ("log_loss", "loss"):
        steps, values = series(run.rows, split, loss)
        if loss == name or len(values) < 2 or not np.isfinite(values).all():
            continue
        lowest = int(values.argmin())
        if values[-1] > values[lowest] * (1 + _RISE):
            ends = [format_value(loss, float(values[place])) for place in (lowest, -1)]
            return (
                f"the {split} {words_of(loss)} has risen from {ends[0]} at step {steps[lowest]:,.0f} to {ends[1]}: "
                "wrong answers become surer (overfitting), so more steps help the score little"
            )
    return ""


# Fine-tuning ------------------------------------------------------------------------------------------------------


def _task_result(run: RunFiles) -> list[Finding]:
    """Return the main score of the first split with its interval and baseline, and the step of the parameters."""
    if not (scores := run.scores()):
        return []
    split, values = next(iter(scores.items()))
    entry = next((one for one in run.results if one["split"] == split), {})
    chosen = entry.get("chosen_by", {}).get("metric") or run.option("task.metric")
    names = different_scores(values)
    name = chosen if chosen in names else next(iter(names), "")
    if not name:
        return []
    lines = [_against(run, split, name, values, entry)]
    found: Findings = (run.data.get("findings") or {}).get(split) or {}
    if found.get("wrong") and found.get("scored"):
        lines.append((None, f"{count_of_wrong(found['wrong'], found['scored'])}."))
    lines += [*_spread(found), *_nothing(found), *_never_found(values, found), *_confidence(found)]
    if "chosen_by" in entry and len(scores) == 1:
        text = f"No other split was scored: the {split} records also selected the step of the parameters"
        lines.append((None, f"{text}, so the score on other texts can be lower."))
    steps, curve = series(run.rows, split, name)
    if "chosen_by" in entry and len(curve) and entry.get("step", steps[-1]) != steps[-1]:
        last, end = float(curve[-1]), f"at the last step, {steps[-1]:,.0f}"
        which = f"which has the best {words_of(name)} ({format_value(name, last)} {end})"
        if last == values[name]:
            which = f"the first one with the best {words_of(name)} (equal {end})"
        text = f"The parameters are those of step {entry['step']:,}, {which}.{_lower_loss(run, split, name, entry)}"
        return [*lines, (None, text)]
    return [*lines, *_direction(run, split, name)]


def _lower_loss(run: RunFiles, split: str, name: str, entry: Mapping[str, Any]) -> str:
    """Return a sentence about the loss at the steps whose score equals the best one; empty if it is unknown."""
    steps, scores = series(run.rows, split, name)
    for loss in ("log_loss", "loss"):
        known = dict(zip(*(one.tolist() for one in series(run.rows, split, loss)), strict=True))
        losses = {
            step: known[step]
            for step, score in zip(steps.tolist(), scores.tolist(), strict=True)
            if score == entry["metrics"][name]["value"] and step in known
        }
        if loss == name or len(losses) < 2 or entry["step"] not in losses:
            continue
        best = min(losses, key=lambda step: losses[step])
        if best == entry["step"]:
            return f" Of these steps, it also has the lowest {words_of(loss)}."
        values = f"{format_value(loss, losses[best])}; {format_value(loss, losses[entry['step']])} at the kept step"
        kept = f"; its parameters are in checkpoints/{best:.0f}" if best in run.saved_steps else ""
        return f" Of the steps with this score, step {best:,.0f} has the lowest {words_of(loss)} ({values}){kept}."
    return ""


def _against(
    run: RunFiles, split: str, name: str, values: Mapping[str, float | None], entry: Mapping[str, Any]
) -> Finding:
    """Return the score and its comparison with an answer that needs no training."""
    metrics: Mapping[str, Any] = entry.get("metrics") or {}
    text = f"{split}: {words_of(name)} {_with_interval(name, values[name], metrics)}"
    answer = run.plain_answers().get(split)
    if not answer or answer["value"] is None or values.get(answer["metric"]) is None:
        why = ": no single answer fits all questions" if run.option("task.kind") == "qa" else ""
        return None, f"{text}. There is no baseline to compare it with{why}."
    metric, known, own = answer["metric"], answer["value"], values[answer["metric"]] or 0.0
    than = f"{answer['answer']} ({words_of(metric)} {format_value(metric, known)})"
    sign = -1 if lower_is_better(metric) else 1
    interval: Sequence[float] | None = metrics.get(metric, {}).get("ci95")
    if metric != name:
        text += f"; {words_of(metric)} {_with_interval(metric, own, metrics)}"
    if sign * (own - known) <= 0:
        return False, f"{text}, not better than {than}; {REMEDY}."
    if interval and sign * (interval[0 if sign > 0 else 1] - known) <= 0:
        return False, f"{text}, not clearly better than {than}, which is inside the interval."
    return True, f"{text}, better than {than}."


def count_of_wrong(wrong: int, scored: int) -> str:
    """Return the number of wrong records in words."""
    return f"{wrong:,} of {scored:,} records {'is' if wrong == 1 else 'are'} wrong"


def _with_interval(name: str, value: float | None, metrics: Mapping[str, Any]) -> str:
    interval = metrics.get(name, {}).get("ci95")
    ends = f" (95% interval {' to '.join(format_value(name, x) for x in interval)})" if interval else ""
    return format_value(name, value) + ends


def _nothing(found: Findings) -> list[Finding]:
    """Return a sentence if a tagger predicts no entity at all."""
    kinds = found.get("kinds")
    if (
        kinds is None
        or "missed" not in kinds["counts"]
        or sum(kinds["counts"].values()) > kinds["counts"]["missed"]
    ):
        return []
    return [(False, "The model predicts no entity at all.")]


def _never_found(values: Mapping[str, float | None], found: Findings) -> list[Finding]:
    """Return a sentence about the types of entities in the records whose F1 is 0. It is doubtful if these are more
    than half of the types, whatever their numbers of entities."""
    support = found.get("support")
    if support is None or support["unit"] != "entities":
        return []
    types = [one for one, count in support["counts"].items() if count and values.get(f"f1/{one}") is not None]
    never = sorted(one for one in types if not values[f"f1/{one}"])
    if not never:
        return []
    text = f"No entity of {len(never)} of the {len(types)} types is found correctly (f1 0; each type counts once)"
    text += f": {', '.join(never)}."
    return [(False if 2 * len(never) > len(types) else None, text)]


def _confidence(found: Findings) -> list[Finding]:
    """Return a sentence that compares the probabilities of a classifier with its accuracy."""
    if (known := found.get("confidence")) is None:
        return []
    gap, numbers = known["mean"] - known["accuracy"], (known["mean"], known["error"])
    mean, error = (f"{number:.1%}" for number in numbers)
    how = "about as high as the accuracy" if abs(gap) < _GAP else f"too {'high' if gap > 0 else 'low'}"
    return [(None, f"The mean probability of the predicted classes is {mean}, {how} (calibration error {error}).")]


def _spread(found: Findings) -> list[Finding]:
    """Return a sentence if predicted values hardly vary."""
    points = found.get("points")
    if not points or points["y"] != "predicted" or len(points["values"]) < 10:
        return []
    values = np.array(points["values"], float)
    gold, predicted = np.nanstd(values, axis=0)
    if predicted < _CONSTANT * gold:
        text = f"standard deviation {predicted:.2g}, that of the labels {gold:.2g}"
        return [(False, f"The predictions are nearly constant ({text}).")]
    low, high = np.nanmin(values, axis=0), np.nanmax(values, axis=0)
    if high[1] - low[1] < _NARROW * (high[0] - low[0]):
        text = f"The labels reach from {low[0]:.3g} to {high[0]:.3g}, the predictions only from {low[1]:.3g} to"
        return [(None, f"{text} {high[1]:.3g}.")]
    return []
