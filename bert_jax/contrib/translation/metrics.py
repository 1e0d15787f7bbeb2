"""BLEU (Papineni et al. 2002) and chrF (Popović 2015), computed by sacrebleu on whole texts (Post 2018)."""

import importlib.util
import re
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from bert_jax.metrics import Score

# Chinese characters, and the kana of Japanese.
_HAN, _KANA = re.compile("[\u4e00-\u9fff]"), re.compile("[\u3040-\u30ff]")
# A text is Chinese if it has so many Chinese characters for each other word.
_SHARE = 1.0


def require_sacrebleu() -> None:
    """Raise ``ValueError`` if sacrebleu is not installed."""
    if importlib.util.find_spec("sacrebleu") is None:
        raise ValueError(
            "BLEU and chrF: sacrebleu is not installed; run pip install 'bert_jax[translation]', or omit data.dev "
            "and labels of data.test"
        )


def tokenization(references: Iterable[str]) -> str:
    """Return the tokenizer of BLEU for the language of ``references``: zh (characters) for Chinese, otherwise 13a,
    the one of WMT."""
    text = " ".join(references)
    han = len(_HAN.findall(text))
    return "zh" if han > _SHARE * len(_HAN.sub("", text).split()) and not _KANA.search(text) else "13a"


def _metric(name: str, references: Iterable[str]) -> Any:
    from sacrebleu.metrics import BLEU, CHRF

    # Hypotheses of a poor model may end in a detached period, of which sacrebleu warns.
    return BLEU(tokenize=tokenization(references), force=True) if name == "bleu" else CHRF()


def corpus_score(name: str, translations: Sequence[str], references: Sequence[str]) -> Score:
    """Return the score ``name``, bleu or chrf, from 0 to 100, of ``translations`` with one reference each. On any
    resample of the texts, it equals that of ``sacrebleu``."""
    metric = _metric(name, references)
    # The statistics from which sacrebleu computes its own resamples.
    statistics = np.array(metric._extract_corpus_statistics(translations, [references]))

    def of(indices: np.ndarray) -> float:
        return float(metric._compute_score_from_stats(statistics[indices].sum(axis=0).tolist()).score)

    return Score(name, of)


def signatures(references: Sequence[str]) -> list[str]:
    """Return a line for each metric with its signature, which states how it was computed."""
    lines = []
    for name in ("bleu", "chrf"):
        metric = _metric(name, references)
        metric.corpus_score(references[:1], [references[:1]])
        lines.append(f"{name}: sacrebleu {metric.get_signature()}")
    return lines
