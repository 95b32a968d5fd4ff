"""The kernels of a step go through NVIDIA's compiler for GPUs since SM80 (all of them in the soak). Skips where there is no
nvcc.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from importlib import resources
from pathlib import Path

import pytest

NVCC = shutil.which("nvcc")
EVERY = (80, 86, 87, 89, 90, 100, 110, 120, 121)
_ATTEND = {"L": 4096, "SPLITS": 8, "NORM": 1}
CASES = {
    "attention of the 27B": (
        "attend_step",
        _ATTEND | {"HQ": 24, "HKV": 4, "D": 256, "ROT": 32, "WARPS": 4, "KV_FP8": 0},
    ),
    "attention, FP8 cache": (
        "attend_step",
        _ATTEND | {"HQ": 24, "HKV": 4, "D": 256, "ROT": 32, "WARPS": 8, "KV_FP8": 1},
    ),
    "attention of 1.6B": ("attend_step", _ATTEND | {"HQ": 16, "HKV": 4, "D": 128, "ROT": 64, "WARPS": 8, "KV_FP8": 0}),
    "products of 24 rows": ("linear", {"TILES": 3, "STAGES": 6, "CLUSTER": 1, "SWIGLU": 0}),
    "products of 48 rows": ("linear", {"TILES": 6, "STAGES": 5, "CLUSTER": 0, "SWIGLU": 0}),
    "products of 1 row with their activation": ("linear", {"TILES": 1, "STAGES": 8, "CLUSTER": 1, "SWIGLU": 1}),
    "candidates": ("candidates", {"K": 64, "PER": 16, "PARTS": 61}),
    "rows": ("rows", {"SHARED": 0}),
    "tokens": ("tokens", {}),
    "the way to the next round": ("advance", {}),
    "delta rule of the 27B": ("delta", {"HK": 16, "HV": 48, "DK": 128, "DV": 128}),
}
KERNELS = resources.files("edgellm_worker.engine.runtime") / "kernels"
_MOST_SPILLED = 160  # bytes: heads of 256 fill the registers, newer targets spill a little


@pytest.mark.skipif(NVCC is None, reason="there is no nvcc")
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("case", "architectures"),
    [
        ("attention of the 27B", (120,)),
        *(pytest.param(case, EVERY, marks=pytest.mark.soak) for case in CASES),
    ],
)
def test_the_kernels_of_a_step_compile(tmp_path: Path, case: str, architectures: tuple[int, ...]) -> None:
    """Without keeping in memory what is meant for registers. GPUs before SM89 cannot convert FP8, and before SM90 there
    are no clusters of blocks.
    """
    name, macros = CASES[case]
    folder = resources.files("edgellm_worker.engine.runtime") / "kernels"
    source = tmp_path / f"{name}.cu"
    source.write_text("".join((folder / file).read_text() for file in ("common.cuh", f"{name}.cu")))
    least = 90 if macros.get("CLUSTER") else 89 if macros.get("KV_FP8") else 0
    wanted = [arch for arch in architectures if arch >= least]
    command = [
        str(NVCC),
        "-std=c++17",
        "-fatbin",
        "-Xptxas",
        "-v",
        *(f"-D{key}={value}" for key, value in macros.items()),
    ]
    command += [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in wanted]
    made = subprocess.run(
        [*command, "-o", str(tmp_path / "made"), str(source)], capture_output=True, text=True, check=False
    )
    assert made.returncode == 0, made.stderr
    spilled = [int(count) for count in re.findall(r"(\d+) bytes spill stores", made.stderr)]
    assert spilled
    assert max(spilled) <= _MOST_SPILLED


def test_every_kernel_waits_for_those_before_it() -> None:
    """A launch begins before the one before it has ended, so a kernel that does not wait reads what is not there yet."""
    found = 0
    for file in KERNELS.iterdir():
        for kernel in file.read_text().split("__global__")[1:] if file.name.endswith(".cu") else ():
            assert re.search(r"\b(take_turn|await_previous)\(\);", kernel), f"{file.name}: {kernel.split('{')[0]}"
            found += 1
    assert found >= 30


def test_what_kernels_write_is_not_read_as_constant() -> None:
    """`const .. __restrict__` lets a load go before the wait: for weights and other constants alone."""
    constants = {"weight", "w", "table", "inv_freq", "a_log", "dt_bias", "bias", "scales", "spans"}
    for file in KERNELS.iterdir():
        for name in re.findall(r"__restrict__ (\w+)", file.read_text()) if file.name.endswith(".cu") else ():
            assert name in constants, f"{file.name}: {name}"
