"""Pseudo-log-likelihoods by a batched loop in torch, for pseudo_likelihood.py.

    python studies/scoring/score_torch.py FOLDER TEXTS {usual,lean}

For the peers' environment (benchmarks/requirements.lock): neither JAX nor bert_jax is needed. FOLDER is a masked
language model of transformers, TEXTS a JSON list. Masked copies of all texts are sorted by length and run in padded
batches, with two threads:

* ``usual``: the loop as published (minicons, mlm-scoring): the model computes logits at all positions, and those at
  the masks are read.
* ``lean``: only the hidden states at the masks pass through the head.

The batch size is the fastest of ``SIZES`` on a part of the copies. Reads commands from standard input, a line each:
``time METHOD``, or ``save METHOD FILE.npy`` for the scores; answers each with one JSON line.
"""

import json
import sys
import time
from pathlib import Path

import numpy as np
import torch
import transformers

SIZES, TRIED = (16, 32, 64, 128), 256
# Index of the text, position of the token, end of the masked positions.
Copy = tuple[int, int, int]


class Loop:
    """The model, and the loop over the masked copies of texts."""

    def __init__(self, folder: str, lean: bool) -> None:
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        self.model = transformers.AutoModelForMaskedLM.from_pretrained(folder).eval()
        self.lean, self.size = lean, SIZES[0]

    def encode(self, texts: list[str], method: str) -> tuple[list[list[int]], list[Copy]]:
        """Return the ids of all texts, and their masked copies sorted by length."""
        encoded = self.tokenizer(texts)
        copies = []
        for number, ids in enumerate(encoded["input_ids"]):
            words = encoded.word_ids(number)
            for position in range(1, len(ids) - 1):
                end = position + 1
                while method == "PLL-word-l2r" and words[end] == words[position]:
                    end += 1
                copies.append((number, position, end))
        copies.sort(key=lambda copy: len(encoded["input_ids"][copy[0]]))
        return encoded["input_ids"], copies

    @torch.inference_mode()
    def run(self, ids: list[list[int]], copies: list[Copy]) -> np.ndarray:
        """Return the sum of the log-probabilities of each text, float64[texts]."""
        scores, mask, pad = np.zeros(len(ids)), self.tokenizer.mask_token_id, self.tokenizer.pad_token_id
        for begin in range(0, len(copies), self.size):
            part = copies[begin : begin + self.size]
            width = len(ids[part[-1][0]])
            rows = np.full((len(part), width), pad)
            for row, (text, position, end) in zip(rows, part, strict=True):
                row[: len(ids[text])] = ids[text]
                row[position:end] = mask
            inputs = torch.from_numpy(rows)
            seen = torch.from_numpy(np.array([[len(ids[text])] for text, _, _ in part]) > np.arange(width)).long()
            at = torch.arange(len(part)), torch.tensor([position for _, position, _ in part])
            labels = torch.tensor([ids[text][position] for text, position, _ in part])
            if self.lean:
                hidden = self.model.base_model(input_ids=inputs, attention_mask=seen).last_hidden_state
                logits = self.model.cls(hidden[at])
            else:
                logits = self.model(input_ids=inputs, attention_mask=seen).logits[at]
            chosen = torch.log_softmax(logits, dim=-1)[at[0], labels]
            np.add.at(scores, [text for text, _, _ in part], chosen.double().numpy())
        return scores

    def choose_size(self, texts: list[str]) -> None:
        """Set the batch size to the fastest one on a sample of the copies, which are sorted by length."""
        ids, copies = self.encode(texts, "PLL-original")
        sample = copies[:: max(1, len(copies) // TRIED)]
        seconds = {}
        for self.size in (SIZES[0], *SIZES):  # the first run of all is a warm-up
            start = time.perf_counter()
            self.run(ids, sample)
            seconds[self.size] = time.perf_counter() - start
        self.size = min(seconds, key=seconds.__getitem__)


def main() -> None:
    """Answer commands until standard input ends."""
    folder, file, kind = sys.argv[1:]
    torch.set_num_threads(2)
    texts = json.loads(Path(file).read_text(encoding="utf-8"))
    loop = Loop(folder, kind == "lean")
    loop.choose_size(texts)
    about = {"torch": torch.__version__, "transformers": transformers.__version__, "batch": loop.size}
    print(json.dumps(about), flush=True)
    for line in sys.stdin:
        command, method, *target = line.split()
        began, used = time.perf_counter(), time.process_time()
        ids, copies = loop.encode(texts, method)
        scores = loop.run(ids, copies)
        answer = {"seconds": time.perf_counter() - began, "cpu_seconds": time.process_time() - used}
        if command == "save":
            np.save(target[0], scores)
        print(json.dumps(answer | {"passes": len(copies)}), flush=True)


if __name__ == "__main__":
    main()
