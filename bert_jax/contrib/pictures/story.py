"""The story of a pretraining run: its guesses for a mask at several steps over the curve of its loss, as SVG."""

import html
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from bert_jax.config import PretrainConfig, load_config
from bert_jax.inference.loaded import load
from bert_jax.interop.model_bundle import ReadOptions
from bert_jax.io.files import write_whole
from bert_jax.training.checkpoint.folder import saved_steps
from bert_jax.training.logging.curves import series, smooth, thin
from bert_jax.training.logging.metrics_file import read_metrics
from bert_jax.training.logging.run_files import read_data
from bert_jax.training.workdir import read_record

# Characters that no XML file can hold, such as the control characters among the pieces of a byte-level BPE.
_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
# Shares of the steps, and guesses of each.
SHARES = (0.0, 0.01, 0.1, 1.0)
_GUESSES = 5
# Sizes in pixels: the picture, its margins, the rows of guesses, the top of the curve.
_WIDTH, _HEIGHT, _LEFT, _RIGHT = 880, 500, 52, 16
_ROW, _CURVE_TOP, _CURVE_BOTTOM = 24, 268, 448
_STYLE = """
.page { fill: #ffffff } .ink { fill: #1f2328 } .soft { fill: #59636e } .bar { fill: #b6d4fe }
.line { stroke: #d1d9e0 } .train { stroke: #0969da } .eval { fill: #d9480f } .stage, .unigram { stroke: #59636e }
@media (prefers-color-scheme: dark) {
.page { fill: #0d1117 } .ink { fill: #f0f6fc } .soft { fill: #9198a1 } .bar { fill: #1f4b85 }
.line { stroke: #3d444d } .train { stroke: #58a6ff } .eval { fill: #ff922b } .stage, .unigram { stroke: #9198a1 } }
text { font: 15px system-ui, -apple-system, "Segoe UI", "Noto Sans", "PingFang SC", "Microsoft YaHei",
"Noto Sans CJK SC", sans-serif }
.title { font-size: 18px; font-weight: 600 } .head { font-weight: 600 } .small { font-size: 13px }
"""


class Stage(NamedTuple):
    """The guesses of a run at a step, the best first, with their probabilities."""

    step: int
    guesses: list[tuple[str, float]]


def draw_story(workdir: Path, text: str, target: Path) -> list[Stage]:
    """Write the story of the pretraining run in ``workdir`` to the SVG file ``target`` and return its stages.

    The stages are step 0, if the run starts from random parameters, and the kept checkpoints nearest to 1, 10 and
    100% of the steps. Raises ``ValueError`` for a folder that is no pretraining run, a run without checkpoints, and
    a text that has not one mask.
    """
    path = workdir / "config.yaml"
    if not path.is_file() or "task:" in path.read_text(encoding="utf-8").splitlines():
        raise ValueError(f"{workdir}: not the workdir of a pretraining run; name one")
    config = load_config(PretrainConfig, ["--config", str(path)])
    steps = saved_steps(workdir)
    if not steps:
        raise ValueError(f"{workdir}: no checkpoint yet; continue the run")
    total = config.training.num_steps
    chosen = {min(steps, key=lambda step: abs(step - share * total)) for share in SHARES[1:]}
    if not config.training.first_step and read_record(workdir) is None:
        chosen.add(0)
    stages = [_stage(workdir, text, step) for step in sorted(chosen)]
    rows = read_metrics(workdir)
    curves = series(rows, "train", "loss"), series(rows, "eval", "loss")
    write_whole(target, story_svg(text, stages, total, curves, read_data(workdir).get("unigram_loss")))
    return stages


def _stage(workdir: Path, text: str, step: int) -> Stage:
    loaded = load(workdir, options=ReadOptions(step=step))
    tokenizer = loaded.need_tokenizer()
    found = loaded.fill_mask(text, top=_GUESSES)
    if len(found.masks) != 1:
        raise ValueError(f"{text!r}: {len(found.masks)} masks; write a text with one")
    words = ((tokenizer.decode([tokenizer.piece_id(piece)]).strip(), p) for piece, p in found.masks[0].predictions)
    return Stage(step, list(words))


Curve = tuple[np.ndarray, np.ndarray]


def story_svg(
    text: str, stages: Sequence[Stage], total: int, curves: tuple[Curve, Curve], unigram: float | None
) -> str:
    """Return the picture.

    Args:
        text: the text with the mask.
        stages: the guesses by ascending step.
        total: the number of steps of the run.
        curves: steps and losses of training and of the evaluations.
        unigram: loss of the unigram distribution, None if it is unknown.
    """
    title = text if len(text) <= 84 else f"{text[:84]} ..."
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">',
        f"<title>Guesses for the mask in: {_escaped(title)}</title><style>{_STYLE}</style>",
        f'<rect class="page" width="{_WIDTH}" height="{_HEIGHT}" rx="8"/>',
        _text(_LEFT - 32, 36, title, "ink title"),
    ]
    scale = _Scale.of(total, curves, unigram)
    parts += _axes(scale)
    if unigram is not None:
        y = scale.y(unigram)
        parts.append(
            f'<line class="unigram" stroke-dasharray="4 4" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y}" y2="{y}"/>'
        )
        label = f"word frequencies alone: {unigram:.2f}"
        parts.append(_text(_WIDTH - _RIGHT - 8, y - 6, label, "soft small", "end"))
    parts += _curves(scale, curves)
    width = (_WIDTH - 40) / len(stages)
    for number, stage in enumerate(stages):
        parts += _panel(stage, total, 20 + width * number, width - 20, scale)
    return "\n".join([*parts, "</svg>\n"])


class _Scale(NamedTuple):
    """The axes: the square root of the step, so that the first steps have room, and the loss."""

    total: int
    low: float
    high: float

    @classmethod
    def of(cls, total: int, curves: tuple[Curve, Curve], unigram: float | None) -> "_Scale":
        losses = np.concatenate([curves[0][1], curves[1][1], [] if unigram is None else [unigram]])
        low, high = (float(losses.min()), float(losses.max())) if len(losses) else (0.0, 1.0)
        return cls(max(total, 1), np.floor(low), np.ceil(high) if np.ceil(high) > np.floor(low) else low + 1)

    def x(self, step: float) -> float:
        return round(_LEFT + (_WIDTH - _LEFT - _RIGHT) * min(1.0, step / self.total) ** 0.5, 1)

    def y(self, loss: float) -> float:
        share = (loss - self.low) / (self.high - self.low)
        return round(_CURVE_BOTTOM - (_CURVE_BOTTOM - _CURVE_TOP) * share, 1)


def _text(x: float, y: float, value: str, kind: str, anchor: str = "start") -> str:
    where = "" if anchor == "start" else f' text-anchor="{anchor}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}"{where}>{_escaped(value)}</text>'


def _escaped(value: str) -> str:
    return html.escape(_NOT_XML.sub("\ufffd", value))


def _axes(scale: _Scale) -> Iterator[str]:
    for loss in np.unique(np.linspace(scale.low, scale.high, 4).round()):
        y = scale.y(loss)
        yield f'<line class="line" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y}" y2="{y}"/>'
        yield _text(_LEFT - 8, y + 5, f"{loss:.0f}", "soft small", "end")
    for share in (0.0, 0.01, 0.1, 0.25, 0.5, 1.0):
        step = round(scale.total * share)
        anchor = "end" if share == 1 else "middle"
        yield _text(scale.x(step), _CURVE_BOTTOM + 20, f"{step:,}", "soft small", anchor)
    yield _text(_LEFT, _HEIGHT - 12, "loss in nats over steps (square-root axis)", "soft small")
    x = _WIDTH - _RIGHT
    yield _text(x, _HEIGHT - 12, "line: training; dots: held-out text", "soft small", "end")


def _curves(scale: _Scale, curves: tuple[Curve, Curve]) -> Iterator[str]:
    steps, losses = thin(*curves[0], 200)
    points = " ".join(f"{scale.x(s)},{scale.y(v)}" for s, v in zip(steps, smooth(losses), strict=True))
    yield f'<polyline class="train" fill="none" stroke-width="2.5" points="{points}"/>'
    for step, loss in zip(*curves[1], strict=True):
        yield f'<circle class="eval" r="5" cx="{scale.x(step)}" cy="{scale.y(loss)}"/>'


def _panel(stage: Stage, total: int, x: float, width: float, scale: _Scale) -> Iterator[str]:
    share = 100 * stage.step / max(total, 1)
    yield _text(x, 72, f"step {stage.step:,}", "ink head")
    yield _text(x + width, 72, f"{share:.3g}%", "soft", "end")
    for row, (word, p) in enumerate(stage.guesses):
        y = 84 + _ROW * row
        size = f'width="{max(2.0, width * p):.1f}" height="{_ROW - 4}"'
        yield f'<rect class="bar" x="{x:.1f}" y="{y}" {size} rx="3"/>'
        yield _text(x + 6, y + 15, word if len(word) <= 16 else f"{word[:15]}…", "ink")
        yield _text(x + width - 4, y + 15, f"{100 * p:.1f}%" if p < 0.0995 else f"{p:.0%}", "soft small", "end")
    foot, at = 84 + _ROW * _GUESSES + 4, scale.x(stage.step)
    middle = x + width / 2
    points = f"{middle:.1f},{foot} {middle:.1f},{foot + 8} {at},{_CURVE_TOP - 22} {at},{_CURVE_BOTTOM}"
    yield f'<polyline class="stage" fill="none" stroke-width="1.2" stroke-dasharray="2 3" points="{points}"/>'
