"""Records losses and gradients of the systems before BERT, written out in torch, on ``ancestor_cases.py``.

    pip install -r tests/golden/requirements.lock      (an environment of its own; torch and numpy suffice)
    python tests/golden/record_ancestors.py            writes tests/golden/fixtures/ancestors.npz
    python tests/golden/record_ancestors.py --check    compares with what is there instead

Computed in float64, stored as float32: of each model the mean loss of the next tokens (of both directions for ELMo)
and its gradient by every parameter, and the states of all layers. The LSTM is torch's own, with 1 added to the
forget gate, in every sequence from a state of zeros; ELMo is written out cell by cell; GloVe's loss is the sum over
some entries.
"""

import argparse
import sys
from pathlib import Path

import numpy as np
import torch
from ancestor_cases import (
    COUNT_POWER,
    ENTRIES,
    LARGEST_COUNT,
    MODELS,
    SEQUENCE_IDS,
    VECTORS,
    characters,
    next_weights,
    token_ids,
    values,
    weights,
)

FIXTURE = Path(__file__).parent / "fixtures" / "ancestors.npz"
Params = dict[str, torch.Tensor]


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2), targets, reduction="none")
    weight = torch.from_numpy(next_weights())
    return (losses * weight).sum() / weight.sum()


def nnlm(params: Params, ids: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    table = params["embeddings/word_embeddings/embedding"]
    rows = []
    for row, sequences in zip(ids, SEQUENCE_IDS, strict=True):
        states = []
        for place, sequence in enumerate(sequences):
            seen = []
            for back in range(3):
                inside = place >= back and sequences[place - back] == sequence and sequence > 0
                seen.append(table[row[place - back]] if inside else torch.zeros(table.shape[1], dtype=table.dtype))
            bias = params["encoder/layer_0/hidden/bias"]
            states.append(torch.tanh(torch.cat(seen) @ params["encoder/layer_0/hidden/kernel"] + bias))
        rows.append(torch.stack(states))
    states = torch.stack(rows)
    logits = states @ params["mlm_head/output_embeddings/embedding"].T + params["mlm_head/output_bias"]
    return loss_of(logits[:, :-1], ids[:, 1:]), [states]


def lstm(params: Params, ids: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    table = params["embeddings/word_embeddings/embedding"]
    x, layers = table[ids], []
    for i in range(MODELS["lstm"]["num_layers"]):
        own = {
            part: params[f"encoder/layer_{i}/forward/{part}"]
            for part in ("input_kernel", "recurrent_kernel", "bias")
        }
        cells = own["recurrent_kernel"].shape[0]
        module = torch.nn.LSTM(x.shape[-1], cells, batch_first=True).double()
        one = torch.cat([torch.zeros(cells), torch.ones(cells), torch.zeros(2 * cells)]).double()
        given = {
            "weight_ih_l0": own["input_kernel"].T, "weight_hh_l0": own["recurrent_kernel"].T,
            "bias_ih_l0": own["bias"], "bias_hh_l0": one,
        }  # fmt: skip
        rows = []
        for row, sequences in zip(x, SEQUENCE_IDS, strict=True):
            parts, start = [], 0
            for stop in range(1, len(sequences) + 1):
                ends = stop == len(sequences) or sequences[stop] != sequences[start] or sequences[start] == 0
                if ends:
                    output, _ = torch.func.functional_call(module, given, (row[None, start:stop],))
                    parts.append(output[0])
                    start = stop
            rows.append(torch.cat(parts))
        x = torch.stack(rows)
        layers.append(x)
    logits = x @ table.T + params["mlm_head/output_bias"]
    return loss_of(logits[:, :-1], ids[:, 1:]), layers


def character_table(params: Params) -> torch.Tensor:
    own = {name.rpartition("/")[2]: value for name, value in params.items() if "characters/" in name}
    letters = own["character_embeddings"][torch.from_numpy(characters()).long()].transpose(1, 2)
    found = []
    for i in range(len(MODELS["elmo"]["character_filters"]) // 2):
        kernel = own[f"filter_{i}_kernel"].permute(2, 1, 0)
        found.append(torch.conv1d(letters, kernel, own[f"filter_{i}_bias"]).max(dim=2).values)
    x = torch.relu(torch.cat(found, dim=1))
    for i in range(MODELS["elmo"]["highway_layers"]):
        new = torch.relu(x @ own[f"highway_{i}_transform_kernel"] + own[f"highway_{i}_transform_bias"])
        gate = torch.sigmoid(x @ own[f"highway_{i}_carry_kernel"] + own[f"highway_{i}_carry_bias"])
        x = gate * new + (1 - gate) * x
    return x @ own["projection_kernel"] + own["projection_bias"]


def elmo_direction(params: Params, x: torch.Tensor, direction: str) -> list[torch.Tensor]:
    model, layers = MODELS["elmo"], []
    places = range(x.shape[1]) if direction == "forward" else range(x.shape[1] - 1, -1, -1)
    for i in range(model["num_layers"]):
        own = {
            part: params[f"encoder/layer_{i}/{direction}/{part}"]
            for part in ("input_kernel", "recurrent_kernel", "bias", "projection_kernel")
        }
        rows = []
        for row, sequences in zip(x, SEQUENCE_IDS, strict=True):
            outputs: dict[int, torch.Tensor] = {}
            before = None
            for place in places:
                if before is None or sequences[before] != sequences[place] or sequences[place] == 0:
                    hidden = torch.zeros(x.shape[-1], dtype=x.dtype)
                    cell = torch.zeros(model["lstm_cells"], dtype=x.dtype)
                gates = row[place] @ own["input_kernel"] + hidden @ own["recurrent_kernel"] + own["bias"]
                enter, forget, new, out = gates.chunk(4)
                cell = torch.sigmoid(forget + 1) * cell + torch.sigmoid(enter) * torch.tanh(new)
                cell = cell.clamp(-model["lstm_cell_clip"], model["lstm_cell_clip"])
                hidden = (torch.sigmoid(out) * torch.tanh(cell)) @ own["projection_kernel"]
                hidden = hidden.clamp(-model["lstm_projection_clip"], model["lstm_projection_clip"])
                outputs[place], before = hidden, place
            rows.append(torch.stack([outputs[place] for place in range(x.shape[1])]))
        output = torch.stack(rows)
        x = output + x if i else output
        layers.append(x)
    return layers


def elmo(params: Params, ids: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    x = character_table(params)[ids]
    both = [elmo_direction(params, x, direction) for direction in ("forward", "backward")]
    table, bias = params["mlm_head/output_embeddings/embedding"], params["mlm_head/output_bias"]
    forward, backward = (layers[-1] @ table.T + bias for layers in both)
    loss = (loss_of(forward[:, :-1], ids[:, 1:]) + loss_of(backward[:, 1:], ids[:, :-1])) / 2
    return loss, [torch.cat(pair, dim=-1) for pair in zip(*both, strict=True)]


def glove() -> dict[str, np.ndarray]:
    params = {name: torch.from_numpy(values(f"glove/{name}", shape)).double() for name, shape in VECTORS.items()}
    for value in params.values():
        value.requires_grad_()
    first, second, counts = (torch.from_numpy(part) for part in ENTRIES)
    products = (params["words"][first] * params["contexts"][second]).sum(dim=1)
    errors = products + params["word_bias"][first] + params["context_bias"][second] - torch.log(counts)
    loss = (torch.clamp(counts / LARGEST_COUNT, max=1) ** COUNT_POWER * errors**2).sum()
    loss.backward()
    return {"loss": loss.detach().numpy()} | {
        f"gradient/{name}": value.grad.numpy() for name, value in params.items()
    }


def record() -> dict[str, np.ndarray]:
    ids, found = torch.from_numpy(token_ids()).long(), {}
    for name, run in (("nnlm", nnlm), ("lstm", lstm), ("elmo", elmo)):
        params = {key: torch.from_numpy(value).double().requires_grad_() for key, value in weights(name).items()}
        loss, layers = run(params, ids)
        loss.backward()
        found[f"{name}/loss"] = loss.detach().numpy()
        found |= {f"{name}/layer_{i}": x.detach().numpy() for i, x in enumerate(layers)}
        found |= {f"{name}/gradient/{key}": value.grad.numpy() for key, value in params.items()}
    found |= {f"glove/{key}": value for key, value in glove().items()}
    return {name: np.asarray(value, np.float32) for name, value in found.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare with the fixture instead of writing it")
    found = record()
    if not parser.parse_args().check:
        np.savez_compressed(FIXTURE, **found)
        print(f"{FIXTURE}: {len(found)} arrays, {FIXTURE.stat().st_size:,} bytes")
        return 0
    with np.load(FIXTURE) as stored:
        worst = max(float(np.abs(stored[name] - value).max()) for name, value in found.items())
    print(f"largest difference {worst:.1e}")
    return 0 if worst < 1e-6 else 1


if __name__ == "__main__":
    sys.exit(main())
