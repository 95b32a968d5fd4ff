"""The kernel for products of few rows (kernels/linear.cu), its own source run on the CPU: as a graph's launches, without
clusters of blocks. Skips where there is no g++.
"""

from __future__ import annotations

import shutil

import numpy as np
import pytest

from edgellm_worker.engine.checkpoint.weights import DenseWeight
from edgellm_worker.engine.ops.graph import Dtype, Graph, Lowering
from edgellm_worker.engine.ops.tensorrt import TensorRtOps
from edgellm_worker.engine.runtime.tensorrt_kernels import Binding, Control, Kernels, Mode
from edgellm_worker.engine.runtime.tensorrt_layout import lay_out
from edgellm_worker.engine.runtime.tensorrt_program import Bindings, Parts, Program
from edgellm_worker.engine.runtime.tensorrt_weights import WeightStore
from tests.support.cuda_on_cpu import CpuDevice
from tests.support.recording_device import NoNetworks

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++")


def random_half(*shape: int, scale: float = 1.0) -> np.ndarray:
    return (np.random.default_rng(sum(shape)).standard_normal(shape) * scale).astype(np.float16)


@pytest.fixture(scope="module")
def device(tmp_path_factory: pytest.TempPathFactory) -> CpuDevice:
    return CpuDevice(tmp_path_factory.mktemp("kernels"), 4)


def run(device: CpuDevice, graph: Graph, x: np.ndarray, width: int, times: int = 1) -> np.ndarray:
    """-> y [rows, width] and, past its end, what must stay as it was."""
    weights = WeightStore(device)
    parts = Parts(device, weights, Kernels(device, weights), NoNetworks())
    layout = lay_out(graph, frozenset({"x", "y"}), Lowering.PRODUCTS)
    y = device.allocate(2 * len(x) * width + 2)
    bound = {"x": Binding(device.upload(x)), "y": Binding(y)}
    bindings = Bindings(bound, device.allocate(layout.num_bytes), Control(0, 0, 1), Mode.STEP)
    program = Program(graph, layout, parts, bindings)
    assert [label.split()[0] for label, _ in program.launches] == ["product"]
    for _ in range(times):
        program.enqueue()
    found = device.download(y, (len(x) * width + 1,), np.float16)
    assert found[-1:].view(np.uint16) == 0x7E7E  # nothing behind the end
    return found[:-1].reshape(len(x), width)


def product(rows: int, weight: np.ndarray) -> Graph:
    ops = TensorRtOps()
    x = ops.input("x", (1, rows, weight.shape[1]), Dtype.FLOAT16)
    return ops.graph({"y": ops.linear(x, DenseWeight(weight))})


@pytest.mark.parametrize(
    ("rows", "width", "depth"),
    [
        (1, 64, 64),  # less than one stage
        (7, 130, 520),  # no tile, no chunk filled; a depth that two blocks share
        (24, 66, 1096),  # three tiles of rows, four blocks of unequal shares
        (48, 70, 136),
    ],
)
def test_it_is_the_product(device: CpuDevice, rows: int, width: int, depth: int) -> None:
    """Within float16's rounding, and again: what blocks leave for each other is as it was."""
    weight, x = random_half(width, depth, scale=0.1), random_half(rows, depth)
    want = x.astype(np.float64) @ weight.T.astype(np.float64)
    y = run(device, product(rows, weight), x, width)
    assert (np.abs(y - want) / np.maximum(np.abs(want), np.sqrt((want**2).mean()))).max() < 6e-4
    again = run(device, product(rows, weight), x, width, times=2)
    assert np.array_equal(y.view(np.uint16), again.view(np.uint16))


def test_a_row_has_the_same_bits_in_any_batch(device: CpuDevice) -> None:
    weight, x = random_half(66, 1096, scale=0.1), random_half(24, 1096)
    alone, among = (run(device, product(rows, weight), x[:rows], 66) for rows in (1, 24))
    assert np.array_equal(alone[0].view(np.uint16), among[0].view(np.uint16))


@pytest.mark.parametrize("width", [64, 44])
def test_it_does_the_activation_behind_it(device: CpuDevice, width: int) -> None:
    """As float16 values would have gone through memory."""
    gate, up = (random_half(width, 136, scale=scale) for scale in (0.2, 0.1))
    x = random_half(9, 136)
    ops = TensorRtOps()
    given = ops.input("x", (1, 9, 136), Dtype.FLOAT16)
    parts = ops.fused_linear(given, [DenseWeight(gate), DenseWeight(up)], [None, None])
    y = run(device, ops.graph({"y": ops.swiglu(*parts)}), x, width)
    g, u = ((x.astype(np.float32) @ w.T.astype(np.float32)).astype(np.float16).astype(np.float32) for w in (gate, up))
    want = g / (1 + np.exp(-g)) * u
    assert (np.abs(y - want) / np.maximum(np.abs(want), np.sqrt((want**2).mean()))).max() < 2e-3
