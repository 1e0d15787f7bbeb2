"""Meshes over several slices: the axis data spans them, so that only gradients cross the network between slices."""

import dataclasses
import importlib.util

import pytest
from support import objective_of, tiny_config

from bert_jax.config import MeshConfig
from bert_jax.contrib.planner.topology import prepare_environment
from bert_jax.parallel import make_mesh
from bert_jax.training.programs import pretraining_batch, train_programs


@dataclasses.dataclass(frozen=True)
class Device:
    """The attributes of a device that a mesh reads."""

    id: int
    slice_index: int
    process_index: int = 0
    platform: str = "gpu"
    device_kind: str = "a GPU"


def slices_of(config, slices=2, each=4):
    """The index of the slice of each device, by mesh axes."""
    devices = [Device(id=i, slice_index=i % slices) for i in range(slices * each)]  # not in the order of slices
    mesh = make_mesh(config, devices)
    return [[[device.slice_index for device in row] for row in part] for part in mesh.devices]


def test_the_first_axes_span_the_slices():
    assert slices_of(MeshConfig(data=2, fsdp=4)) == [[[0]] * 4, [[1]] * 4]
    assert slices_of(MeshConfig(data=4, fsdp=1, tensor=2)) == [[[0, 0]]] * 2 + [[[1, 1]]] * 2
    assert slices_of(MeshConfig(data=1, fsdp=8)) == [[[0]] * 4 + [[1]] * 4]
    assert slices_of(MeshConfig(data=2, fsdp=4), slices=4, each=2) == [[[0], [0], [1], [1]], [[2], [2], [3], [3]]]


def test_slices_of_different_sizes_are_refused():
    devices = [Device(id=i, slice_index=i // 5) for i in range(8)]
    with pytest.raises(ValueError, match="Number of devices 5 must equal"):
        make_mesh(MeshConfig(data=2, fsdp=4), devices)


@pytest.mark.slow  # compiles for a TPU
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu (extra tpu)")
def test_a_step_is_compiled_for_two_slices():
    prepare_environment()
    from jax.experimental import topologies

    described = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2", num_slices=2)
    config = tiny_config("--mesh.data 2 --mesh.fsdp 4")
    objective = objective_of(config, make_mesh(config.mesh, described.devices))
    programs = train_programs(objective)
    text = programs.lower(pretraining_batch(objective, config.training.global_batch_size)).compile().as_text()
    assert "megascale" in text and "num_partitions=4" in text  # transfers between slices, programs inside them
