"""Arithmetic estimates of the memory and time of a training step, without a compiler.

Plans for GPUs use these estimates where the gpu extra is not installed. A search uses them to order its
candidates and to drop those that cannot fit, before it compiles any. Memory is a number of bytes; time is a number
of bytes or operations divided by a published rate:

* state: exact, from the shardings of parameters and optimizer state;
* activations kept for the backward pass: Korthikanti et al. 2022 (arXiv 2205.05198, section 4), per layer
  ``b s h (34 + 5 a s / h)`` bytes with 16-bit values (b sequences, s tokens per sequence, width h, a heads), less
  with recomputation;
* time: matrix products at 65% of the peak, elementwise operations and attention probabilities by the bytes that
  they read and write, random bits by integer operations, the optimizer by 28 bytes per parameter and device, and
  one reduction of the gradients per step, during which nothing is computed.
"""

import math
from collections.abc import Mapping

from bert_jax.config import ExecutionConfig, PretrainConfig
from bert_jax.contrib.planner.cycles import PARTS, collective_seconds
from bert_jax.contrib.planner.topology import Topology
from bert_jax.model import BertForPretraining
from bert_jax.model.canonical import canonical_shapes
from bert_jax.model.flops import training_flops
from bert_jax.model.kernels import gpu_attention, tpu_attention

# Fraction of the peak that all matrix products of a model reach on average (the largest ones reach 80% on an H200).
_PRODUCTS = 0.65
# A float32 product runs at half of the bf16 peak (TF32), or in several bf16 passes on a TPU.
_FLOAT32_PRODUCTS = 0.5
# Bytes that the fused elementwise operations of a layer read and write per token and unit of width (16-bit values).
_ELEMENTWISE = 117
# Bytes read and written per attention probability, not fused: scores, softmax, dropout and both products, forward
# and backward.
_PROBABILITY = 30
# Integer operations per 32 random bits.
_BIT_OPERATIONS = {"hash": 20, "threefry": 60, "rbg": 20}
# Fraction of the memory of a GPU that JAX reserves unless XLA_PYTHON_CLIENT_MEM_FRACTION is set.
GPU_MEMORY_SHARE = 0.75


def program_memory(topology: Topology) -> int:
    """Return the number of bytes that a program may use in the memory of one device."""
    chip = topology.chip
    return chip.device_program_bytes if topology.is_tpu else int(GPU_MEMORY_SHARE * chip.device_memory_bytes)


def step_temporary_bytes(config: PretrainConfig, topology: Topology, mesh_shape: Mapping[str, int]) -> int:
    """Return :func:`temporary_bytes` for the attention implementation that is used on ``topology``."""
    return temporary_bytes(config, mesh_shape, keeps_scores=_keeps_scores(config, topology, mesh_shape))


def _keeps_scores(config: PretrainConfig, topology: Topology, mesh_shape: Mapping[str, int]) -> bool:
    """Return True if attention probabilities are stored; the kernels do not store them."""
    kernel = tpu_attention if topology.is_tpu else gpu_attention
    can = not kernel.unsupported(config.model, config.data.seq_length, mesh_shape["tensor"])
    return config.execution.attention == "xla" or not can


def temporary_bytes(config: PretrainConfig, mesh_shape: Mapping[str, int], *, keeps_scores: bool = True) -> int:
    """Return the total bytes of gathered parameters, gradients, stored activations and logits on one device.

    ``keeps_scores``: True if attention probabilities are stored for the backward pass.
    """
    model, execution = config.model, config.execution
    rows = rows_per_device(config, mesh_shape)
    length, hidden, tensor = config.data.seq_length, model.hidden_size, mesh_shape["tensor"]
    item = 2 if execution.dtype == "bfloat16" else 4
    linear = {"none": 34, "attention": 34, "full": 2}[execution.remat] * item / 2
    square = (5 if execution.remat == "none" and keeps_scores else 0) * item / 2
    layers = model.num_layers * hidden * linear + sum(model.heads_by_layer) * length * square / tensor
    # All activations of one layer exist while its backward pass runs, with or without recomputation.
    scores = model.num_attention_heads * length * 5 / tensor * keeps_scores
    working = rows * length * (hidden * 34 + scores) * item / 2
    logits = rows * config.row_shape.max_predictions * model.vocab_size / tensor * (item + 2 * 4)
    gradients = 4 * parameter_count(config) / (mesh_shape["fsdp"] * tensor)
    gathered = gradients if config.mesh.shard_optimizer and mesh_shape["data"] > 1 else 0
    if config.training.accumulation_steps > 1:
        gradients *= 2  # the sum, and the gradients of the current microbatch
    return round(rows * length * layers + working + logits + gradients + gathered)


def rows_per_device(config: PretrainConfig, mesh_shape: Mapping[str, int]) -> float:
    """Return the number of sequences of a microbatch that one device processes."""
    training = config.training
    parts = mesh_shape["data"] * mesh_shape["fsdp"]
    return training.global_batch_size / training.accumulation_steps / parts


def parameter_count(config: PretrainConfig) -> int:
    """Return the number of parameters of the pretraining model, without padding of the vocabulary."""
    # Stacked layers are traced as one layer.
    model = BertForPretraining(config.model, ExecutionConfig(scan_layers=True, vocab_multiple=1), config.has_nsp)
    return sum(map(math.prod, canonical_shapes(model).values()))


def step_seconds(config: PretrainConfig, topology: Topology, mesh_shape: Mapping[str, int]) -> dict[str, float]:
    """Return the seconds that one device spends in each part (``cycles.PARTS``) of an optimizer step."""
    chip, model, execution, data = topology.chip, config.model, config.execution, config.data
    length, hidden, tensor = data.seq_length, model.hidden_size, mesh_shape["tensor"]
    sequences = rows_per_device(config, mesh_shape) * config.training.accumulation_steps
    item = 2 if execution.dtype == "bfloat16" else 4
    rate = chip.device_peak_flops * _PRODUCTS * (1 if item == 2 else _FLOAT32_PRODUCTS)
    memory = chip.device_memory_bandwidth

    predictions = config.row_shape.max_predictions
    flops = training_flops(model, seq_length=length, max_predictions=predictions, has_nsp=config.has_nsp)
    attention, head = (
        sum(count for scope, count in flops.items() if name in scope)
        for name in ("dot_product_attention", "mlm_head")
    )
    encoder = flops.total() - attention - head
    again = {"none": (1, 1), "attention": (1, 4 / 3), "full": (4 / 3, 4 / 3)}[execution.remat]
    probabilities = sum(model.heads_by_layer) * length**2
    elementwise = _ELEMENTWISE * item / 2 * model.num_layers * hidden * length / memory
    logits = predictions * model.vocab_size * (item + 4 * 4) / memory
    scores = _PROBABILITY * item / 2 * probabilities / memory / tensor * _keeps_scores(config, topology, mesh_shape)
    bits: float = length * hidden * (2 * model.num_layers + 1) * (model.hidden_dropout > 0)
    bits += probabilities / tensor * (model.attention_dropout > 0)
    # The vector units of a TPU compute integers at an unpublished rate; assume a sixtieth of the peak, as on an
    # H100.
    integers = chip.integer_tops * 1e12 or chip.device_peak_flops / 60
    parts = dict.fromkeys(PARTS, 0.0)
    parts["rest"] = sequences * again[0] * (encoder / tensor / rate + elementwise)
    parts["attention"] = sequences * again[1] * (attention / tensor / rate + scores)
    parts["mlm_head"] = sequences * (head / rate + logits) / tensor
    parts["dropout"] = sequences * again[0] * bits * _BIT_OPERATIONS[execution.prng] / integers
    local = parameter_count(config) / (mesh_shape["fsdp"] * tensor)
    shards = mesh_shape["data"] if config.mesh.shard_optimizer else 1
    # Each microbatch reads the parameters twice, writes gradients and adds them to the sum.
    parts["rest"] += config.training.accumulation_steps * 20 * local / memory
    parts["optimizer"] = (36 if config.optimizer.name == "lamb" else 28) * local / shards / memory
    parts["communication"] = _communication(config, topology, mesh_shape)
    return parts


def _communication(config: PretrainConfig, topology: Topology, mesh_shape: Mapping[str, int]) -> float:
    """Return the seconds that the collectives of a step take. Gradients are reduced over the replicas once per
    step; the collectives of the fsdp and tensor axes run in each microbatch."""
    count = parameter_count(config)
    data, fsdp, tensor = (mesh_shape[axis] for axis in ("data", "fsdp", "tensor"))
    local = count / (fsdp * tensor)
    item = 2 if config.execution.dtype == "bfloat16" else 4
    gradient = 2 if config.training.gradient_reduction_dtype == "bfloat16" else 4
    seconds = _exchange("reduce-scatter", local * gradient, data, fsdp * tensor, topology)
    seconds += _exchange("all-gather", local * 4 / data, data, fsdp * tensor, topology)
    # In each microbatch, partitioned parameters are gathered for the forward pass and again for the backward pass,
    # and float32 gradients are reduced and scattered once.
    passes = config.training.accumulation_steps
    whole = count / tensor
    seconds += passes * 2 * _exchange("all-gather", whole * item / fsdp, fsdp, tensor, topology)
    seconds += passes * _exchange("reduce-scatter", whole * 4, fsdp, tensor, topology)
    # Two all-reduces of activations per layer in the forward pass, and two in the backward pass.
    rows = rows_per_device(config, mesh_shape)
    activations = rows * config.data.seq_length * config.model.hidden_size * item
    seconds += passes * 4 * config.model.num_layers * _exchange("all-reduce", activations, tensor, 1, topology)
    return seconds


def _exchange(kind: str, num_bytes: float, size: int, stride: int, topology: Topology) -> float:
    """Return the seconds of a collective of ``size`` devices whose indices differ by multiples of ``stride``. Each
    device contributes ``num_bytes`` bytes."""
    if size == 1:
        return 0.0
    chip = topology.chip
    if topology.is_tpu:
        return collective_seconds(kind, round(num_bytes), size, chip, topology.shape)
    # GPUs: the boards of a host first exchange data over its links; then each board exchanges its share with the
    # other hosts.
    whole = num_bytes * size if kind == "all-gather" else num_bytes
    rounds = 2 if kind == "all-reduce" else 1
    inside = min(size, max(1, chip.chips_per_host // stride))
    hosts = math.ceil(size / inside)
    seconds = whole * (inside - 1) / inside / chip.link_bandwidth
    if hosts > 1:
        seconds += whole / inside * (hosts - 1) / hosts / (chip.network_gb_per_s * 1e9)
    return rounds * seconds
