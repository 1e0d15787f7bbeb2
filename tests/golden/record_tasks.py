"""Records loss and gradients of one batch of every task: transformers' own classes, or modules around its BERT.

    pip install -r tests/golden/requirements.lock      (an environment of its own)
    python tests/golden/record_tasks.py                writes tests/golden/fixtures/tasks.npz

The texts go through transformers' tokenizer and are padded to the longest, one a row. Question answering is the
exception: its softmax in transformers runs over padding too, so there each question is a batch of its own without
padding, and the loss is the mean. float64 arithmetic on float32 weights, stored as float32.
"""

import itertools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from cases import parameter_shapes
from reference import reference_name
from task_cases import LABELS, PIECES, TAGS, TASK_CASES, TaskCase, weight
from torch import nn
from torch.nn.functional import cross_entropy, normalize
from transformers import (
    BertConfig,
    BertForMultipleChoice,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertForTokenClassification,
    BertModel,
    BertTokenizer,
)

FIXTURE = Path(__file__).parent / "fixtures" / "tasks.npz"
TOKENIZER = BertTokenizer({piece: i for i, piece in enumerate(PIECES)})
UNLABELLED = -100
Inputs = dict[str, torch.Tensor]


def config_of(case: TaskCase, **more: object) -> BertConfig:
    model = case.model
    return BertConfig(
        vocab_size=model["vocab_size"], hidden_size=model["hidden_size"], num_hidden_layers=case.layers,
        num_attention_heads=model["num_attention_heads"], intermediate_size=model["intermediate_size"],
        max_position_embeddings=model["max_position_embeddings"], hidden_act=model["activation"],
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, attn_implementation="eager", **more,
    )  # fmt: skip


def encoded(*columns: list[str]) -> Inputs:
    """Texts or pairs, padded."""
    return dict(TOKENIZER(*columns, padding=True, return_tensors="pt"))


def texts(case: TaskCase) -> Inputs:
    """Inputs of records of which some are pairs."""
    rows = [TOKENIZER(record["text"], record.get("text_pair")) for record in case.records]
    return dict(TOKENIZER.pad(rows, return_tensors="pt"))


def sentences(case: TaskCase) -> tuple[Inputs, torch.Tensor]:
    """Inputs of words, and the tag of each word's first piece [B, S]."""
    inputs = TOKENIZER([list(r["words"]) for r in case.records], is_split_into_words=True, padding=True)
    tags = torch.full(np.shape(inputs["input_ids"]), UNLABELLED)
    for row, record in enumerate(case.records):
        seen = inputs.word_ids(row)
        for number, tag in enumerate(record["tags"]):
            tags[row, seen.index(number)] = TAGS.index(tag)
    return {name: torch.tensor(values) for name, values in inputs.items()}, tags


def labels(case: TaskCase) -> torch.Tensor:
    return torch.tensor([LABELS.index(record["label"]) for record in case.records])


# ------------------------------------------------------------------ classes of transformers

# A network, its loss, and what our model calls its output layer.
Recorded = tuple[nn.Module, Callable[[nn.Module], torch.Tensor], dict[str, str]]


def classifier(case: TaskCase) -> Recorded:
    match case.kind:
        case "classification":
            problem, targets = "single_label_classification", labels(case)
        case "regression":
            problem, targets = "regression", torch.tensor([float(r["label"]) for r in case.records]).double()
        case _:
            problem = "multi_label_classification"
            targets = torch.tensor([[float(name in r["labels"]) for name in LABELS] for r in case.records]).double()
    count = 1 if problem == "regression" else len(LABELS)
    network = BertForSequenceClassification(config_of(case, num_labels=count, problem_type=problem))
    return network, lambda net: net(**texts(case), labels=targets).loss, {"classifier": "sequence_head"}


def token_classifier(case: TaskCase) -> Recorded:
    inputs, tags = sentences(case)
    network = BertForTokenClassification(config_of(case, num_labels=len(TAGS)))
    return network, lambda net: net(**inputs, labels=tags).loss, {"classifier": "token_head"}


def multiple_choice(case: TaskCase) -> Recorded:
    count = len(case.records[0]["choices"])
    firsts = [record["text"] for record in case.records for _ in range(count)]
    inputs = encoded(firsts, [choice for record in case.records for choice in record["choices"]])
    inputs = {name: values.reshape(-1, count, values.shape[-1]) for name, values in inputs.items()}
    right = torch.tensor([int(record["label"]) for record in case.records])
    network = BertForMultipleChoice(config_of(case))
    return network, lambda net: net(**inputs, labels=right).loss, {"classifier": "choice_head"}


def question_answering(case: TaskCase) -> Recorded:
    def one(net: nn.Module, record: dict) -> torch.Tensor:
        inputs = TOKENIZER(record["text"], record["text_pair"], return_tensors="pt")
        first = last = 0  # [CLS]: no answer
        for answer in record["answers"]:
            first = inputs.char_to_token(0, answer["start"], 1)
            last = inputs.char_to_token(0, answer["start"] + len(answer["text"]) - 1, 1)
        targets = {"start_positions": torch.tensor([first]), "end_positions": torch.tensor([last])}
        return net(**inputs, **targets).loss

    network = BertForQuestionAnswering(config_of(case))
    return network, lambda net: torch.stack([one(net, r) for r in case.records]).mean(), {"qa_outputs": "span_head"}


# ------------------------------------------------------------------ modules of our own


class Mix(nn.Module):
    """gamma * sum(softmax(w) * layer) (Peters et al. 2018)."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.weights, self.gamma = nn.Parameter(torch.zeros(count)), nn.Parameter(torch.ones(1))

    def forward(self, layers: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return self.gamma * sum(w * x for w, x in zip(self.weights.softmax(0), layers, strict=True))


class Crf(nn.Module):
    """-log p(tags) of one chain, by adding up the scores of all paths."""

    def __init__(self) -> None:
        super().__init__()
        count = len(TAGS)
        self.transitions = nn.Parameter(torch.zeros(count, count))
        self.start, self.end = nn.Parameter(torch.zeros(count)), nn.Parameter(torch.zeros(count))

    def forward(self, emissions: torch.Tensor, tags: torch.Tensor) -> torch.Tensor:
        paths = torch.tensor(list(itertools.product(range(len(TAGS)), repeat=len(tags))))
        return torch.logsumexp(self.scores(emissions, paths), 0) - self.scores(emissions, tags[None])[0]

    def scores(self, emissions: torch.Tensor, paths: torch.Tensor) -> torch.Tensor:
        """Of each path [P, words]."""
        own = emissions[torch.arange(paths.shape[1]), paths].sum(1)
        moves = self.transitions[paths[:, :-1], paths[:, 1:]].sum(1)
        return self.start[paths[:, 0]] + own + moves + self.end[paths[:, -1]]


class Tagger(nn.Module):
    """Tags from features of the layers, with or without a BiLSTM, intents or a CRF."""

    def __init__(self, case: TaskCase) -> None:
        super().__init__()
        self.bert = BertModel(config_of(case), add_pooling_layer=case.kind == "joint")
        self.kind = case.options.get("features", {}).get("layers", "last")
        self.first = {"weighted_all": 1, "weighted_last_four": -4}.get(self.kind)
        if self.first is not None:
            self.feature_mix = Mix(4 if self.first == -4 else case.layers)
        width, size = case.model["hidden_size"], case.options.get("features", {}).get("bilstm_size", 0)
        if size:
            self.bilstm = nn.LSTM(width, size, num_layers=2, bidirectional=True, batch_first=True)
        self.token_head = nn.Linear(2 * size or width, len(TAGS))
        if case.kind == "joint":
            self.sequence_head = nn.Linear(width, len(LABELS))
        if case.options.get("tagging"):
            self.crf = Crf()

    def forward(self, inputs: Inputs, tags: torch.Tensor, intents: torch.Tensor | None) -> torch.Tensor:
        output = self.bert(**inputs, output_hidden_states=True)
        x = output.last_hidden_state
        if self.first is not None:
            x = self.feature_mix(output.hidden_states[self.first :])
        if hasattr(self, "bilstm"):
            lengths = inputs["attention_mask"].sum(1)
            packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
            x, _ = nn.utils.rnn.pad_packed_sequence(self.bilstm(packed)[0], batch_first=True)
        logits = self.token_head(x)
        if hasattr(self, "crf"):
            kept = [tags[i] != UNLABELLED for i in range(len(tags))]
            return torch.stack([self.crf(logits[i][own], tags[i][own]) for i, own in enumerate(kept)]).mean()
        loss = cross_entropy(logits.flatten(0, 1), tags.flatten(), ignore_index=UNLABELLED)
        if intents is not None:
            loss = loss + cross_entropy(self.sequence_head(output.pooler_output), intents)
        return loss


def tagger(case: TaskCase) -> Recorded:
    inputs, tags = sentences(case)
    intents = labels(case) if case.kind == "joint" else None
    return Tagger(case), lambda net: net(inputs, tags, intents), {}


class Concatenated(nn.Module):
    """Classes from the first token of the last four layers, side by side."""

    def __init__(self, case: TaskCase) -> None:
        super().__init__()
        width = case.model["hidden_size"]
        self.bert = BertModel(config_of(case), add_pooling_layer=False)
        self.pooler, self.sequence_head = nn.Linear(4 * width, width), nn.Linear(width, len(LABELS))

    def forward(self, inputs: Inputs) -> torch.Tensor:
        layers = self.bert(**inputs, output_hidden_states=True).hidden_states[-4:]
        return self.sequence_head(torch.tanh(self.pooler(torch.cat([x[:, 0] for x in layers], dim=-1))))


def concatenated(case: TaskCase) -> Recorded:
    return Concatenated(case), lambda net: cross_entropy(net(texts(case)), labels(case)), {}


class Siamese(nn.Module):
    """One vector per text; classes of (u, v, |u - v|) (Reimers and Gurevych 2019)."""

    def __init__(self, case: TaskCase) -> None:
        super().__init__()
        self.options = case.options["sentence"]
        width, hidden = case.model["hidden_size"], self.options.get("hidden_size", 0)
        self.bert = BertModel(config_of(case), add_pooling_layer=False)
        if self.options["loss"] == "softmax":
            self.pair_head = nn.ModuleDict({"output": nn.Linear(hidden or 3 * width, len(LABELS))})
            if hidden:
                self.pair_head["hidden"] = nn.Linear(3 * width, hidden)

    def embed(self, column: list[str]) -> torch.Tensor:
        inputs = encoded(column)
        x, mask = self.bert(**inputs).last_hidden_state, inputs["attention_mask"][..., None]
        if self.options.get("pooling") == "max":
            x = x.masked_fill(mask == 0, -torch.inf).amax(1)
        else:
            x = (x * mask).sum(1) / mask.sum(1)
        return normalize(x, dim=-1) if self.options.get("normalize") else x

    def classes(self, u: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        x = torch.cat([u, v, (u - v).abs()], dim=-1)
        if "hidden" in self.pair_head:
            x = self.pair_head["hidden"](x).relu()
        return self.pair_head["output"](x)


def siamese(case: TaskCase) -> Recorded:
    def loss(net: Siamese) -> torch.Tensor:
        u, v = (net.embed([record[name] for record in case.records]) for name in ("text", "text_pair"))
        if net.options["loss"] == "softmax":
            return cross_entropy(net.classes(u, v), labels(case))
        hard = net.embed([record["negatives"][0] for record in case.records])
        cosines = normalize(u, dim=-1) @ normalize(torch.cat([v, hard]), dim=-1).T
        return cross_entropy(20 * cosines, torch.arange(len(u)))

    return Siamese(case), loss, {}


OWN = {
    "joint": tagger, "crf": tagger, "bilstm": tagger, "weighted_all": tagger, "weighted_last_four": tagger,
    "concat_last_four": concatenated,
}  # fmt: skip
KINDS = {
    "classification": classifier, "regression": classifier, "multi_label": classifier, "choice": multiple_choice,
    "qa": question_answering, "tagging": token_classifier, "sentence": siamese,
}  # fmt: skip


# ------------------------------------------------------------------ weights and gradients by our names


def our_name(name: str, heads: dict[str, str]) -> str:
    """Canonical name of a parameter outside of BERT."""
    first, *rest = name.split(".")
    if first == "bilstm":
        part, kind, layer, *backward = rest[0].split("_")
        prefix = f"bilstm/{'backward' if backward else 'forward'}_{layer.removeprefix('l')}"
        return {"weight_ih": f"{prefix}/kernel", "weight_hh": f"{prefix}_recurrent", "bias_ih": f"{prefix}/bias"}[
            f"{part}_{kind}"
        ]
    return "/".join([heads.get(first, first), *rest]).removesuffix("/weight") + "/kernel" * (rest[-1] == "weight")


def parameters(network: nn.Module, case: TaskCase, heads: dict[str, str]) -> dict[str, nn.Parameter]:
    """All that is trained, under canonical names."""
    named = dict(network.named_parameters())
    found = {}
    for name in parameter_shapes(case.model):
        theirs = reference_name(name)
        if theirs in named:
            found[name] = named.pop(theirs)
    assert not any(name.startswith("bert.") for name in named), named
    # torch has two biases where one would do.
    others = {name: p for name, p in named.items() if "bias_hh" not in name}
    return found | {our_name(name, heads): parameter for name, parameter in others.items()}


def is_transposed(name: str) -> bool:
    return name.endswith(("kernel", "recurrent"))


@torch.no_grad()
def set_weights(network: nn.Module, named: dict[str, nn.Parameter]) -> None:
    for name, parameter in network.named_parameters():
        if "bias_hh" in name:
            parameter.zero_()
    for name, parameter in named.items():
        shape = tuple(parameter.T.shape) if is_transposed(name) else tuple(parameter.shape)
        value = torch.from_numpy(weight(name, shape)).double()
        if name.startswith("bilstm") and name.endswith("bias"):
            value.chunk(4)[1].add_(1.0)  # our forget gates have 1 added to them
        parameter.copy_(value.T if is_transposed(name) else value)


def record(case: TaskCase) -> dict[str, np.ndarray]:
    """``CASE/loss``, and ``CASE/gradient:NAME`` of every parameter."""
    network, loss_of, heads = OWN.get(case.name, KINDS.get(case.kind))(case)
    network.double().train()
    named = parameters(network, case, heads)
    set_weights(network, named)
    loss = loss_of(network)
    loss.backward()
    result = {f"{case.name}/loss": loss.detach().numpy()}
    for name, parameter in named.items():
        assert parameter.grad is not None, f"{case.name}: {name} has no gradient"
        gradient = parameter.grad.numpy()
        result[f"{case.name}/gradient:{name}"] = gradient.T if is_transposed(name) else gradient
    return {name: value.astype(np.float32) for name, value in result.items()}


def main() -> None:
    arrays: dict[str, np.ndarray] = {}
    for case in TASK_CASES:
        arrays |= record(case)
        print(f"{case.name}: loss {arrays[f'{case.name}/loss']:.6f}")
    np.savez_compressed(FIXTURE, **arrays)
    print(f"{FIXTURE.name}: {FIXTURE.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
