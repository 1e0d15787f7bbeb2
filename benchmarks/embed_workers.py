"""Embedding of texts by this library in a process of its own; for pairs.py.

    embed_workers.py ours MODEL TEXTS

TEXTS is a JSON list. Reads numbers of passes to time from standard input, one a line, and answers each with a JSON
line. (studies/embedding has the same worker for other libraries.)
"""

import json
import sys
import time
from pathlib import Path


def main() -> None:
    """Answer commands until standard input ends."""
    _, model, texts = sys.argv[1:]
    answers = sys.stdout
    sys.stdout = sys.stderr  # a library's chatter is no answer
    import bert_jax

    loaded, rows = bert_jax.load(model), json.loads(Path(texts).read_text(encoding="utf-8"))
    loaded.embed(rows)
    print(json.dumps({}), file=answers, flush=True)
    for line in sys.stdin:
        seconds = []
        for _ in range(int(line)):
            began = time.perf_counter()
            loaded.embed(rows)
            seconds.append(time.perf_counter() - began)
        print(json.dumps({"seconds": seconds}), file=answers, flush=True)


if __name__ == "__main__":
    main()
