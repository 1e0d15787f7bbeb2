"""Chinese models of families other than BERT (docs/zh/models.md): a ``vocab.txt`` in place of the family's own
tokenizer file, with the characters of a text as tokens."""

import json

import pytest
from family_folders import make_folder, read

from bert_jax.tokenization import build_tokenizer


@pytest.mark.parametrize("settings", [{"tokenizer_class": "BertTokenizer"}, None], ids=["named", "unnamed"])
@pytest.mark.parametrize(
    ("case", "name"),
    [
        ("albert", "AlbertForMaskedLM"),
        ("electra", "ElectraForMaskedLM"),
        ("deberta-v2", "DebertaV2ForMaskedLM"),
        ("gpt2", "GPT2LMHeadModel"),
    ],
)
def test_a_vocabulary_of_characters(case, name, settings, tmp_path):
    folder = make_folder(tmp_path / case, case, name)
    size = json.loads((folder / "config.json").read_text())["vocab_size"]
    pieces = [*["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"], *"北京很大"]
    pieces += [f"[unused{i}]" for i in range(size - len(pieces))]
    (folder / "vocab.txt").write_text("\n".join(pieces) + "\n", encoding="utf-8")
    if settings is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    bundle = read(folder)
    tokenizer = build_tokenizer(bundle.spec.tokenizer, bundle.tokenizer_content, case)
    assert tokenizer.pieces(tokenizer.encode("北京很大")) == list("北京很大")
