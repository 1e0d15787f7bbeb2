"""Last steps of ``bert-data clean``: write the text files, and move them and the report to the output folder."""

import json
from functools import lru_cache, partial

import numpy as np

from bert_jax.io.files import write_whole
from bert_jax.io.storage import Location
from bert_jax.json_values import Json
from data_pipeline.build.workers import scratch_file
from data_pipeline.contrib.clean.drop_counts import Tally, excerpt, merge
from data_pipeline.contrib.clean.duplicates import comparison_jobs
from data_pipeline.contrib.clean.report import REPORT_NAME, CleanReport, as_text, make_report
from data_pipeline.contrib.clean.workspace import (
    TALLIES,
    Plan,
    example,
    load_arrays,
    load_chunks,
    load_columns,
    load_plan,
    source_of,
    split_text,
)
from data_pipeline.text.corpus import CLEANED_NAME


@lru_cache(maxsize=1)
def _near_duplicates(folder: Location) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the documents to drop int64[M], sorted, the documents they are similar to, and the similarities."""
    names = [f"{job:06d}.npz" for job in comparison_jobs(folder)]
    columns = load_columns(folder, "compared", names, document="i8", similar_to="i8", similarity="f8")
    order = np.argsort(columns[0])
    return columns[0][order], columns[1][order], columns[2][order]


def write_source(folder: Location, index: int) -> None:
    """Write the remaining documents of a source, separated by blank lines (a worker job).

    No file is written if no document remains.
    """
    plan = load_plan(folder)
    done = plan.path(TALLIES, f"write-{index:06d}.json")
    if done.exists():
        return
    tally = Tally()
    tally.add(str(index), documents_out=0, characters_out=0)
    with scratch_file(plan.path("output", f"{index:06d}")) as part, part.open("wb") as file:
        for name, start, stop in load_chunks(folder, "kept"):
            if source_of(name) == index:
                for document in _remaining(plan, name, np.arange(start, stop), tally):
                    if file.tell():
                        file.write(b"\n")
                    file.writelines(f"{line}\n".encode() for line in document)
                    size = sum(map(len, document))
                    tally.add(str(index), documents_out=1, characters_out=size)
    write_whole(done, tally.as_json())


def _remaining(plan: Plan, name: str, documents: np.ndarray, tally: Tally) -> list[list[str]]:
    """Return the ``documents`` int64[D] of a chunk that are not near duplicates."""
    arrays = load_arrays(plan.path("signed", f"{name}.npz"))
    texts = split_text(plan.path("kept", f"{name}.txt").read_bytes(), arrays["bytes"])
    dropped, similar, similarities = _near_duplicates(plan.folder)
    chosen = np.flatnonzero(np.isin(dropped, documents))
    for at in chosen:
        index = int(dropped[at] - documents[0])
        tally.add("near_duplicate", documents=1, characters=sum(map(len, texts[index])))
        place = source_of(name), int(arrays["number"][index])
        make = partial(_near_example, plan, place, texts[index], int(similar[at]), float(similarities[at]))
        tally.offer("near_duplicate", place, 0, make)
    gone = set((dropped[chosen] - documents[:1]).tolist())
    return [text for index, text in enumerate(texts) if index not in gone]


def _near_example(
    plan: Plan, place: tuple[int, int], text: list[str], other: int, similarity: float
) -> dict[str, Json]:
    """Return the example of a near duplicate, with the start of both texts."""
    chunk, index = load_chunks(plan.folder, "kept").chunk(other)
    arrays = load_arrays(plan.path("signed", f"{chunk}.npz"))
    kept = split_text(plan.path("kept", f"{chunk}.txt").read_bytes(), arrays["bytes"])[index]
    similar_to = example(plan, source_of(chunk), int(arrays["number"][index]), text=excerpt("\n".join(kept)))
    return example(
        plan, *place, similarity=round(similarity, 3), similar_to=similar_to, text=excerpt("\n".join(text))
    )


def finish(plan: Plan, target: Location) -> CleanReport:
    """Move the files of text to the folder ``target``, and write the report there last; return the report."""
    paths = [
        *(plan.path(TALLIES, f"{kind}-{name}.json") for kind in ("scan", "sign")
          for name in load_chunks(plan.folder, "scanned").names),
        *(plan.path(TALLIES, f"write-{index:06d}.json") for index in range(len(plan.sources))),
    ]  # fmt: skip
    counts, examples = merge(path.read_text(encoding="utf-8") for path in paths)
    report = make_report(plan, counts, examples)
    for index, entry in enumerate(report["sources"]):
        if entry["file"]:
            final = target / entry["file"]
            final.parent.mkdir(parents=True, exist_ok=True)
            if not final.exists():
                plan.path("output", f"{index:06d}").replace(final)  # type: ignore[arg-type]
    write_whole(target / REPORT_NAME, as_text(report))
    write_whole(target / CLEANED_NAME, json.dumps(report, ensure_ascii=False, indent=1) + "\n")
    return report
