"""The end of a pretraining run: filled masks of held-out sentences, the report, the result in words."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bert_jax.objectives.filled_masks import FilledText
from bert_jax.training.logging.metrics_file import read_metrics
from bert_jax.training.logging.report import write_report


def finish(workdir: Path, filled: Sequence[FilledText], name: object = None) -> list[str]:
    """Write ``report_data.json``, ``report.html`` and ``report.png``; returns the result in words, which call the
    folder ``name`` (default: by its path)."""
    final = next((line for line in reversed(read_metrics(workdir)) if line.get("split") == "eval"), None)
    lines = result_lines(final, filled)
    final = final or {}
    data = {
        "summary": result_lines(final, ()),  # the filled masks have their own place in the page
        "evaluation": {k: v for k, v in final.items() if k not in ("step", "split", "unigram_cross_entropy")},
        "unigram_loss": final.get("unigram_cross_entropy"),
        "filled_masks": [dataclasses.asdict(text) for text in filled],
    }
    write_report(workdir, data)
    return [*lines, f"report: {name or workdir}/report.html"]


def result_lines(final: Mapping[str, Any] | None, filled: Sequence[FilledText]) -> list[str]:
    """Final evaluation against the unigram baseline, and a few filled masks."""
    lines = []
    if final is not None:
        lines.append(
            f"held-out: MLM loss {final['mlm_loss']:.4f} nats on {final['targets']:,} targets, "
            f"accuracy {final['mlm_accuracy']:.4f}"
        )
        unigram = final.get("unigram_cross_entropy")
        if unigram is not None:
            lines.append(
                f"unigram distribution of the training targets: {unigram:.4f} nats on the same targets; "
                f"the model is {unigram - final['mlm_loss']:.4f} nats better"
            )
        if "nsp_accuracy" in final:
            lines.append(f"sentence pairs: accuracy {final['nsp_accuracy']:.4f}, loss {final['nsp_loss']:.4f}")
    for text in filled[:5]:
        lines.append(text.text)
        for mask in text.masks[:3]:
            best = ", ".join(f"{piece} {probability:.2f}" for piece, probability in mask.predictions[:3])
            lines.append(f"    [MASK] was {mask.answer}: {best}")
    return lines
