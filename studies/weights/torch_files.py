"""Files of torch.save, read without torch, against torch: every bit, time and memory.

    python studies/weights/torch_files.py --peer_python PYTHON [--megabytes 440] [--times 3] [--folder DIR]

The Python of --peer_python has torch. It writes files in both formats (since torch 1.6, and before): all dtypes,
views, tied tensors, parameters, state dicts of modules, pickle protocols 2, 4 and 5, and objects that are not
tensors; and beside each file the bytes of its tensors as torch itself loads them. Every tensor read here must have
the same bytes. It also writes Hugging Face folders, whole and sharded (those in the older format without model_type
and architectures in config.json), whose parameters must be those of the safetensors file. Then a state dict of
--megabytes, tensors of BERT-base's sizes, is read by each side in turns, in processes of their own: seconds to the
last array in memory, with the file in the page cache, and peak memory above that of the imports. Prints one JSON
object per line.
Exit code 3 if a bit differs, if a file that torch reads is refused or one with other objects is read, if reading
takes more than SLOWEST times as long as ``torch.load``, or if memory exceeds MOST_MEMORY times the tensors.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from bert_jax.process.accelerators import keep_to_cpu_without_accelerator

SLOWEST, MOST_MEMORY = 1.5, 1.1

WRITE = """
import collections, json, pathlib, sys, torch
folder, megabytes = pathlib.Path(sys.argv[1]), float(sys.argv[2])
torch.manual_seed(0)
floats = torch.float64, torch.float32, torch.float16, torch.bfloat16
whole = torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool
dtypes = {str(d): torch.randn(3, 5).to(d) for d in floats}
dtypes |= {str(d): torch.randint(0, 2, (3, 5)).to(d) for d in whole}
base = torch.randn(6, 8, 4)
view = base[1:5]
views = dict(
    base=base, transposed=base.mT, permuted=base.permute(2, 0, 1), sliced=base[1:4, ::2, 1:3], column=base[..., 2],
    element=base[3, 2, 1], tied=base, expanded=torch.arange(7)[None], rows=torch.arange(7).expand(4, 7),
    diagonal=base[0].diagonal(), empty=torch.zeros(0, 4), scalar=torch.tensor(2.5), half=base.half().mT,
    view_of=view[2], unfolded=torch.arange(9).unfold(0, 3, 2), odd=base[:, :1], flipped=base.flip(0),
)
layer = torch.nn.TransformerEncoderLayer(16, 2, 24)
states = dict(dtypes=dtypes, views=views, module=layer.state_dict(), parameters=dict(layer.named_parameters()),
              nothing={}, metadata=torch.nn.BatchNorm1d(3).state_dict(), ordered=collections.OrderedDict(a=base))
others = dict(nested={"state_dict": states["module"], "epoch": 1}, number={"a": 3}, list=[base], tensor=base,
              model=layer, optimizer=torch.optim.Adam(layer.parameters()).state_dict(), size={"a": base.shape},
              sparse={"a": torch.eye(3).to_sparse()}, complex={"a": torch.randn(2, dtype=torch.complex64)},
              conj={"a": torch.randn(2, dtype=torch.complex64).conj()}, dtype={"a": torch.float32},
              unsigned={"a": torch.zeros(2, dtype=torch.uint16)}, meta={"a": torch.empty(2, device="meta")},
              quantized={"a": torch.quantize_per_tensor(base, 0.1, 0, torch.qint8)})
def bits(tensor):
    tensor = tensor.detach().contiguous()
    return bytes(tensor.reshape(-1).view(torch.uint8).numpy()) if tensor.numel() else b""
def save(name, state, zip_format, protocol=2):
    torch.save(state, folder / name, _use_new_zipfile_serialization=zip_format, pickle_protocol=protocol)
for zip_format in (True, False):
    form = "zip" if zip_format else "old"
    for name, state in states.items():
        for protocol in (2, 4, 5):
            save(f"{name}-{form}-{protocol}.bin", state, zip_format, protocol)
            loaded = torch.load(folder / f"{name}-{form}-{protocol}.bin", weights_only=False)
            entries = {}
            with open(folder / f"{name}-{form}-{protocol}.bits", "wb") as out:
                for key, value in loaded.items():
                    entries[key] = [str(value.dtype)[6:], list(value.shape), out.tell()]
                    out.write(bits(value))
            (folder / f"{name}-{form}-{protocol}.json").write_text(json.dumps(entries))
    for name, value in others.items():
        try:
            save(f"other-{name}-{form}.bin", value, zip_format)
        except Exception as error:
            print(f"torch does not save {name} ({form}): {type(error).__name__}", file=sys.stderr)
torch.serialization.set_crc32_options(False)
save("ordered-zip-2.bin", states["ordered"], True)
large, layers = {}, 0
while sum(t.nbytes for t in large.values()) < megabytes * 1e6:
    shapes = {"word": (30522, 768)} if not layers else {f"{layers}.{i}": (768, 768) for i in range(4)} | {
        f"{layers}.in": (3072, 768), f"{layers}.out": (768, 3072), f"{layers}.bias": (768,)}
    large |= {name: torch.randn(shape) for name, shape in shapes.items()}
    layers += 1
save("large-zip.bin", large, True)
save("large-old.bin", large, False)
print(torch.__version__)
"""
FOLDERS = """
import json, pathlib, sys, torch, transformers
folder = pathlib.Path(sys.argv[1])
config = dict(vocab_size=99, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=48)
for kind in ("Bert", "Roberta"):
    cls = getattr(transformers, f"{kind}ForMaskedLM")
    model = cls(getattr(transformers, f"{kind}Config")(**config)).eval()
    model.save_pretrained(folder / kind)
    state = model.state_dict()
    for form in ("zip", "old"):
        for shards in (1, 3):
            target = folder / f"{kind}-{form}-{shards}"
            target.mkdir()
            stated = json.loads((folder / kind / "config.json").read_text())
            if form == "old":
                del stated["model_type"], stated["architectures"]
            (target / "config.json").write_text(json.dumps(stated))
            names, places = [*state], {}
            for shard in range(shards):
                file = "pytorch_model.bin" if shards == 1 else f"pytorch_model-{shard + 1:05d}-of-{shards:05d}.bin"
                part = {name: state[name] for name in names[shard::shards]}
                torch.save(part, target / file, _use_new_zipfile_serialization=form == "zip")
                places |= dict.fromkeys(part, file)
            if shards > 1:
                (target / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": places}))
"""
READ = {
    "ours": """
import sys, time
from pathlib import Path
from bert_jax.io.torch_file import read_torch
def load(file): return [tensor.read() for tensor in read_torch(Path(file)).values()]
""",
    "torch": """
import sys, time, torch
def load(file): return list(torch.load(file, map_location="cpu", weights_only=True).values())
""",
}
TIMED = """
def status(name):
    return int(open("/proc/self/status").read().split(name + ":")[1].split()[0]) * 1024
before = status("VmRSS")
began = time.perf_counter()
kept = load(sys.argv[1])
seconds = time.perf_counter() - began
print(seconds, status("VmHWM") - before, sum(x.nbytes for x in kept))
"""


def compare(folder: Path) -> dict[str, Any]:
    """Read every file; return the numbers of files and tensors, and descriptions of the differences."""
    from bert_jax.io.torch_file import read_torch

    files = tensors = refused = 0
    wrong = []
    for listing in sorted(folder.glob("*.json")):
        file, expected = listing.with_suffix(".bin"), json.loads(listing.read_text())
        content = listing.with_suffix(".bits").read_bytes()
        try:
            read = read_torch(file)
        except ValueError as error:
            wrong.append(str(error))
            continue
        files += 1
        if [*read] != [*expected]:
            wrong.append(f"{file.name}: other names")
            continue
        for name, (dtype, shape, begin) in expected.items():
            values = read[name].read()
            tensors += 1
            data = values.tobytes()
            if (values.dtype.name, [*values.shape]) != (dtype, shape) or data != content[begin : begin + len(data)]:
                wrong.append(f"{file.name}: {name}: {values.dtype.name} {values.shape}, expected {dtype} {shape}")
    for file in sorted(folder.glob("other-*.bin")):
        try:
            read_torch(file)
            wrong.append(f"{file.name}: read, although it contains other objects")
        except ValueError:
            refused += 1
    return {"files": files, "tensors": tensors, "other objects refused": refused, "wrong": wrong}


def compare_folders(folder: Path) -> dict[str, Any]:
    """Read Hugging Face folders; return their number and those whose parameters differ from safetensors."""
    from bert_jax.interop.readers import read_weights
    from bert_jax.interop.verification import fingerprints

    wrong, count = [], 0
    for path in sorted(path for path in folder.iterdir() if "-" in path.name):
        count += 1
        original = fingerprints(read_weights(folder / path.name.split("-")[0]))
        if fingerprints(read_weights(path)) != original:
            wrong.append(path.name)
    return {"folders": count, "wrong": wrong}


def timed(python: str, kind: str, file: Path) -> list[float]:
    """Return the seconds, the peak memory and the bytes of the tensors of one process that reads ``file``."""
    command = [python, "-c", READ[kind] + TIMED, str(file)]
    return [float(word) for word in subprocess.run(command, check=True, capture_output=True).stdout.split()]


def main() -> int:
    """Write, compare and time."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peer_python", required=True, help="Python with torch and transformers")
    parser.add_argument("--megabytes", type=float, default=440)
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where the files are written (default: the temporary folder)")
    arguments = parser.parse_args()
    keep_to_cpu_without_accelerator()
    passed = True
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        folder = Path(name)
        command = [arguments.peer_python, "-c", WRITE, name, str(arguments.megabytes)]
        version = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()
        result = compare(folder)
        passed &= not result["wrong"]
        print(json.dumps({"part": "files", "torch": version, **result}), flush=True)
        (folder / "folders").mkdir()
        command = [arguments.peer_python, "-c", FOLDERS, str(folder / "folders")]
        subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
        result = compare_folders(folder / "folders")
        passed &= not result["wrong"]
        print(json.dumps({"part": "folders", **result}), flush=True)
        for form in ("zip", "old"):
            runs: dict[str, list[list[float]]] = {"ours": [], "torch": []}
            for _ in range(arguments.times):
                for kind, python in (("ours", sys.executable), ("torch", arguments.peer_python)):
                    runs[kind].append(timed(python, kind, folder / f"large-{form}.bin"))
            seconds = {kind: statistics.median(run[0] for run in each) for kind, each in runs.items()}
            memory = {kind: max(run[1] / run[2] for run in each) for kind, each in runs.items()}
            passed &= seconds["ours"] <= SLOWEST * seconds["torch"] and memory["ours"] <= MOST_MEMORY
            size = round(runs["ours"][0][2] / 1e6)
            figures = {"megabytes": size, "seconds": seconds, "peak memory / tensors": memory}
            print(json.dumps({"part": form} | figures), flush=True)
    return 0 if passed else 3


if __name__ == "__main__":
    sys.exit(main())
