"""The packed product's kernel on the CPU: its own source, compiled by g++, threads as fibers (cuda_on_cpu.hpp).

What is PTX in the source (copies to shared memory, the tensor core's product, float16 conversions) is written out in the
header; all else is the kernel's. `CpuDevice` is to `PackedLinear` what `Cuda` is.
"""

from __future__ import annotations

import ctypes
import re
import subprocess
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path

import numpy as np

from edgellm_worker.engine.checkpoint.weights import Array

_HEADER = Path(__file__).with_name("cuda_on_cpu.hpp")
_FUNCTION = re.compile(
    r"^(?:template <[^\n]*\n)?__device__ __forceinline__ [^\n]*(?:\}$|\n(?:[^\n}][^\n]*\n|\n)*\}$)", re.MULTILINE
)
_ENTRY = """
static void* pointers[7];
static int sizes[5];
static float scale;
static void thread() {
  packed_linear((const half_t*)pointers[0], (const u8*)pointers[1], (const u8*)pointers[2], (const float*)pointers[3],
                (half_t*)pointers[4], (float4*)pointers[5], (int*)pointers[6], sizes[0], sizes[1], sizes[2], sizes[3],
                sizes[4], scale);
}
extern "C" void run(int blocks, void** given, int* numbers, float factor) {
  memcpy(pointers, given, sizeof pointers), memcpy(sizes, numbers, sizeof sizes);
  scale = factor;
  launch(blocks, thread);
}
"""


def _source(macros: dict[str, int]) -> str:
    folder = resources.files("edgellm_worker.engine.runtime") / "kernels"
    text = "".join((folder / name).read_text() for name in ("common.cuh", "packed.cu"))
    text = _FUNCTION.sub(lambda found: "" if re.search(r"\basm\b|__cvta", found[0]) else found[0], text)
    text = text.replace("extern __shared__ __align__(128) u8 stages[];", "u8* stages = shared_memory;")
    defines = "".join(f"#define {name} {value}\n" for name, value in macros.items())
    return f'#include "{_HEADER}"\n{defines}{text}{_ENTRY}'


@dataclass
class CpuKernel:
    library: ctypes.CDLL


@dataclass
class CpuModule:
    library: ctypes.CDLL

    def kernel(self, _name: str, _signature: str, _shared_bytes: int = 0) -> CpuKernel:
        return CpuKernel(self.library)


@dataclass
class CpuDevice:
    """`num_blocks` is how many blocks it says that it holds at once."""

    folder: Path
    num_blocks: int
    stream: int = 0
    _kept: list[Array] = field(default_factory=list)

    def allocate(self, num_bytes: int, *, zero: bool = False) -> int:
        self._kept.append(np.full(num_bytes + 128, 0 if zero else 0x7E, np.uint8))
        return self._kept[-1].ctypes.data + -self._kept[-1].ctypes.data % 128

    def upload(self, array: Array) -> int:
        pointer = self.allocate(array.nbytes)
        ctypes.memmove(pointer, np.ascontiguousarray(array).ctypes.data, array.nbytes)
        return pointer

    def download(self, pointer: int, shape: tuple[int, ...], dtype: type) -> Array:
        array = np.empty(shape, dtype)
        ctypes.memmove(array.ctypes.data, pointer, array.nbytes)
        return array

    def compile(self, _name: str, macros: dict[str, int]) -> CpuModule:
        name = "_".join(f"{key}{value}" for key, value in macros.items())
        library = self.folder / f"{name}.so"
        if not library.exists():
            source = self.folder / f"{name}.cpp"
            source.write_text(_source(macros))
            command = ["g++", "-std=c++20", "-O1", "-w", "-shared", "-fPIC", "-o", str(library), str(source)]
            made = subprocess.run(command, capture_output=True, text=True, check=False)
            if made.returncode:
                raise AssertionError(made.stderr)
        return CpuModule(ctypes.CDLL(str(library)))

    def resident_blocks(self, _kernel: CpuKernel, _threads: int) -> int:
        return self.num_blocks

    def run(self, kernel: CpuKernel, grid: tuple[int, int, int], threads: int, arguments: tuple[float, ...]) -> None:
        assert threads == 256
        pointers = (ctypes.c_void_p * 7)(*(int(value) for value in arguments[:7]))
        sizes = (ctypes.c_int * 5)(*(int(value) for value in arguments[7:12]))
        kernel.library.run(grid[0], pointers, sizes, ctypes.c_float(arguments[12]))
