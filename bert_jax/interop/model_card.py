"""The ``README.md`` of an export: sizes, origin, metrics and outputs of the model, and code that loads it."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bert_jax import registry
from bert_jax.config import ModelSpec
from bert_jax.interop.hf.config_json import CONFIG_FILE
from bert_jax.interop.hf.families import FAMILIES
from bert_jax.interop.model_bundle import ModelBundle, parameter_shapes
from bert_jax.interop.programs.serving import output_names
from bert_jax.json_values import Json
from bert_jax.tokenization import build_tokenizer

_ACTIVATIONS = {
    "gelu": "x * Phi(x) with the error function (exact GELU)",
    "gelu_tanh": "the tanh approximation of GELU (google-research/bert's published code)",
    "gelu_sigmoid": "x * sigmoid(1.702 x), an approximation of GELU",
    "relu": "max(x, 0)",
    "silu": "x * sigmoid(x)",
}
_PROBLEMS = {
    "single_label": "softmax over the classes",
    "multi_label": "an independent sigmoid for each class",
    "regression": "the value itself",
}
_LIBRARIES = {"hf": "transformers", "sentence-transformers": "sentence-transformers", "onnx": "onnx"}
# Formats that contain a program; its outputs have names.
_PROGRAMS = ("onnx", "stablehlo")


@dataclass(frozen=True)
class Publication:
    """Facts of a model card that the model does not state. Raises ``ValueError`` for values that the Hugging Face
    Hub does not accept."""

    # Languages of the texts, by their ISO 639 codes.
    languages: tuple[str, ...] = ()
    # Identifier of the license on the Hub.
    license: str = ""
    # Name on the Hub, OWNER/NAME; empty: the examples of the card say "DIR".
    name: str = ""

    def __post_init__(self) -> None:
        for language in self.languages:
            if not re.fullmatch(r"[a-z]{2,3}(-[A-Za-z]+)?|multilingual|code", language):
                raise ValueError(f"--language: {language!r} is not allowed; allowed: codes of ISO 639, as en,zh")
        if not re.fullmatch(r"[a-z0-9.-]*", self.license):
            raise ValueError(f"--license: {self.license!r} is not allowed; allowed: identifiers, as apache-2.0")
        if self.name and not re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", self.name):
            raise ValueError(f"--push: {self.name!r} is not allowed; allowed: OWNER/NAME")


def architecture(folder: Path) -> str | None:
    """Return the first transformers class that the config.json of ``folder`` names; None if no class is named."""
    file = folder / CONFIG_FILE
    if not file.is_file():
        return None
    return next(iter(json.loads(file.read_text(encoding="utf-8")).get("architectures") or ()), None)


def model_card(
    weights: ModelBundle,
    format: str,
    dtype: str,
    architecture: str | None,
    notes: Sequence[str],
    publication: Publication | None = None,
    has_programs: bool = False,
) -> str:
    """Return the text of ``README.md`` as Markdown, including the ``notes`` of the writer.

    ``architecture`` is the transformers class in the config.json of the folder; None: no class is named.
    ``has_programs``: the folder has the programs of ``write_onnx_folder``.
    """
    spec, origin, publication = weights.spec, weights.origin, publication or Publication()
    pipeline = _pipeline(spec)
    loading = _loading(spec, format, architecture) + (_of_javascript(weights, pipeline) if has_programs else "")
    parts = [
        _front_matter(spec, format, pipeline, publication, has_programs),
        f"# {_one_line(origin.get('name') or _other(spec) or 'BERT encoder')}",
        _summary(spec, dtype),
        "## How to load it",
        loading.replace('"DIR"', f'"{publication.name}"') if publication.name else loading,
        "## Model",
        _table(_facts(spec, dtype)),
        "## Outputs",
        _bullets(_outputs(spec, format)),
        "## Data and training",
        _bullets(_training(origin)),
        "## Metrics",
        _metrics(origin),
    ]
    if notes:
        parts.append(_folded("Notes on the files", _bullets(notes)))
    if origin.get("recipe"):
        text = json.dumps(origin["recipe"], indent=1, ensure_ascii=False)
        parts.append(_folded("Configuration of the run", f"```json\n{text}\n```"))
    return "\n\n".join(part for part in parts if part) + "\n"


def _folded(title: str, text: str) -> str:
    return f"<details><summary>{title}</summary>\n\n{text}\n\n</details>"


def _pipeline(spec: ModelSpec) -> str:
    """Return the task of the model on the Hugging Face Hub."""
    heads = spec.heads.present()
    pipelines = {
        "sequence": "text-classification", "token": "token-classification", "span": "question-answering",
        "choice": "multiple-choice", "mlm": "fill-mask",
    }  # fmt: skip
    tag = "sentence-similarity" if spec.sentence is not None else "feature-extraction"
    return next((pipelines[head] for head in pipelines if head in heads), tag)


def _front_matter(spec: ModelSpec, format: str, pipeline: str, publication: Publication, has_programs: bool) -> str:
    lines = ["language:", *(f"- {one}" for one in publication.languages)] if publication.languages else []
    lines += [f"license: {publication.license}"] if publication.license else []
    lines += [f"library_name: {_LIBRARIES[format]}"] if format in _LIBRARIES else []
    tags = [spec.model.TAG or _other(spec) or spec.family, *(["onnx", "transformers.js"] if has_programs else [])]
    tags = [f"- {tag}" for tag in tags]
    return "\n".join(["---", *lines, f"pipeline_tag: {pipeline}", "tags:", *tags, "---"])


def _of_javascript(weights: ModelBundle, pipeline: str) -> str:
    """Return the example of transformers.js; empty if it has no such task or pooling."""
    sentence, arguments = weights.spec.sentence, {"question-answering": '"a question", "a text"'}
    given = arguments.get(pipeline, '"a text"')
    if pipeline == "fill-mask":
        given = json.dumps(f"a {_mask_of(weights)} text", ensure_ascii=False)
    if pipeline in ("sentence-similarity", "feature-extraction"):
        pipeline, poolings = "feature-extraction", ("mean",) if sentence is None else sentence.pooling
        has_dense = sentence is not None and any(module.kind == "dense" for module in sentence.modules)
        if has_dense or poolings not in (("mean",), ("cls",)):
            return ""
        given += f', {{ pooling: "{poolings[0]}", normalize: true }}'
    if pipeline == "multiple-choice":
        return ""
    code = [
        'import { pipeline } from "@huggingface/transformers";\n',
        f'const run = await pipeline("{pipeline}", "DIR", {{ dtype: "q8" }});  // fp32: onnx/model.onnx',
        f"console.log(await run({given}));",
    ]
    return "\n\nIn JavaScript:\n\n```js\n" + "\n".join(code) + "\n```"


def _mask_of(weights: ModelBundle) -> str:
    """Return the piece that masks a token in a text."""
    rules, content = weights.spec.tokenizer, weights.tokenizer_content
    if rules is None or content is None:
        return "[MASK]"
    tokenizer = build_tokenizer(rules, content, rules.file)
    return tokenizer.pieces([tokenizer.mask_id])[0]


def _other(spec: ModelSpec) -> str:
    """Return the name of an encoder outside the trunk; empty: the Transformer, whose families have names."""
    return "" if registry.is_of_trunk("encoders", spec.model.encoder) else spec.model.encoder


# Key of the origin -> change after training; the metrics describe the unchanged model.
_CHANGES = {"pruned": "pruned", "pieces": "trimmed", "factorized": "factorized"}


def _one_line(value: Json) -> str:
    return " ".join(str(value).split())[:200]


def _summary(spec: ModelSpec, dtype: str) -> str:
    model = spec.model
    count = sum(map(math.prod, parameter_shapes(spec).values()))
    heads = ", ".join([*spec.heads.present(), *(["sentence"] if spec.sentence is not None else [])])
    other = f"An encoder {_other(spec)}" if _other(spec) else ""
    kind = model.TITLE or other or f"A {FAMILIES[spec.family].title} encoder"
    return (f"{kind} of {model.num_layers} layers, " if model.num_layers else f"{kind}, ") + (
        f"width {model.hidden_size}, {count:,} parameters ({dtype}); heads: {heads or 'none'}."
    )


def _facts(spec: ModelSpec, dtype: str) -> list[tuple[str, str]]:
    model, tokenizer = spec.model, spec.tokenizer
    inputs = [
        ("vocabulary", f"{model.vocab_size}"),
        ("longest input", f"{spec.max_length} tokens, including special tokens"),
    ]
    if model.has_attention:
        facts = [
            ("layers", f"{model.num_layers}"),
            ("width, feed-forward width", f"{model.hidden_size}, {_sizes(model.units_by_layer)}"),
            ("attention heads", _sizes(model.heads_by_layer)),
            *inputs,
            ("activation", f"`{model.activation}`: {_ACTIVATIONS[model.activation]}"),
            (
                "LayerNorm" if model.norm == "layer_norm" else "RMSNorm",
                f"{model.norm_position}-norm, epsilon {model.norm_epsilon:g}",
            ),
        ]
    else:
        facts = [("layers", f"{model.num_layers}"), ("width", f"{model.hidden_size}"), *inputs]
    facts += [("positions", model.position_embeddings), ("stored as", dtype)]
    if spec.task is not None:
        facts.append(("task", f"{spec.task.kind}: inputs of at most {spec.task.max_length} tokens"))
    if tokenizer is not None:
        case = "WordPiece, uncased: " if tokenizer.lower_case else "WordPiece, cased: "
        facts.append(("tokenizer", f"{case if tokenizer.file.endswith('.txt') else ''}`{tokenizer.file}`"))
    return facts


def _sizes(of_layers: Sequence[int]) -> str:
    """Return the size of all layers, or the size of each layer."""
    return f"{of_layers[0]}" if len(set(of_layers)) == 1 else f"{', '.join(map(str, of_layers))} (by layer)"


def _outputs(spec: ModelSpec, format: str) -> list[str]:
    meanings = _meanings(spec)
    if format in _PROGRAMS:
        return [f"`{name}`: {meanings[field]}" for name, field in output_names(spec).items()]
    return [f"`{name}`: {text}" if name == "last_hidden_state" else text for name, text in meanings.items()]


def _meanings(spec: ModelSpec) -> dict[str, str]:
    """Return a dict from the name of each output of the model in :data:`serving.FIELDS` to its meaning."""
    heads, model = spec.heads, spec.model
    pooled = {"first": "first token", "last": "last token", "mean": "mean of the tokens"}[model.pooling]
    if (kind := model.pooler_activation(bool(heads.sequence_labels))) != "none":
        pooled = f"{kind}(dense({pooled}))"
    language = "next token" if model.is_causal else "masked language model"
    texts = {
        "pooler": {"pooler_output": f"pooled output: {pooled}"},
        "mlm": {"prediction_logits": f"{language}: logits over the vocabulary at every position"},
        "nsp": {
            "seq_relationship_logits": "sentence pair: two logits, 0 = the second text follows the first, 1 = it "
            "does not"
        },
        "rtd": {"rtd_logits": "replaced tokens: one score per token, positive for a token that was replaced"},
        "sequence": {"sequence_logits": f"classes ({_PROBLEMS[heads.problem]}): {_labels(heads.sequence_labels)}"},
        "token": {"token_logits": f"tags per token (softmax): {_labels(heads.token_labels)}"},
        "span": {
            "start_logits": "span: logits of the start of an answer, per token",
            "end_logits": "span: logits of the end of an answer, per token",
        },
        "choice": {"choice_logits": "choice: one score per choice, softmax over the choices of a question"},
    }
    meanings = {"last_hidden_state": "one vector per token"}
    for head in heads.present():
        meanings |= texts[head]
    if spec.sentence is not None:
        steps = [" and ".join(spec.sentence.pooling) + " pooling"]
        steps += [
            module.kind if module.kind == "normalize" else f"dense to {module.features}, {module.activation}"
            for module in spec.sentence.modules
        ]
        similarity = spec.sentence.similarity or "cosine"
        meanings["sentence_embedding"] = f"sentence vector: {', then '.join(steps)}; compared by {similarity}"
    return meanings


def _labels(labels: Sequence[str]) -> str:
    shown = ", ".join(f"{i} = {_one_line(label)}" for i, label in enumerate(labels[:50]))
    return shown if len(labels) <= 50 else f"{shown} and {len(labels) - 50} more"


def _training(origin: Mapping[str, Any]) -> list[str]:
    lines = [f"source: {_one_line(origin.get('format', 'not stated'))}"]
    if "class" in origin:
        lines.append(f"class: {_one_line(origin['class'])}")
    if "step" in origin:
        average = ", moving average of the parameters" if origin.get("moving_average") else ""
        lines.append(f"optimizer steps: {origin['step']}{average}")
    recipe = origin.get("recipe") or {}
    data, optimizer, training = (recipe.get(name) or {} for name in ("data", "optimizer", "training"))
    if "task" in recipe:
        files = ", ".join(map(_one_line, data.get("train") or ()))
        records = f" on {files}" if files else ""  # records from Python have no name
        start = origin.get("init_from") or "random weights"
        length = recipe["task"].get("max_length")
        lines.append(f"fine-tuned{records} from {_one_line(start)}; texts of at most {length} tokens")
    elif data:
        corpus = ", ".join(map(_one_line, data.get("corpus") or ())) or "shards"
        lines.append(
            f"data: {corpus}; length {data.get('seq_length')}, {data.get('mask_fraction')} of the tokens masked by "
            f"{data.get('mask_unit')}, sentence pairs: {data.get('next_sentence')}"
        )
    if optimizer and training:
        lines.append(
            f"optimizer: {optimizer.get('name')}, learning rate {optimizer.get('learning_rate')}, "
            f"{training.get('global_batch_size')} sequences per step"
        )
    if not recipe:
        lines.append("data and training: not stated by the source")
    return lines + [f"after training, {what}: {origin[key]}" for key, what in _CHANGES.items() if key in origin]


def _metrics(origin: Mapping[str, Any]) -> str:
    metrics = origin.get("metrics") or {}
    numbers = {key: value for key, value in metrics.items() if isinstance(value, int | float) and key != "step"}
    if not numbers:
        return "No metrics were recorded."
    when = [f"on held-out data at step {metrics['step']}"] if "step" in metrics else []
    changes = " and ".join(what for key, what in _CHANGES.items() if key in origin)
    when += [f"before the model was {changes}"] if changes else []
    words = ", ".join(when)
    return (f"{words[0].upper()}{words[1:]}:\n\n" if when else "") + _table(
        [(key, f"{value:.6g}") for key, value in sorted(numbers.items())]
    )


# Head -> class that loads the authors' code, for families that transformers does not have.
_AUTO = {"mlm": "AutoModelForMaskedLM", "sequence": "AutoModelForSequenceClassification"}
_CODE = ", trust_remote_code=True"


def _loading(spec: ModelSpec, format: str, architecture: str | None) -> str:
    if format == "hf":
        lacks_pooler = not spec.heads.pooler and FAMILIES[spec.family].classes.get(architecture or "") == (
            "pooler",
        )
        extra = ", add_pooling_layer=False" if lacks_pooler else ""
        kind = architecture
        if FAMILIES[spec.family].code:
            kind, extra = (
                next((auto for head, auto in _AUTO.items() if head in spec.heads.present()), "AutoModel"),
                _CODE,
            )
        code = (
            f"from transformers import AutoTokenizer, {kind}\n\n"
            'tokenizer = AutoTokenizer.from_pretrained("DIR")\n'
            f'model = {kind}.from_pretrained("DIR"{extra})'
        )
        if not spec.heads.choice:  # its inputs have one more dimension
            code += '\noutputs = model(**tokenizer("a text", return_tensors="pt"))'
    else:
        code = _SNIPPETS[format] if format in _SNIPPETS else registry.load("formats", format).snippet
        if format == "sentence-transformers" and FAMILIES[spec.family].code:
            code = code.replace('"DIR")', f'"DIR"{_CODE})')
    here = '\n\nWith bert_jax: `bert_jax.load("DIR")`.' if is_read_back(format) else ""
    return f"```python\n{code}\n```{here}"


# Formats of the trunk that this library reads back with bitwise equal parameters.
READ_BACK = ("hf", "sentence-transformers", "tf1", "npz")


def is_read_back(format: str) -> bool:
    """Return True if this library reads ``format`` back with bitwise equal parameters. Formats outside the trunk
    are read back."""
    return format in READ_BACK or format in registry.names("formats")


_SNIPPETS = {
    "sentence-transformers": (
        "from sentence_transformers import SentenceTransformer\n\n"
        'embeddings = SentenceTransformer("DIR").encode(["a text", "another"])'
    ),
    "tf1": (
        "import tensorflow as tf\n\n"
        'reader = tf.train.load_checkpoint("DIR/bert_model.ckpt")\n'
        'reader.get_tensor("bert/embeddings/word_embeddings")\n\n'
        "# google-research/bert's programs: --init_checkpoint=DIR/bert_model.ckpt\n"
        "#   --bert_config_file=DIR/bert_config.json --vocab_file=DIR/vocab.txt"
    ),
    "onnx": (
        "import onnxruntime\n\n"
        'session = onnxruntime.InferenceSession("DIR/model.onnx")\n'
        "# int64 [batch, sequence]\n"
        'session.run(None, {"input_ids": ids, "attention_mask": mask, "token_type_ids": types})'
    ),
    "stablehlo": (
        "import jax\nimport jax.export\nfrom pathlib import Path\nfrom safetensors.numpy import load_file\n\n"
        'program = jax.export.deserialize(bytearray(Path("DIR/program.bin").read_bytes()))\n'
        'weights = load_file("DIR/weights.safetensors")\n'
        "# int32 [batch, sequence]; returns arrays by name, see signature.json\n"
        "outputs = jax.jit(program.call)(weights, input_ids, attention_mask, token_type_ids)"
    ),
    "npz": (
        "import json\nimport numpy as np\n\n"
        'arrays = np.load("DIR/weights.npz", allow_pickle=False)\n'
        'dtypes = json.load(open("DIR/dtypes.json"))\n\n'
        "def values(name):  # kernels are [in, out]\n"
        "    stored = arrays[name]\n"
        '    if dtypes[name] == "bfloat16":  # the upper 16 bits of a float32\n'
        "        stored = (stored.astype(np.uint32) << 16).view(np.float32)\n"
        "    return stored"
    ),
}


def _bullets(lines: Sequence[str]) -> str:
    return "\n".join(f"- {' '.join(line.split())}" for line in lines)


def _table(rows: Sequence[tuple[str, str]]) -> str:
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)])
