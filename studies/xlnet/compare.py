"""XLNet of examples/xlnet against transformers, from the files of reference.py.

    python studies/xlnet/compare.py FOLDER

Needs the package of examples/xlnet. Prints the largest differences of logits, memory, loss and gradients, relative
to the largest value of each array; the differences of a training curve of 50 steps on equal batches; and whether
folders of transformers are read and written bitwise. Writes them to FOLDER/compare.json. Exit code 1 if logits
differ by more than 2e-5 or a gradient by more than 1e-4.
"""

import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "xlnet" / "tests"))
import jax
import jax.numpy as jnp
import numpy as np
import optax
from bert_jax_xlnet.folder import read_folder, write_folder
from safetensors.numpy import load_file
from xlnet_references import classes, differences, lm_of, tree_of, worst

RATE = 3e-3


def curve(folder):
    """The losses of this library on the batches of transformers, and those of transformers."""
    weights, stored = read_folder(folder), np.load(folder / "batches.npz")
    model = lm_of(weights.spec)
    tree = tree_of(model, weights.params)
    optimizer = optax.adam(RATE, b1=0.9, b2=0.999, eps=1e-8)
    length = stored["own_ids"].shape[-1]

    @jax.jit
    def step(tree, state, batch):
        def loss(tree):
            labels = jnp.take_along_axis(batch["input_ids"], batch["target_positions"], axis=1)
            log_p = jax.nn.log_softmax(model.apply({"params": tree}, batch).mlm_logits)
            return -jnp.mean(jnp.take_along_axis(log_p, labels[..., None], axis=-1))

        value, grads = jax.value_and_grad(loss)(tree)
        updates, state = optimizer.update(grads, state, tree)
        return optax.apply_updates(tree, updates), state, value

    state, losses = optimizer.init(tree), []
    for i in range(len(stored["losses"])):
        ids = stored["own_ids"][i].astype(np.int32)
        batch = {
            "input_ids": ids, "token_type_ids": 0 * ids, "perm_mask": stored["own_perm_mask"][i],
            "position_ids": np.tile(np.arange(length, dtype=np.int32), (len(ids), 1)),
            "sequence_ids": (np.arange(length) < stored["sizes"][i][:, None]).astype(np.int32),
            "target_positions": stored["own_targets"][i].astype(np.int32),
        }
        tree, state, value = step(tree, state, batch)
        losses.append(float(value))
    return np.array(losses), stored["losses"]


def written_again(folder):
    """The number of tensors of a folder that are read and written bitwise, and whether all are."""
    with tempfile.TemporaryDirectory() as place:
        write_folder(Path(place), read_folder(folder))
        found, expected = (load_file(Path(one) / "model.safetensors") for one in (place, folder))
        configs = [json.loads((Path(one) / "config.json").read_text()) for one in (place, folder)]
    expected.pop("lm_loss.weight", None)  # tied, which some releases store as well
    same = found.keys() == expected.keys() and all(np.array_equal(found[n], expected[n]) for n in found)
    other = sorted(key for key, value in configs[0].items() if configs[1].get(key, value) != value)
    return {"tensors": len(found), "bitwise": same, "other keys of config.json": other}


def main():
    folder = Path(sys.argv[1])
    stored = np.load(folder / "reference.npz")
    found = differences(stored) | {"logits, classes": worst(classes(stored), stored["logits/classes"])}
    with jax.default_matmul_precision("highest"):
        ours, theirs = curve(folder / "curve")
    gradients = {name: value for name, value in found.items() if name.startswith("gradient")}
    rest = {name: value for name, value in found.items() if name not in gradients}
    worst_gradient = max(gradients, key=gradients.get)
    lines = {
        **json.loads((folder / "versions.json").read_text()), "jax": jax.__version__,
        **{name: float(f"{value:.2g}") for name, value in rest.items()},
        "gradients": len(gradients), "largest": worst_gradient,
        "its difference": float(f"{gradients[worst_gradient]:.2g}"),
        "curve": {
            "first and last loss": [round(float(x), 4) for x in (theirs[0], theirs[-1])],
            "largest difference": float(f"{np.abs(ours - theirs).max():.2g}"),
            "at step": int(np.abs(ours - theirs).argmax()) + 1,
            "difference of the last loss": float(f"{abs(ours[-1] - theirs[-1]):.2g}"),
        },
        "folders": {name: written_again(folder / name) for name in ("model", "classifier", "curve")},
    }  # fmt: skip
    text = json.dumps(lines, indent=1)
    (folder / "compare.json").write_text(text + "\n")
    print(text)
    return max(rest.values()) > 2e-5 or gradients[worst_gradient] > 1e-4


if __name__ == "__main__":
    sys.exit(int(main()))
