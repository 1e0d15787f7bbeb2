"""An export format of one's own: GGUF, the file of llama.cpp (ggml-org/ggml, docs/gguf.md), for encoders of BERT.

    bert-jax export --model runs/quickstart --format gguf --to exported
    llama-embedding -m exported/model.gguf -p "a text"

An installed package offers it by the entry point ``gguf = gguf_format:FORMAT`` of the group ``bert_jax.formats``;
every command of bert-jax reads such files then. ``--dtype float16`` halves it.
"""

import struct

import numpy as np

from bert_jax.config import HeadsConfig, ModelConfig, ModelSpec, TokenizerConfig
from bert_jax.config.switches import ANY, SIZES
from bert_jax.interop.model_bundle import Format, ModelBundle, check_shapes, check_sizes, parameter_shapes
from bert_jax.tokenization import build_tokenizer

FILE, MAGIC, ALIGNMENT = "model.gguf", b"GGUF\3\0\0\0", 32
SUPPORTED = SIZES | {"norm_epsilon": ANY}
# Types of values, by the code of struct; the other numbers are those of GGUF.
CODES = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}
UINT32, INT32, FLOAT32, BOOL, STRING, ARRAY = 4, 5, 6, 7, 8, 9
STORED = {0: np.dtype("<f4"), 1: np.dtype("<f2")}
NORMAL, UNKNOWN, CONTROL, MEAN_POOLING = 1, 2, 3, 1
SPECIAL = {"bos": "cls", "eos": "sep", "seperator": "sep", "unknown": "unk", "padding": "pad", "mask": "mask"}
MODULES = {
    "embeddings/word_embeddings": "token_embd", "embeddings/token_type_embeddings": "token_types",
    "embeddings/position_embeddings": "position_embd", "embeddings/layer_norm": "token_embd_norm",
    "attention/query": "attn_q", "attention/key": "attn_k", "attention/value": "attn_v",
    "attention/output": "attn_output", "attention/layer_norm": "attn_output_norm",
    "feed_forward/intermediate": "ffn_up", "feed_forward/output": "ffn_down",
    "feed_forward/layer_norm": "layer_output_norm",
}  # fmt: skip
# Key of the file -> field of the network.
KEYS = {
    "bert.block_count": "num_layers", "bert.context_length": "max_position_embeddings",
    "bert.embedding_length": "hidden_size", "bert.feed_forward_length": "intermediate_size",
    "bert.attention.head_count": "num_attention_heads", "tokenizer.ggml.token_type_count": "type_vocab_size",
}  # fmt: skip


def stored_name(name):
    """Return the name of the tensor of a parameter, such as blk.0.attn_q.weight."""
    module, _, leaf = name.rpartition("/")
    layer = ""
    if module.startswith("encoder/layer_"):
        number, module = module.removeprefix("encoder/layer_").split("/", 1)
        layer = f"blk.{number}."
    return f"{layer}{MODULES[module]}.{'bias' if leaf == 'bias' else 'weight'}"


def their_piece(piece):
    """Return ``piece`` as llama.cpp has it: U+2581 begins a word, and nothing marks the continuation of one."""
    return piece if piece[:1] == "[" else piece[2:] if piece.startswith("##") else f"\u2581{piece}"


def our_piece(piece):
    return piece if piece[:1] == "[" else piece[1:] if piece[:1] == "\u2581" else f"##{piece}"


def packed(kind, value):
    """Return the bytes of a value; an array is (type of its values, values)."""
    if kind == STRING:
        return struct.pack("<Q", len(value.encode())) + value.encode()
    if kind == ARRAY:
        return struct.pack("<IQ", value[0], len(value[1])) + b"".join(packed(value[0], one) for one in value[1])
    return struct.pack(f"<{CODES[kind]}", value)


def metadata(spec, tokenizer):
    """Yield key, type and value of everything but the tensors."""
    model = spec.model
    yield "general.architecture", STRING, "bert"
    yield from ((key, UINT32, getattr(model, field)) for key, field in KEYS.items())
    yield "bert.attention.layer_norm_epsilon", FLOAT32, model.norm_epsilon
    yield "bert.attention.causal", BOOL, False
    yield "bert.pooling_type", UINT32, MEAN_POOLING
    yield "tokenizer.ggml.model", STRING, "bert"
    pieces = tokenizer.pieces(range(model.vocab_size))
    types = [CONTROL if is_special else NORMAL for is_special in tokenizer.special]
    types[tokenizer.unk_id] = UNKNOWN
    yield "tokenizer.ggml.tokens", ARRAY, (STRING, [their_piece(piece) for piece in pieces])
    yield "tokenizer.ggml.token_type", ARRAY, (INT32, types)
    for theirs, ours in SPECIAL.items():
        yield f"tokenizer.ggml.{theirs}_token_id", UINT32, getattr(tokenizer, f"{ours}_id")


def write_gguf(folder, weights, *, dtype="float32"):
    """Write model.gguf. Raises ``ValueError`` for a model whose texts llama.cpp would split into other pieces."""
    rules = weights.spec.tokenizer
    if rules is None or weights.tokenizer_content is None or not rules.file.endswith(".txt"):
        raise ValueError("gguf: the model has no vocab.txt; only models of WordPiece are written")
    if not (rules.lower_case and rules.strip_accents in (None, True) and rules.split_cjk and not rules.cjk_words):
        raise ValueError("gguf: llama.cpp lower-cases texts and splits CJK characters; the model does not")
    tokenizer = build_tokenizer(rules, weights.tokenizer_content, rules.file)
    for piece in tokenizer.pieces(range(tokenizer.vocab_size)):
        if our_piece(their_piece(piece)) != piece:
            raise ValueError(f"gguf: the piece {piece!r} of the vocabulary cannot be told from another one")
    check_shapes(weights.spec, weights.params, folder)
    values = list(metadata(weights.spec, tokenizer))
    names = list(parameter_shapes(weights.spec))
    head = [MAGIC, struct.pack("<QQ", len(names), len(values))]
    head += [packed(STRING, key) + packed(UINT32, kind) + packed(kind, value) for key, kind, value in values]
    offset, arrays = 0, []
    for name in names:
        # llama.cpp adds the other arrays to float32 values and refuses them in float16.
        kind = int(dtype == "float16" and name.endswith(("kernel", "word_embeddings/embedding")))
        array = weights.params[name].astype(dtype).astype(STORED[kind])
        arrays.append(array.T if name.endswith("kernel") else array)  # [outputs, inputs]
        sizes = arrays[-1].shape[::-1]
        place = struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, kind, offset)
        head.append(packed(STRING, stored_name(name)) + place)
        offset += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
    with (folder / FILE).open("wb") as file:
        for part in (b"".join(head), *arrays):
            file.write(part if isinstance(part, bytes) else part.tobytes())
            file.write(bytes(-file.tell() % ALIGNMENT))
    return [f"{FILE}: {len(names)} tensors; llama.cpp computes GELU with tanh"]


class Stream:
    """The head of a file, read from its begin."""

    def __init__(self, data):
        self.data, self.place = data, 0

    def take(self, form):
        found = struct.unpack_from(f"<{form}", self.data, self.place)
        self.place += struct.calcsize(f"<{form}")
        return found if len(found) > 1 else found[0]

    def value(self, kind):
        if kind == STRING:
            return self.take(f"{self.take('Q')}s").decode()
        if kind == ARRAY:
            inner, count = self.take("IQ")
            return [self.value(inner) for _ in range(count)]
        return self.take(CODES[kind])


def read_gguf(path, options):
    """Read model.gguf, or another GGUF file of BERT with values in float32 or float16. Raises ``ValueError``."""
    file = path / FILE if path.is_dir() else path
    try:
        return read_parts(file)
    except (struct.error, LookupError, TypeError, UnicodeDecodeError, RecursionError, MemoryError) as error:
        raise ValueError(f"{file}: not a whole GGUF file of BERT ({type(error).__name__}: {error})") from None


def read_parts(file):
    data = np.memmap(file, np.uint8, "r")
    stream = Stream(data)
    stream.place = len(MAGIC)
    tensors, count = stream.take("QQ")
    values = {stream.value(STRING): stream.value(stream.take("I")) for _ in range(count)}
    places = {}
    for _ in range(tensors):
        name, rank = stream.value(STRING), stream.take("I")
        sizes = [stream.take("Q") for _ in range(rank)]
        places[name] = tuple(sizes[::-1]), *stream.take("IQ")
    if values["general.architecture"] != "bert" or values["tokenizer.ggml.model"] != "bert":
        raise ValueError(f"{file}: not a model of BERT with WordPiece")
    pieces = values["tokenizer.ggml.tokens"]
    epsilon = float(str(np.float32(values["bert.attention.layer_norm_epsilon"])))
    sizes = {field: values[key] for key, field in KEYS.items()}
    spec = ModelSpec(
        model=ModelConfig(vocab_size=len(pieces), norm_epsilon=epsilon, **sizes), heads=HeadsConfig(),
        tokenizer=TokenizerConfig(),
    )  # fmt: skip
    check_sizes(spec, {name: shape for name, (shape, *_) in places.items()}, file)
    start, params = -(-stream.place // ALIGNMENT) * ALIGNMENT, {}
    for name in parameter_shapes(spec):
        shape, kind, offset = places[stored_name(name)]
        if kind not in STORED:
            raise ValueError(f"{file}: {stored_name(name)} is quantized; only float32 and float16 are read")
        array = np.ndarray(shape, STORED[kind], data, start + offset).astype(np.float32)
        params[name] = array.T.copy() if name.endswith("kernel") else array
    check_shapes(spec, params, file)
    content = "".join(f"{our_piece(piece)}\n" for piece in pieces).encode()
    return ModelBundle(
        spec=spec, params=params, tokenizer_content=content, origin={"format": "gguf", "name": file.absolute().stem}
    )


def is_gguf(path):
    file = path / FILE if path.is_dir() else path
    if not file.is_file():
        return False
    with file.open("rb") as stream:
        return stream.read(len(MAGIC)) == MAGIC


SNIPPET = 'import xllamacpp\n\nparams = xllamacpp.CommonParams()\nparams.model.path = "DIR/model.gguf"'
FORMAT = Format(
    "a GGUF file of BERT (model.gguf)", is_gguf, read_gguf, write_gguf, SUPPORTED, SNIPPET, ("float32", "float16")
)  # fmt: skip
