"""The packed product's kernel through NVIDIA's compiler, for GPUs since SM80 (all of them in the soak). Skips without nvcc."""

from __future__ import annotations

import re
import shutil
import subprocess
from importlib import resources
from pathlib import Path

import pytest

from edgellm_worker.engine.runtime.packed_linear import variant_for

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
