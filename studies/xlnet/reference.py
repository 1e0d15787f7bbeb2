"""XLNetLMHeadModel of transformers on small random models: folders, logits, gradients and a training curve.

    PYTHON studies/xlnet/reference.py FOLDER

PYTHON has torch and transformers. Writes FOLDER/model (a folder of transformers), FOLDER/reference.npz (inputs,
weights as int8 / 64, logits, memory and gradients of a model of 1,500 parameters) and FOLDER/curve (a model, 50
batches, the losses of transformers). compare.py reads all of them.

Rows are given twice: as XLNet reads them, with the class token at the end, and as bert_jax does, with it at the
beginning.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
from transformers import XLNetConfig, XLNetForSequenceClassification, XLNetLMHeadModel

STEPS, RATE = 50, 3e-3


def rows(rng, batch, length, sizes, targets, vocab, has_types):
    """Features of random rows of ``sizes`` tokens, in both orders; the second one has the prefix ``own_``."""
    found = {}
    ids = rng.integers(5, vocab, (batch, length))
    for prefix in ("", "own_"):
        found |= {
            f"{prefix}ids": np.zeros((batch, length), np.int64), f"{prefix}types": np.zeros((batch, length), np.int64),
            f"{prefix}perm_mask": np.zeros((batch, length, length), bool),
            f"{prefix}targets": np.zeros((batch, targets), np.int64),
        }
    found["own_places"] = np.zeros((batch, length), np.int64)  # place of own token i in the order of XLNet
    found["sizes"] = np.array(sizes)
    for row, size in enumerate(sizes):
        places = np.arange(length)
        places[:size] = np.r_[size - 1, np.arange(size - 1)]
        found["own_places"][row] = places
        types = np.where(np.arange(length) < size // 2, 0, 1) if has_types else np.zeros(length, np.int64)
        types[size - 1] = 2
        chosen = rng.permutation(size - 2)[:targets]
        ranks = np.full(length, -1)
        ranks[chosen] = rng.permutation(len(chosen))
        hidden = (ranks[None, :] >= 0) & (ranks[None, :] >= ranks[:, None])
        found["ids"][row], found["types"][row] = ids[row], types
        found["perm_mask"][row], found["targets"][row] = hidden, chosen
        found["own_ids"][row], found["own_types"][row] = ids[row][places], types[places]
        found["own_perm_mask"][row] = hidden[places][:, places]
        found["own_targets"][row] = np.argsort(places)[chosen]
    return found


def inputs(features, mask=None):
    """The arguments of the model for the features of :func:`rows`, and the labels."""
    batch, length = features["ids"].shape
    mapping = np.zeros((batch, features["targets"].shape[1], length), np.float32)
    np.put_along_axis(mapping, features["targets"][..., None], 1.0, axis=-1)
    padding = (np.arange(length) >= features["sizes"][:, None]).astype(np.float32)
    hidden = features["perm_mask"] if mask is None else mask
    arguments = {
        "input_ids": features["ids"], "token_type_ids": features["types"], "input_mask": padding,
        "perm_mask": hidden.astype(np.float32), "target_mapping": mapping,
    }
    labels = np.take_along_axis(features["ids"], features["targets"], axis=1)
    return {name: torch.tensor(x) for name, x in arguments.items()}, torch.tensor(labels)


def flat(arrays):
    """All values in the order of the sorted names."""
    return np.concatenate([arrays[name].reshape(-1) for name in sorted(arrays)])


def model_of(rng, cls=XLNetLMHeadModel, scale=1 / 64, **values):
    """A model without dropout whose parameters are multiples of 1 / 64, and these as int8."""
    torch.manual_seed(0)
    model = cls(XLNetConfig(dropout=0.0, summary_last_dropout=0.0, **values)).eval()
    whole = {}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_scale = name.endswith("layer_norm.weight")
            numbers = np.clip(np.round(rng.normal(64 if is_scale else 0, 20, tuple(parameter.shape))), -127, 127)
            whole[name] = numbers.astype(np.int8)
            parameter.copy_(torch.tensor(numbers * scale, dtype=torch.float32))
    return model, whole


def reference(folder):
    rng = np.random.default_rng(0)
    sizes = {"vocab_size": 29, "d_model": 8, "n_layer": 2, "n_head": 2, "d_inner": 12}
    model, whole = model_of(rng, **sizes, mem_len=7, clamp_len=5)
    model.save_pretrained(folder / "model")
    first = rows(rng, 2, 6, [6, 6], 3, 29, True)
    second = rows(rng, 2, 10, [10, 8], 4, 29, True)
    stored = {"weights": flat(whole)}
    stored |= {f"first/{name}": x for name, x in first.items()} | {f"second/{name}": x for name, x in second.items()}
    plain, _ = inputs(second)
    with torch.no_grad():
        names = ("input_ids", "token_type_ids", "input_mask")
        output = model(**{name: plain[name] for name in names}, use_mems=False)
        stored["logits/one_stream"] = output.logits.numpy()
        mask = rng.random((2, 10, 10)) < 0.4
        stored["logits/any_mask/mask"] = mask
        stored["logits/any_mask"] = model(**inputs(second, mask)[0], use_mems=False).logits.numpy()
        arguments, _ = inputs(first)
        memory = model(**arguments, use_mems=True).mems
        stored["memory"] = torch.stack(list(memory)).permute(2, 0, 1, 3).numpy()
    arguments, labels = inputs(second)
    output = model(**arguments, mems=memory, use_mems=True)
    stored["logits/two_streams"] = output.logits.detach().numpy()
    loss = torch.nn.functional.cross_entropy(output.logits.flatten(0, 1), labels.flatten())
    loss.backward()
    stored["loss"] = np.float32(loss.item())
    stored["gradients"] = flat({name: parameter.grad.numpy() for name, parameter in model.named_parameters()})
    classifier, whole = model_of(rng, XLNetForSequenceClassification, **sizes, num_labels=3)
    classifier.save_pretrained(folder / "classifier")
    with torch.no_grad():
        plain["token_type_ids"] *= plain["token_type_ids"] == 2  # one text and the class token
        logits = classifier(**{name: plain[name][:1] for name in names}, use_mems=False).logits
    stored["classifier"] = flat(whole)
    stored["logits/classes"] = logits.numpy()  # the summary is the last place, so the row has no padding
    small = {n: x.astype(np.int8 if x.dtype == np.int64 else x.dtype) for n, x in stored.items()}
    np.savez_compressed(folder / "reference.npz", **small)


def curve(folder):
    rng = np.random.default_rng(1)
    torch.manual_seed(1)
    sizes = {"vocab_size": 100, "d_model": 64, "n_layer": 3, "n_head": 4, "d_inner": 256}
    model = XLNetLMHeadModel(XLNetConfig(dropout=0.0, **sizes)).eval()
    model.save_pretrained(folder / "curve")
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE, betas=(0.9, 0.999), eps=1e-8)
    losses, batches = [], []
    for _ in range(STEPS):
        features = rows(rng, 8, 48, rng.integers(24, 49, 8).tolist(), 7, 100, False)
        base = 5 + np.minimum(rng.geometric(0.05, (8, 4)), 94)  # four frequent tokens, again and again
        text = np.tile(base, 12)
        features["ids"], places = text, features["own_places"]
        features["own_ids"] = np.take_along_axis(text, places, axis=1)
        arguments, labels = inputs(features)
        loss = torch.nn.functional.cross_entropy(
            model(**arguments, use_mems=False).logits.flatten(0, 1), labels.flatten()
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        batches.append({n: x for n, x in features.items() if n.startswith("own_") or n == "sizes"})
    np.savez_compressed(
        folder / "curve" / "batches.npz", losses=np.array(losses),
        **{name: np.stack([batch[name] for batch in batches]) for name in batches[0]},
    )


if __name__ == "__main__":
    target = Path(sys.argv[1])
    target.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    reference(target)
    curve(target)
    import transformers

    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    (target / "versions.json").write_text(json.dumps(versions) + "\n")
