"""The result of a check, and the order, text, JSON and HTML of several results. This module does not import jax."""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

from bert_jax.io.files import write_whole
from bert_jax.json_values import Json
from bert_jax.training.logging.page import card, escape, table
from bert_jax.training.logging.run_files import DOCTOR_FILE

# OK: in the range. LOOK: unusual, or the cause of a weak model. FAIL: an error of data, options or code.
Status = Literal["OK", "LOOK", "FAIL"]
STATUSES: tuple[Status, ...] = ("FAIL", "LOOK", "OK")
# All checks, the most specific cause first: a wrong vocabulary raises the loss, but a high loss has many causes.
CHECKS = (
    "labels", "vocabulary", "text encoding", "text format", "tokenized text", "punctuation", "wrapped lines",
    "unknown tokens", "masks", "copied rows", "documents", "schedule", "learning rate", "dropout rates",
    "weight decay", "moving average", "passes", "updates", "data position", "optimizer state", "rounded weights",
    "position ids", "token types", "attention sums", "loss weights", "other labels", "other rows", "padding",
    "neighbors", "place in the row", "later tokens", "context", "word order", "tied table", "gradients",
    "accumulation", "dropout", "repeated line", "passages", "copied lines", "repeated text", "held-out text",
    "sentence order", "markup", "sentence pairs", "first loss", "skipped steps", "loss", "loss spikes",
    "token states", "attention heads", "held-out gap", "padding share", "speed",
)  # fmt: skip
# Checks that are omitted if another one is FAIL, because its error also changes what they measure.
CONSEQUENCES = {
    "labels": ("vocabulary", "first loss"),
    "loss weights": ("other labels", "other rows", "padding", "neighbors", "place in the row"),
}
# Checks whose advice is the learning rate. If the rate itself has a remark, it decides the direction.
OF_RATE = ("skipped steps", "loss", "loss spikes", "token states", "attention heads")


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
        check: name, one of ``CHECKS``.
        status: OK, LOOK or FAIL.
        value: what was found, in words.
        allowed: the range without a remark, in words.
        advice: what to try first; empty if the status is OK.
        number: the measured number; None if there is none.
    """

    check: str
    status: Status
    value: str
    allowed: str
    advice: str = ""
    number: float | None = None

    def __str__(self) -> str:
        """Return the line of the check."""
        line = f"{self.status:4s}  {self.check:16s}  {self.value} (expected: {self.allowed})"
        return f"{line}; {self.advice}" if self.advice and self.status != "OK" else line


def finding(
    check: str, value: str, allowed: str, advice: str, *, fail: bool = False, look: bool = False,
    number: float | None = None,
) -> Finding:  # fmt: skip
    """Return the result with the status FAIL if ``fail`` is True, else LOOK if ``look`` is True, else OK."""
    assert check in CHECKS, check
    status: Status = "FAIL" if fail else "LOOK" if look else "OK"
    number = number if number is not None and math.isfinite(number) else None
    return Finding(check, status, value, allowed, "" if status == "OK" else advice, number)


def diagnosis(findings: Iterable[Finding]) -> list[Finding]:
    """Return the results in the order of :func:`ordered`, without those that are consequences of another one.

    If the learning rate is outside its range (``updates``), the checks ``OF_RATE`` advise to correct it first, and
    ``updates`` is FAIL if the loss is.
    """
    found = {one.check: one for one in findings}
    failed = {name for name, one in found.items() if one.status == "FAIL"}
    for cause in failed & CONSEQUENCES.keys():
        found = {name: one for name, one in found.items() if name not in CONSEQUENCES[cause]}
    rate = found.get("updates")
    if rate is not None and rate.status != "OK":
        for name in found.keys() & set(OF_RATE):
            if found[name].status != "OK":
                found[name] = replace(found[name], advice="first correct the learning rate, as updates advises")
        if "loss" in failed:
            found["updates"] = replace(rate, status="FAIL")
    return ordered(found.values())


def ordered(findings: Iterable[Finding]) -> list[Finding]:
    """Return the results, FAIL before LOOK before OK, each from the most specific cause to the least."""
    return sorted(findings, key=lambda one: (STATUSES.index(one.status), CHECKS.index(one.check)))


def summary(findings: Sequence[Finding]) -> str:
    """Return the numbers of results by status, such as "1 FAIL, 0 LOOK, 14 OK"."""
    return ", ".join(f"{sum(one.status == status for one in findings)} {status}" for status in STATUSES)


# ------------------------------------------------------------------ files


def to_json(step: int, findings: Sequence[Finding]) -> dict[str, Json]:
    """Return the results at ``step`` as a JSON value, the content of doctor.json."""
    return {"step": step, "summary": summary(findings), "findings": [asdict(one) for one in findings]}


def write(folder: Path, step: int, findings: Sequence[Finding]) -> None:
    """Write the results to doctor.json in ``folder``, from which the report of the run shows them."""
    write_whole(folder / DOCTOR_FILE, json.dumps(to_json(step, findings), indent=1, ensure_ascii=False) + "\n")


def section(content: dict[str, Json]) -> tuple[str, str]:
    """Return the heading and the HTML of a section of the report about ``content``, that of doctor.json."""
    found = content.get("findings")
    rows = [
        [escape(one.get(name) or "") for name in ("check", "status", "value", "allowed", "advice")]
        for one in (found if isinstance(found, list) else [])
        if isinstance(one, dict)
    ]
    heading = f"Doctor at step {content.get('step')}: {content.get('summary')}"
    header = ("check", "result", "found", "expected", "first thing to try")
    return heading, card(table(header, rows)) if rows else ""
