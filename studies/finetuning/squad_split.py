"""SQuAD files split by article, and XQuAD without the articles that are trained on.

    python studies/finetuning/squad_split.py --squad FOLDER --xquad xquad.en.json --out FOLDER [--held_out 0.25 --seed 0]

Of FOLDER's train-v1.1.json and train-v2.0.json the same titles are held out: the new folder has train-*.json,
dev-*.json (the names in the recipes) and xquad.en.json. ``--data.train_limit`` draws fewer questions.
"""

import argparse
import hashlib
import json
from pathlib import Path

VERSIONS = ("v1.1", "v2.0")


def passages(articles: list[dict]) -> set[str]:
    return {paragraph["context"] for article in articles for paragraph in article["paragraphs"]}


def count(articles: list[dict]) -> int:
    """Return the number of questions."""
    return sum(len(paragraph["qas"]) for article in articles for paragraph in article["paragraphs"])


def write(file: Path, articles: list[dict], version: str) -> None:
    file.write_text(json.dumps({"version": version, "data": articles}, ensure_ascii=False), encoding="utf-8")
    found = len(passages(articles))
    print(f"{file.name}: {len(articles)} articles, {found} passages, {count(articles):,} questions")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--squad", required=True, type=Path, help="folder with train-v1.1.json and train-v2.0.json")
    parser.add_argument("--xquad", required=True, type=Path, help="English file of XQuAD")
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument(
        "--held_out", type=float, default=0.25, help="share of the titles of both versions together"
    )
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    files = [*(options.squad / f"train-{version}.json" for version in VERSIONS), options.xquad]
    *versions, xquad = (json.loads(file.read_text(encoding="utf-8"))["data"] for file in files)
    titles = {article["title"] for articles in versions for article in articles}
    order = sorted(titles, key=lambda title: hashlib.sha256(f"{options.seed} {title}".encode()).digest())
    held = set(order[: round(options.held_out * len(order))])
    options.out.mkdir(parents=True, exist_ok=True)
    trained: set[str] = set()
    for version, articles in zip(VERSIONS, versions, strict=True):
        train = [article for article in articles if article["title"] not in held]
        write(options.out / f"train-{version}.json", train, version)
        trained |= passages(train)
    for version, articles in zip(VERSIONS, versions, strict=True):
        dev = [article for article in articles if article["title"] in held]
        assert not trained & passages(dev), "a passage stands in two articles"
        write(options.out / f"dev-{version}.json", dev, version)
    unseen = [article for article in xquad if article["title"] not in titles - held]
    unseen = [
        article | {"paragraphs": [one for one in article["paragraphs"] if one["context"] not in trained]}
        for article in unseen
    ]
    write(options.out / "xquad.en.json", unseen, "XQuAD")
    print(f"held out: {', '.join(sorted(held))}")


if __name__ == "__main__":
    main()
