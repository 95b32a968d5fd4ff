"""The products' kernels on the CPU: their own source, compiled by g++, threads as fibers (cuda_on_cpu.hpp).

What is PTX in the source (copies to shared memory, the tensor core's loads and product, float16 conversions) is written out
in the header; all else is the kernel's. `CpuDevice` is to `PackedLinear` and `Products` what `Cuda` is: to a GPU without
clusters of blocks.
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
    r"^(?:template <[^\n]*\n)?__device__ __forceinline__ (?:[^\n]*\}$|[^\n]*\n(?:[^\n}][^\n]*\n|\n)*\}$)", re.MULTILINE
)
_ENTRY = """
static void* pointers[7];
static int sizes[5];
static float scale;
static void thread() { %s; }
extern "C" void run(int blocks, int blocks_y, void** given, int* numbers, float factor) {
  memcpy(pointers, given, sizeof pointers), memcpy(sizes, numbers, sizeof sizes);
  scale = factor;
  launch(blocks, thread, blocks_y);
}
"""
_CALLS = {
    "packed": """packed_linear((const half_t*)pointers[0], (const u8*)pointers[1], (const u8*)pointers[2],
        (const float*)pointers[3], (half_t*)pointers[4], (float4*)pointers[5], (int*)pointers[6], sizes[0], sizes[1],
        sizes[2], sizes[3], sizes[4], scale)""",
    "linear": """linear((const half_t*)pointers[0], (const half_t*)pointers[1], (half_t*)pointers[2],
        (float*)pointers[3], (int*)pointers[4], sizes[0], sizes[1], sizes[2])""",
}
_THREADS = {"packed": 256, "linear": 160}


def _source(name: str, macros: dict[str, int]) -> str:
    folder = resources.files("edgellm_worker.engine.runtime") / "kernels"
    text = "".join((folder / file).read_text() for file in ("common.cuh", f"{name}.cu"))
    text = _FUNCTION.sub(lambda found: "" if re.search(r"\basm\b|__cvta", found[0]) else found[0], text)
    text = text.replace("extern __shared__ __align__(128) u8 stages[];", "u8* stages = shared_memory;")
    defines = "".join(f"#define {key} {value}\n" for key, value in macros.items())
    threads = f"#define BLOCK_THREADS {_THREADS[name]}\n"
    return f'{threads}#include "{_HEADER}"\n{defines}{text}{_ENTRY % _CALLS[name]}'


@dataclass
class CpuKernel:
    library: ctypes.CDLL
    num_pointers: int


@dataclass
class CpuModule:
    library: ctypes.CDLL

    def kernel(self, _name: str, signature: str, _shared_bytes: int = 0) -> CpuKernel:
        return CpuKernel(self.library, signature.count("p"))


@dataclass
class CpuDevice:
    """`num_blocks` is how many blocks it says that it holds at once."""

    folder: Path
    num_blocks: int
    stream: int = 0
    has_clusters: bool = False
    num_multiprocessors: int = 4
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

    def compile(self, kernel: str, macros: dict[str, int]) -> CpuModule:
        name = "_".join((kernel, *(f"{key}{value}" for key, value in macros.items())))
        library = self.folder / f"{name}.so"
        if not library.exists():
            source = self.folder / f"{name}.cpp"
            source.write_text(_source(kernel, macros))
            command = ["g++", "-std=c++20", "-O1", "-w", "-shared", "-fPIC", "-o", str(library), str(source)]
            made = subprocess.run(command, capture_output=True, text=True, check=False)
            if made.returncode:
                raise AssertionError(made.stderr)
        return CpuModule(ctypes.CDLL(str(library)))

    def resident_blocks(self, _kernel: CpuKernel, _threads: int) -> int:
        return self.num_blocks

    def run(
        self,
        kernel: CpuKernel,
        grid: tuple[int, int, int],
        _threads: int,
        arguments: tuple[float, ...],
        *,
        is_cluster: bool = False,
    ) -> None:
        assert not is_cluster
        addresses, numbers = arguments[: kernel.num_pointers], arguments[kernel.num_pointers :]
        pointers = (ctypes.c_void_p * 7)(*(int(value) for value in addresses))
        sizes = (ctypes.c_int * 5)(*(int(value) for value in numbers[:5]))
        kernel.library.run(*grid[:2], pointers, sizes, ctypes.c_float(numbers[5] if len(numbers) > 5 else 1))
