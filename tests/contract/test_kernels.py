"""The packed product's kernel: through NVIDIA's compiler for GPUs since SM80 (all of them in the soak), and run on the CPU.

The first part skips where there is no nvcc, the second where there is no g++.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from importlib import resources
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from edgellm_worker.engine.checkpoint.decode import decode
from edgellm_worker.engine.checkpoint.weights import Fp8Weight, Nvfp4Weight
from edgellm_worker.engine.runtime.packed_linear import Operands, PackedLinear, variant_for
from edgellm_worker.engine.runtime.packed_weights import factor, pack_data, pack_scales
from tests.support.cuda_on_cpu import CpuDevice

NVCC = shutil.which("nvcc")
EVERY = (80, 86, 87, 89, 90, 100, 110, 120, 121)
FULL = [pytest.param(is_fp4, rows, EVERY, marks=pytest.mark.soak) for is_fp4 in (True, False) for rows in (1, 24, 48)]


@pytest.mark.skipif(NVCC is None, reason="there is no nvcc")
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("is_fp4", "rows", "architectures"), [(True, 24, (80, 110)), (False, 1, (89, 121)), *FULL])
def test_the_packed_product_compiles(tmp_path: Path, is_fp4: bool, rows: int, architectures: tuple[int, ...]) -> None:
    """And two of its blocks of 256 threads find room in a multiprocessor's 64 K registers."""
    folder = resources.files("edgellm_worker.engine.runtime") / "kernels"
    source = tmp_path / "packed.cu"
    source.write_text("".join((folder / name).read_text() for name in ("common.cuh", "packed.cu")))
    macros = [f"-D{name}={value}" for name, value in variant_for(rows, is_fp4=is_fp4).macros.items()]
    targets = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in architectures]
    command = [str(NVCC), "-std=c++17", "-fatbin", "-Xptxas", "-v", "-Werror", "all-warnings", *macros, *targets]
    command += ["-o", str(tmp_path / "packed.fatbin"), str(source)]
    made = subprocess.run(command, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr
    registers = [int(count) for count in re.findall(r"Used (\d+) registers", made.stderr)]
    assert len(registers) == len(architectures)
    assert max(registers) * 256 * 2 <= 1 << 16


def random_weight(n: int, k: int, *, is_fp4: bool) -> Fp8Weight | Nvfp4Weight:
    rng = np.random.default_rng(n + k)
    if is_fp4:
        scales = rng.integers(0, 127, (n, k // 16), np.uint8).view(ml_dtypes.float8_e4m3fn)
        return Nvfp4Weight(rng.integers(0, 256, (n, k // 2), np.uint8), scales, np.float32(3e-4))
    return Fp8Weight(rng.standard_normal((n, k)).astype(ml_dtypes.float8_e4m3fn), np.float32(0.05))


@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++")
@pytest.mark.parametrize(
    ("is_fp4", "rows", "num_blocks"),
    [
        (True, 3, 1),  # one block has it all
        (True, 3, 5),  # tiles cut between blocks
        (False, 3, 3),
        (True, 50, 7),  # more rows than one reading of the weight takes
    ],
)
def test_the_packed_product_is_the_product(
    tmp_path_factory: pytest.TempPathFactory, is_fp4: bool, rows: int, num_blocks: int
) -> None:
    """Of the decoded weight, within float16's rounding, with a bias, at sizes that fill no tile; and again: what blocks
    leave for each other is as it was.
    """
    n, k = 300, 400
    weight = random_weight(n, k, is_fp4=is_fp4)
    rng = np.random.default_rng(rows)
    x, bias = rng.standard_normal((rows, k)).astype(np.float16), rng.standard_normal(n).astype(np.float32)
    device = CpuDevice(tmp_path_factory.getbasetemp(), num_blocks)
    y = device.allocate(2 * rows * n + 2)
    pointers = [device.upload(array) for array in (x, pack_data(weight), pack_scales(weight), bias)]
    product = PackedLinear(device).prepare(Operands(*pointers, y, rows, n, k, factor(weight)), is_fp4=is_fp4)
    product()
    first = device.download(y, (rows * n + 1,), np.float16)
    product()
    again = device.download(y, (rows * n + 1,), np.float16)
    want = x.astype(np.float64) @ decode(weight).T.astype(np.float64) + bias
    difference = np.abs(first[:-1].reshape(want.shape) - want)
    assert (difference / np.maximum(np.abs(want), np.sqrt((want**2).mean()))).max() < 6e-4
    assert np.array_equal(first.view(np.uint16), again.view(np.uint16))
    assert first[-1:].view(np.uint16) == 0x7E7E  # nothing behind the end
