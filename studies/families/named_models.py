"""Parameter counts of the models in configs/models against the classes of transformers.

    python studies/families/named_models.py --peer_python PYTHON [--output JSON]

PYTHON has torch and transformers. For each model, the config.json that this library writes is loaded by the class
that the head of the YAML file names ("Counted as CLASS"), on torch's meta device, which allocates no weights, and
the parameters of both are counted; tied parameters count once. transformers does not have NeoBERT: it is counted as
``tests/golden/record_neobert.py`` states it. Prints one JSON line per model; ``--output`` writes
all counts as one JSON object. Exit code 3 if a count differs.
"""

import argparse
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
os.environ.setdefault("JAX_PLATFORMS", "cpu")

from bert_jax.config import ModelConfig, ModelSpec, PretrainConfig, load_config
from bert_jax.config.spec import HeadsConfig
from bert_jax.interop.model_bundle import parameter_shapes
from bert_jax.interop.hf.config_json import hf_config
from bert_jax.interop.hf.families import FAMILIES

REPOSITORY = Path(__file__).resolve().parents[2]
MODELS = REPOSITORY / "configs" / "models"
PEER = """
import json, sys, torch, transformers
counts = {}
for name, (kind, file) in json.load(open(sys.argv[1])).items():
    if hasattr(transformers, kind):
        model_class = getattr(transformers, kind)
        with torch.device("meta"):
            model = model_class(model_class.config_class.from_json_file(file))
        model.tie_weights()
    else:  # the statement of the authors' code
        sys.path.insert(0, sys.argv[2])
        import record_neobert
        with torch.device("meta"):
            model = getattr(record_neobert, kind)(json.load(open(file)))
    counts[name] = sum(parameter.numel() for parameter in model.parameters())
print(json.dumps({"transformers": transformers.__version__, "counts": counts}))
"""


def read_model(path: Path) -> tuple[ModelConfig, str]:
    """Return the model of a file in configs/models and the class that its head names."""
    config = load_config(PretrainConfig, ["--config", str(path), "--data.next_sentence", "none"])
    found = re.search(r"Counted as (\w+)", path.read_text(encoding="utf-8"))
    if found is None:
        raise ValueError(f"{path}: the head has no line 'Counted as CLASS'")
    return config.model, found[1]


def spec_of(model: ModelConfig, kind: str) -> ModelSpec:
    """Return ``model`` with the heads of the class ``kind``."""
    flags = dict.fromkeys(FAMILIES[model.family].classes[kind], True)
    return ModelSpec(model=model, heads=HeadsConfig(**flags), family=model.family)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer_python", required=True)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    models = {path.stem: read_model(path) for path in sorted(MODELS.glob("*.yaml"))}
    with tempfile.TemporaryDirectory() as folder:
        jobs = {}
        for name, (model, kind) in models.items():
            file = Path(folder) / f"{name}.json"
            file.write_text(json.dumps(hf_config(spec_of(model, kind), "float32")))
            jobs[name] = (kind, str(file))
        (Path(folder) / "jobs").write_text(json.dumps(jobs))
        command = [
            arguments.peer_python,
            "-c",
            PEER,
            str(Path(folder) / "jobs"),
            str(REPOSITORY / "tests" / "golden"),
        ]
        done = subprocess.run(command, capture_output=True, text=True, cwd=folder, check=False)
        if done.returncode:
            raise SystemExit(done.stderr)
    answer = json.loads(done.stdout.splitlines()[-1])
    equal = True
    for name, (model, kind) in models.items():
        theirs = answer["counts"][name]
        count = sum(math.prod(shape) for shape in parameter_shapes(spec_of(model, kind)).values())
        equal &= count == theirs
        line = {"model": name, "class": kind, "parameters": count, "transformers": theirs, "equal": count == theirs}
        print(json.dumps(line), flush=True)
    if arguments.output:
        counts = {name: [kind, answer["counts"][name]] for name, (_, kind) in models.items()}
        arguments.output.write_text(json.dumps(counts, indent=1) + "\n")
    return 0 if equal else 3


if __name__ == "__main__":
    sys.exit(main())
