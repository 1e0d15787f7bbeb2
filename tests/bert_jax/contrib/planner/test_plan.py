"""bert-jax plan: names of slices, arithmetic, tables, the search."""

import dataclasses
from pathlib import Path

import pytest

from bert_jax.config import PretrainConfig, load_config
from bert_jax.config.architecture import ModelConfig
from bert_jax.config.pretrain import DataConfig
from bert_jax.config.schema import ExecutionConfig, MeshConfig, TrainingConfig
from bert_jax.contrib.planner import layout_search as search_module
from bert_jax.contrib.planner.arithmetic import parameter_count, temporary_bytes
from bert_jax.contrib.planner.compiled import CompiledStep, needed_bytes
from bert_jax.contrib.planner.plan import Asked, arithmetic_plan, full_steps, make_plan, plan_compiled
from bert_jax.contrib.planner.plan_text import pareto
from bert_jax.contrib.planner.sharding_table import abstract_mesh, abstract_train_state, sharding_table
from bert_jax.contrib.planner.topology import parse_topology
from bert_jax.objectives.registry import objective_class
from bert_jax.parallel.hardware import TPUS
from bert_jax.parallel.mesh import mesh_sizes
from bert_jax.training.memory import device_bytes

CONFIGS = Path(__file__).resolve().parents[4] / "configs"
LARGE = ModelConfig(hidden_size=1024, num_layers=24, num_attention_heads=16, intermediate_size=4096)


@pytest.fixture(autouse=True)
def arithmetic(monkeypatch):
    """Plans for GPUs by arithmetic, also where the extra gpu is installed."""
    monkeypatch.setattr("bert_jax.contrib.planner.plan.can_compile", lambda: False)


# ------------------------------------------------------------------ names of slices


@pytest.mark.parametrize(
    ("text", "name", "chips", "devices", "hosts"),
    [
        ("v5e:16x16", "v5e:16x16", 256, 256, 64),
        ("v5e-256", "v5e:16x16", 256, 256, 64),
        ("v5litepod-8", "v5e:2x4", 8, 8, 2),
        ("v5e:1x1", "v5e:1x1", 1, 1, 1),
        ("v6e-16", "v6e:4x4", 16, 16, 4),
        # Cloud counts the cores of these, two per chip.
        ("v4-8", "v4:2x2x1", 4, 4, 1),
        ("v4-512", "v4:4x8x8", 256, 256, 64),
        ("v5p-384", "v5p:4x4x12", 192, 192, 48),
        ("tpu7x-128", "tpu7x:4x4x4", 64, 128, 16),
        ("v3-32", "v3:4x4", 16, 32, 4),
        ("H100:8", "h100:8", 8, 8, 1),
        ("a100-40gb:64", "a100-40gb:64", 64, 64, 8),
    ],
)
def test_names(text, name, chips, devices, hosts):
    topology = parse_topology(text)
    assert (topology.name, topology.num_chips, topology.num_devices, topology.num_hosts) == (
        name, chips, devices, hosts,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("v99:2x2", "v5e-256"),
        ("v5e", "chips per axis"),
        ("v5e:0x4", "allowed: TPU: v2"),
        ("v5e:32x32", "the largest slice of v5e has 16x16 chips"),
        ("v5e-1099511627776", "the largest slice of v5e has 16x16 chips"),  # at once
        ("v5p:4x4", "v5p has 3 axes"),
        ("v5e-12", "the number counts chips"),
        ("v4-7", "the number counts cores, two per chip"),
        ("h100:9", "use a multiple of 8 boards"),
    ],
)
def test_names_that_are_none(text, says):
    with pytest.raises(ValueError, match=says) as error:
        parse_topology(text)
    assert repr(text) in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "rings"),
    [
        ("v5e:16x16", (True, True)),
        ("v5e:8x16", (False, True)),
        ("v5e:8x8", (False, False)),
        ("v5p:4x4x8", (True, True, True)),
        ("v5p:2x2x2", (False, False, False)),
        ("v3:32x32", (True, True)),
    ],
)
def test_which_axes_close_to_rings(name, rings):
    assert parse_topology(name).wraps == rings


def test_clocks_follow_from_the_peaks():
    """The published peak is the clock times the matrix units' operations per cycle."""
    per_cycle = {"TPU v3": 4, "TPU v4": 8, "TPU v5e": 4, "TPU v5p": 8, "TPU v6e": 16, "TPU7x": 32}
    for kind, units in per_cycle.items():
        chip = TPUS[kind]
        peak = units * 2 * 128 * 128 * chip.clock_ghz * 1e9
        assert peak == pytest.approx(chip.peak_tflops * 1e12, rel=0.01), kind


# ------------------------------------------------------------------ memory and time by arithmetic


@pytest.mark.slow
@pytest.mark.parametrize("model", [ModelConfig(), LARGE])
def test_parameter_count_is_the_models(model):
    config = PretrainConfig(model=model, execution=ExecutionConfig(vocab_multiple=1))
    state = abstract_train_state(config, abstract_mesh({"data": 1, "fsdp": 1, "tensor": 1}))
    assert device_bytes(state.params) == 4 * parameter_count(config)


@pytest.mark.slow
def test_state_of_a_large_model_under_fsdp_and_zero_1():
    """Bytes per device are the arithmetic's: three float32 copies, cut over 8 devices where they may be."""
    copy = 4 * parameter_count(PretrainConfig(model=LARGE))
    fsdp = PretrainConfig(model=LARGE, mesh=MeshConfig(fsdp=8))
    zero = PretrainConfig(model=LARGE, mesh=MeshConfig(data=8))
    whole = PretrainConfig(model=LARGE, mesh=MeshConfig(data=8, shard_optimizer=False))

    def held(config):
        return device_bytes(abstract_train_state(config, abstract_mesh(mesh_sizes(config.mesh, 8))))

    assert held(whole) == pytest.approx(3 * copy, rel=0.01)
    assert held(fsdp) == pytest.approx(3 * copy / 8, rel=0.1)
    assert held(zero) == pytest.approx(3 * copy / 8, rel=0.1)


def test_kept_activations_follow_the_published_formula():
    mesh = {"data": 1, "fsdp": 1, "tensor": 1}
    config = PretrainConfig(
        execution=ExecutionConfig(dtype="bfloat16"), training=TrainingConfig(global_batch_size=64)
    )

    def one_layer(remat):
        layers = [
            temporary_bytes(
                dataclasses.replace(
                    config,
                    model=dataclasses.replace(config.model, num_layers=n),
                    execution=dataclasses.replace(config.execution, remat=remat),
                ),
                mesh,
            )
            for n in (1, 2)
        ]
        parameters = 4 * (768 * 768 * 4 + 4 * 768 + 2 * 768 * 3072 + 3072 + 768 + 4 * 768)
        return layers[1] - layers[0] - parameters

    b, s, h, a = 64, 128, 768, 12
    assert one_layer("none") == pytest.approx(s * b * h * (34 + 5 * a * s / h), rel=1e-6)
    assert one_layer("attention") == pytest.approx(s * b * h * 34, rel=1e-6)
    assert one_layer("full") == pytest.approx(s * b * h * 2, rel=1e-6)


def plan_for(name, **sections):
    config = PretrainConfig(execution=ExecutionConfig(dtype="bfloat16"), **sections)
    return make_plan(config, parse_topology(name), Asked(price_per_chip_hour=2.0))


def test_gpu_plan_adds_up():
    plan = plan_for("h100:8", training=TrainingConfig(num_steps=1000, global_batch_size=512))
    assert plan.method == "arithmetic"
    assert plan.fits
    assert plan.tokens_per_second == pytest.approx(512 * 128 / plan.predicted_step_seconds)
    assert plan.predicted_mfu == pytest.approx(plan.sequences_per_second * 69.93e9 / (8 * 989e12), rel=1e-3)
    assert plan.hours == pytest.approx(1000 * plan.predicted_step_seconds / 3600)
    assert plan.chip_hours == pytest.approx(8 * plan.hours)
    assert plan.cost == pytest.approx(2 * plan.chip_hours)
    assert sum(plan.shares.values()) == pytest.approx(1)
    assert plan.shares["communication"] * plan.predicted_step_seconds == pytest.approx(plan.communication_seconds)


@pytest.mark.slow
def test_gpu_plan_knows_what_costs():
    """Faster boards, fewer hosts, bfloat16 and less recomputation are faster; no product beats the peak."""

    def seconds(name="h100:8", dtype="bfloat16", remat="none", **data):
        execution = ExecutionConfig(dtype=dtype, remat=remat)
        config = PretrainConfig(execution=execution, training=TrainingConfig(global_batch_size=1024))
        return arithmetic_plan(config, parse_topology(name), Asked()).predicted_step_seconds

    base = seconds()
    assert seconds("b200:8") < seconds("h200:8") < base < seconds("a100:8")
    assert seconds(dtype="float32") > 1.5 * base
    assert base < seconds(remat="attention") < seconds(remat="full") < 1.5 * base
    plans = [plan_for(name, training=TrainingConfig(global_batch_size=1024)) for name in ("h100:8", "h100:64")]
    assert plans[0].shares["communication"] < 0.3 < plans[1].shares["communication"]
    assert [any("is communication" in line for line in plan.warnings) for plan in plans] == [False, True]
    assert all(0.05 < plan.predicted_mfu < 0.8 for plan in plans)


@pytest.mark.parametrize(("boards", "microbatches", "published"), [(1, 512, 580), (8, 64, 4591), (256, 2, 138_294)])
def test_gpu_plan_against_published_rates(boards, microbatches, published):
    """Sequences/s of BERT-large at length 128 on A100 80 GB that NVIDIA publishes for its own code."""
    words = ["--config", str(CONFIGS / "bert_large_lamb.yaml"), "--execution.prng", "rbg"]
    config = load_config(PretrainConfig, [*words, "--training.accumulation_steps", str(microbatches)])
    plan = make_plan(config, parse_topology(f"a100:{boards}"), Asked())
    assert plan.sequences_per_second == pytest.approx(published, rel=1 / 3)


def test_step_that_does_not_fit_has_no_time():
    plan = plan_for("a100-40gb:1", training=TrainingConfig(global_batch_size=4096))
    assert not plan.fits
    assert plan.peak_bytes > plan.hbm_bytes
    assert plan.predicted_step_seconds is None
    assert plan.cost is None


def test_ramp_and_earlier_phases_shorten_the_recipe():
    training = TrainingConfig(num_steps=100, global_batch_size=64, batch_ramp=(20, 16))
    config = PretrainConfig(training=training)
    assert full_steps(config, 0) == 20 * 16 / 64 + 80
    assert full_steps(config, 60) == 20 * 16 / 64 + 20
    with pytest.raises(ValueError, match="--first_step: 100 is not allowed; use 0 to 99"):
        full_steps(config, 100)


@pytest.mark.parametrize(
    ("batch", "accumulation", "says"),
    [
        (100, 1, "global_batch_size: 100 .* 8 parts .* 96 or 104"),
        (48, 4, "in 4 microbatches .* 32 or 64, or training.accumulation_steps 3"),
        (4, 1, "use 8,"),
    ],
)
def test_batches_that_would_do(batch, accumulation, says):
    training = TrainingConfig(global_batch_size=batch, accumulation_steps=accumulation)
    with pytest.raises(ValueError, match=says):
        plan_for("h100:8", training=training)


# ------------------------------------------------------------------ compiled steps


@pytest.mark.parametrize(
    ("message", "needed"),
    [
        (
            "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries (47.25G) "
            "exceeds available HBM (15.75G).",
            (round(47.25 * 2**30), True),
        ),
        ("RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Used 17.5G of 15.75G hbm.", (35 * 2**29, False)),
        ("RESOURCE_EXHAUSTED: too many files", None),
        ("INTERNAL: Used 17.5G of 15.75G hbm", None),
    ],
)
def test_what_a_program_lacks(message, needed):
    assert needed_bytes(message) == needed


def compiled(seconds, peak=2**30, hbm=2**34):
    """A step whose program is one instruction of the given length on a v5e."""
    cycles = round(seconds * 1.5e9)
    hlo = (
        "HloModule step, is_scheduled=true\n\nENTRY %main (p: f32[8]) -> f32[8] {\n"
        "  %p = f32[8]{0} parameter(0)\n"
        '  ROOT %n = f32[8]{0} negate(f32[8]{0} %p), metadata={op_name="jit(step)/optimizer/neg"}, '
        f'backend_config={{"window_config":{{}},"estimated_cycles":"{cycles}"}}\n}}\n'
    )
    sizes = {"data": 4, "fsdp": 1, "tensor": 1}
    return CompiledStep(peak // 2, peak // 2, peak // 2, peak, hbm, 1.0, hlo if peak <= hbm else "", sizes)


def test_plan_of_a_compiled_step():
    config = PretrainConfig(training=TrainingConfig(num_steps=3600, global_batch_size=64))
    plan = plan_compiled(config, parse_topology("v5e:2x2"), Asked(price_per_chip_hour=0.5), compiled(0.02))
    assert plan.fits
    assert plan.predicted_step_seconds == pytest.approx(0.02)
    assert plan.predicted_mfu == pytest.approx(64 * 69.93e9 / 0.02 / (4 * 197e12), rel=1e-3)
    assert plan.chip_hours == pytest.approx(0.08)
    assert plan.cost == pytest.approx(0.04)
    assert plan.shares["optimizer"] == pytest.approx(1)
    assert not any("prng" in line for line in plan.warnings)
    config = dataclasses.replace(config, execution=ExecutionConfig(prng="threefry"))
    drawn = dataclasses.replace(compiled(0.02), hlo=compiled(0.02).hlo.replace("optimizer/neg", "random_bits"))
    plan = plan_compiled(config, parse_topology("v5e:2x2"), Asked(), drawn)
    assert any("dropout takes 100% of the step; execution.prng hash" in line for line in plan.warnings)

    data = DataConfig(packing="best_fit", sequences_per_row=20)
    for unit, told in (("sequences", True), ("rows", False)):
        training = TrainingConfig(num_steps=3600, global_batch_size=64, batch_unit=unit)
        packed = dataclasses.replace(config, data=data, training=training)
        plan = plan_compiled(packed, parse_topology("v5e:2x2"), Asked(), compiled(0.02))
        assert any("data.packing: the plan computes rows of one sequence" in line for line in plan.warnings) == told
        shapes = objective_class(packed.objective)(packed, None).batch_shapes(64)
        sequences, predictions = (1, 20) if told else (20, data.most_predictions(20))
        assert shapes["cls_positions"].shape == (64, sequences)
        assert shapes["mlm_positions"].shape == (64, predictions)

    too_large = plan_compiled(config, parse_topology("v5e:2x2"), Asked(), compiled(0.02, peak=2**35))
    assert not too_large.fits
    assert too_large.predicted_step_seconds is None


# ------------------------------------------------------------------ sharding table


def rows_of(*, layers=2, scan=False, mesh=None, devices=8, **model):
    config = PretrainConfig(
        model=ModelConfig(num_layers=layers, **model),
        execution=ExecutionConfig(scan_layers=scan),
        mesh=mesh or MeshConfig(),
    )
    return {row.name: row for row in sharding_table(config, mesh_sizes(config.mesh, devices))}


@pytest.mark.parametrize("scan", [False, True])
def test_table_of_canonical_parameters(scan):
    rows = rows_of(scan=scan, mesh=MeshConfig(fsdp=4, tensor=2))
    kernel = rows["encoder/layer_*/attention/query/kernel"]
    assert (kernel.shape, kernel.count) == ((768, 768), 2)
    assert kernel.sharding == "(fsdp, tensor)"
    assert kernel.device_bytes == 2 * 4 * 768 * 768 / 8
    assert kernel.optimizer_device_bytes == 2 * kernel.device_bytes
    words = rows["embeddings/word_embeddings/embedding"]
    assert words.shape == (30522, 768)
    assert words.device_bytes == 4 * 30592 * 768 / 8  # padded in memory
    assert not any(row.notes for row in rows.values())


def test_table_says_what_fell_back():
    rows = rows_of(mesh=MeshConfig(fsdp=8), hidden_size=60)
    words = rows["embeddings/word_embeddings/embedding"]
    assert words.sharding == "(fsdp, -)"
    assert words.notes == ("fsdp 8 does not divide embed 60: vocab is partitioned instead",)
    query = rows["encoder/layer_*/attention/query/kernel"]
    assert query.sharding == "whole"
    assert query.notes == ("fsdp 8 does not divide embed 60: not partitioned",)


def test_table_shows_the_state_cut_over_replicas():
    kernel = "encoder/layer_*/attention/query/kernel"
    cut, whole = (rows_of(mesh=MeshConfig(shard_optimizer=shard))[kernel] for shard in (True, False))
    assert (cut.sharding, whole.sharding, whole.state_sharding) == ("whole",) * 3
    assert cut.state_sharding == "(data, -)"
    assert (cut.device_bytes * 8, cut.optimizer_device_bytes * 8) == (whole.device_bytes, 2 * whole.device_bytes)


# ------------------------------------------------------------------ search


def test_candidates_keep_the_batch_and_cut_evenly():
    config = PretrainConfig(training=TrainingConfig(global_batch_size=96))
    found = list(search_module.candidates(config, parse_topology("h100:8"), ()))
    assert {candidate.training.global_batch_size for candidate in found} == {96}
    assert {candidate.execution.remat for candidate in found} == {"none", "attention", "full"}
    for candidate in found:
        sizes = mesh_sizes(candidate.mesh, 8)
        assert 96 % (sizes["data"] * sizes["fsdp"] * candidate.training.accumulation_steps) == 0
        assert 12 % sizes["tensor"] == 0
    assert len(set(found)) == len(found)
    other = list(search_module.candidates(config, parse_topology("h100:8"), (16,)))
    assert {candidate.training.global_batch_size for candidate in other} == {128, 64, 32}


def test_candidates_of_fewer_devices_than_the_largest_tensor_axis():
    config = PretrainConfig(model=ModelConfig(hidden_size=1024, num_attention_heads=16))
    found = {candidate.mesh.tensor for candidate in search_module.candidates(config, parse_topology("h100:4"), ())}
    assert found == {1, 2, 4}


def test_search_on_a_tpu_compiles_few_and_takes_the_fastest_that_fits(monkeypatch):
    compiled_configs = []

    def compile_step(config, topology):
        compiled_configs.append(config)
        slow = 1.5 if config.execution.scan_layers else 1.0
        rows = config.training.global_batch_size / config.training.accumulation_steps
        too_large = config.execution.remat == "none" and rows > 512
        return compiled(slow * {"none": 0.01, "attention": 0.02, "full": 0.03}[config.execution.remat],
                        peak=2**35 if too_large else 2**30)  # fmt: skip

    monkeypatch.setattr(search_module, "compile_step", compile_step)
    config = PretrainConfig(
        execution=ExecutionConfig(dtype="bfloat16", scan_layers=True),
        training=TrainingConfig(global_batch_size=1024),
    )
    lines = []
    plans, (best_config, best) = search_module.search(
        config, parse_topology("v5e:2x2"), Asked(), tries=7, batches=(), progress=lines.append
    )
    assert len(compiled_configs) == len(set(compiled_configs)) == 7
    assert [c.execution.scan_layers for c in compiled_configs] == [True] * 6 + [False]
    assert best.predicted_step_seconds == pytest.approx(0.01)
    assert best_config == compiled_configs[-1]
    assert best_config.execution.remat == "none"
    assert best in pareto(plans)
    assert sum("compiling" in line for line in lines) == 7


def test_pareto_keeps_what_nothing_beats():
    config = PretrainConfig(training=TrainingConfig(global_batch_size=64))
    sizes = [(0.02, 2**30), (0.01, 2**31), (0.02, 2**31), (0.001, 2**35)]
    plans = [plan_compiled(config, parse_topology("v5e:2x2"), Asked(), compiled(s, peak=peak)) for s, peak in sizes]
    assert pareto(plans) == plans[:2]  # slower with no less memory; and one that does not fit
