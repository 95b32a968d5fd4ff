"""The CUDA driver through cuda-python: memory, streams, graphs, and kernels compiled at start by NVRTC.

Every call's result is checked; a failure is an `EngineError` with the driver's own name for it. `Cuda` owns what it
hands out: closing it frees all of it.
"""

from __future__ import annotations

import ctypes
import importlib
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from importlib import resources
from types import TracebackType
from typing import Any, Self

import numpy as np

from edgellm_worker.engine.checkpoint.weights import Array
from edgellm_worker.engine.errors import BuildError, CapacityError, EngineError
from edgellm_worker.engine.runtime.host_memory import available_bytes

Argument = int | float
_ALIGNMENT = 256
_NOT_READY = 600  # CUDA_ERROR_NOT_READY
_OVERLAPPING_DRIVER = 12_030  # CUDA 12.3: edges of graphs have a kind


class Cuda:
    """One device, its primary context, and the stream that everything goes to; `on` chooses another for a while. Use as
    a context manager.
    """

    def __init__(self, ordinal: int = 0) -> None:
        try:
            self._driver: Any = importlib.import_module("cuda.bindings.driver")
            self._nvrtc: Any = importlib.import_module("cuda.bindings.nvrtc")
        except ImportError as error:
            wanted = "edgellm-worker[tensorrt] or, for RTX GPUs and DGX Spark, edgellm-worker[rtx]"
            raise BuildError(f"cuda-python cannot be imported ({error}): install {wanted}") from error
        self._thread = threading.get_ident()
        self._context: Any = None
        try:
            self._call("cuInit", 0)
        except RuntimeError as error:  # cuda-python's answer to a missing libcuda
            raise BuildError(f"there is no NVIDIA driver on this machine: {error}") from error
        self._device = self._call("cuDeviceGet", ordinal)
        self._context = self._call("cuDevicePrimaryCtxRetain", self._device)
        self._call("cuCtxSetCurrent", self._context)
        self.stream = self._call("cuStreamCreate", 1)
        self._streams = [self.stream]
        self._events: list[Any] = []
        self._allocations: list[int] = []
        self._pinned: list[int] = []
        self._modules: list[Any] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Frees in the reverse order of need: work, kernels, memory, stream, context."""
        if self._context is None:
            return
        for stream in self._streams:
            self._call("cuStreamSynchronize", stream)
        for event in self._events:
            self._call("cuEventDestroy", event)
        for module in self._modules:
            self._call("cuModuleUnload", module)
        for pointer in self._allocations:
            self._call("cuMemFree", pointer)
        for pointer in self._pinned:
            self._call("cuMemFreeHost", pointer)
        for stream in self._streams:
            self._call("cuStreamDestroy", stream)
        self._call("cuDevicePrimaryCtxRelease", self._device)
        self._context = None

    def _call(self, name: str, *arguments: Any) -> Any:
        result, values = self._result(name, *arguments)
        if int(result) != 0:
            raise EngineError(f"{name}: {result.name}")
        return values[0] if len(values) == 1 else tuple(values)

    def _result(self, name: str, *arguments: Any) -> tuple[Any, list[Any]]:
        if threading.get_ident() != self._thread and self._context is not None:
            # The current context is a thread's own; an engine may be opened in one thread and stepped in another.
            self._thread = threading.get_ident()
            self._driver.cuCtxSetCurrent(self._context)
        result, *values = getattr(self._driver, name)(*arguments)
        return result, values

    # --- the device ---

    @property
    def architecture(self) -> str:
        """Such as "sm90"."""
        kind = self._driver.CUdevice_attribute
        major = self._call("cuDeviceGetAttribute", kind.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, self._device)
        minor = self._call("cuDeviceGetAttribute", kind.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, self._device)
        return f"sm{major}{minor}"

    @cached_property
    def has_clusters(self) -> bool:
        """Clusters of blocks, since SM90."""
        return int(self.architecture.removeprefix("sm")) >= 90

    @cached_property
    def overlaps_launches(self) -> bool:
        """Whether a launch may begin before the one before it has ended; in graphs too, which older drivers lack."""
        return self.has_clusters and int(self._call("cuDriverGetVersion")) >= _OVERLAPPING_DRIVER

    @cached_property
    def num_multiprocessors(self) -> int:
        count = self._driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
        return int(self._call("cuDeviceGetAttribute", count, self._device))

    @property
    def block_shared_bytes(self) -> int:
        """The most shared memory that a block can ask for."""
        kind = self._driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
        return int(self._call("cuDeviceGetAttribute", kind, self._device))

    @property
    def name(self) -> str:
        return str(self._call("cuDeviceGetName", 128, self._device).split(b"\0")[0].decode())

    def memory(self) -> tuple[int, int]:
        """(free, total) bytes. Where the GPU shares the host's memory (Jetson, DGX Spark) the driver calls pages of
        files used, and a checkpoint that was just read fills them: what the kernel would give up counts as free there.
        """
        free, total = map(int, self._call("cuMemGetInfo"))
        kind = self._driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_INTEGRATED
        if self._call("cuDeviceGetAttribute", kind, self._device):
            free = min(total, max(free, available_bytes()))
        return free, total

    # --- memory ---

    def allocate(self, num_bytes: int, *, zero: bool = False) -> int:
        """-> a device pointer, freed at close. Raises `CapacityError` when the device has no room."""
        size = max(num_bytes, _ALIGNMENT)
        free, total = self.memory()
        if size > free:
            raise CapacityError(
                f"the GPU has {free / 2**30:.2f} of {total / 2**30:.2f} GiB free, {size / 2**30:.2f} needed"
            )
        pointer = int(self._call("cuMemAlloc", size))
        self._allocations.append(pointer)
        if zero:
            self.fill_zero(pointer, size)
        return pointer

    def pinned(self, shape: Sequence[int], dtype: Any) -> Array:
        """A page-locked host array: copies to and from it run asynchronously."""
        count = int(np.prod(shape))
        num_bytes = count * np.dtype(dtype).itemsize
        pointer = int(self._call("cuMemAllocHost", num_bytes))
        self._pinned.append(pointer)
        raw = (ctypes.c_byte * num_bytes).from_address(pointer)
        return np.frombuffer(raw, dtype, count).reshape(shape)

    def fill_zero(self, pointer: int, num_bytes: int) -> None:
        self._call("cuMemsetD8Async", pointer, 0, num_bytes, self.stream)

    def upload(self, array: Array, pointer: int | None = None) -> int:
        """Copy to the device (to a new allocation unless given one) and wait: `array` may go afterwards."""
        data = np.ascontiguousarray(array)
        target = self.allocate(data.nbytes) if pointer is None else pointer
        self._call("cuMemcpyHtoDAsync", target, data.ctypes.data, data.nbytes, self.stream)
        self.synchronize()
        return target

    def upload_async(self, pinned: Array, pointer: int) -> None:
        """`pinned` must stay unchanged until the stream has passed."""
        self._call("cuMemcpyHtoDAsync", pointer, pinned.ctypes.data, pinned.nbytes, self.stream)

    def download_async(self, pointer: int, pinned: Array) -> None:
        self._call("cuMemcpyDtoHAsync", pinned.ctypes.data, pointer, pinned.nbytes, self.stream)

    def download(self, pointer: int, shape: Sequence[int], dtype: Any) -> Array:
        array = np.empty(shape, dtype)
        self._call("cuMemcpyDtoHAsync", array.ctypes.data, pointer, array.nbytes, self.stream)
        self.synchronize()
        return array

    def copy(self, target: int, source: int, num_bytes: int) -> None:
        self._call("cuMemcpyDtoDAsync", target, source, num_bytes, self.stream)

    def synchronize(self) -> None:
        self._call("cuStreamSynchronize", self.stream)

    # --- streams ---

    def new_stream(self) -> Any:
        self._streams.append(self._call("cuStreamCreate", 1))
        return self._streams[-1]

    @contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        """Work goes to `stream` inside the block."""
        usual, self.stream = self.stream, stream
        try:
            yield
        finally:
            self.stream = usual

    def event(self) -> Event:
        self._events.append(self._call("cuEventCreate", 0))
        return Event(self._events[-1], self, self._call)

    def has_come(self, event: Any) -> bool:
        result, _ = self._result("cuEventQuery", event)
        if int(result) not in (0, _NOT_READY):
            raise EngineError(f"cuEventQuery: {result.name}")
        return int(result) == 0

    # --- graphs and time ---

    def capture(self, record: Callable[[], None]) -> Graph:
        """What `record` enqueues on the stream, as one launchable graph; nothing runs yet."""
        self._call("cuStreamBeginCapture", self.stream, self._driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED)
        try:
            record()
        except BaseException:
            self._driver.cuStreamEndCapture(self.stream)
            raise
        graph = self._call("cuStreamEndCapture", self.stream)
        return Graph(self._call("cuGraphInstantiate", graph, 0), self)

    def launch(self, executable: Any) -> None:
        self._call("cuGraphLaunch", executable, self.stream)

    @contextmanager
    def timer(self) -> Iterator[Callable[[], float]]:
        """Yields a function to call after the block: device milliseconds of what the block enqueued."""
        begin, end = self._call("cuEventCreate", 0), self._call("cuEventCreate", 0)
        self._call("cuEventRecord", begin, self.stream)

        def elapsed_ms() -> float:
            self._call("cuEventSynchronize", end)
            return float(self._call("cuEventElapsedTime", begin, end))

        yield elapsed_ms
        self._call("cuEventRecord", end, self.stream)

    # --- kernels ---

    def compile(self, name: str, macros: dict[str, int]) -> Module:
        """Compile the package's kernels/`name`.cu for this device. Raises `BuildError` with the compiler's log."""
        folder = resources.files("edgellm_worker.engine.runtime") / "kernels"
        source = "".join((folder / file).read_text() for file in ("common.cuh", f"{name}.cu"))
        options = [f"--gpu-architecture={self.architecture.replace('sm', 'sm_')}", "--std=c++17"]
        options += [f"-D{key}={value}" for key, value in macros.items()]
        handle = self._loaded(self._cubin(name, source, options))
        self._modules.append(handle)
        return Module(handle, self)

    def _loaded(self, cubin: bytes) -> Any:
        return self._call("cuModuleLoadData", cubin)

    def _cubin(self, name: str, source: str, options: list[str]) -> bytes:
        nvrtc = self._nvrtc
        try:
            nvrtc.nvrtcVersion()
        except RuntimeError as error:  # the same for a missing libnvrtc
            raise BuildError(f"kernels cannot be compiled, NVRTC is not installed: {error}") from error
        _, program = nvrtc.nvrtcCreateProgram(source.encode(), f"{name}.cu".encode(), 0, [], [])
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
        if int(status) != 0:
            _, size = nvrtc.nvrtcGetProgramLogSize(program)
            log = b" " * size
            nvrtc.nvrtcGetProgramLog(program, log)
            raise BuildError(f"kernel {name} does not compile: {log.decode(errors='replace').strip()}")
        _, size = nvrtc.nvrtcGetCUBINSize(program)
        cubin = bytes(size)
        nvrtc.nvrtcGetCUBIN(program, cubin)  # fills the bytes object in place: cuda-python's way
        nvrtc.nvrtcDestroyProgram(program)
        return cubin

    def function(self, module: Any, name: str, shared_bytes: int) -> Any:
        function = self._call("cuModuleGetFunction", module, name.encode())
        if shared_bytes:
            limit = self._driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            self._call("cuFuncSetAttribute", function, limit, shared_bytes)
        return function

    def resident_blocks(self, kernel: Kernel, threads: int) -> int:
        """How many blocks of `kernel` the whole device holds at once."""
        name = "cuOccupancyMaxActiveBlocksPerMultiprocessor"
        return self.num_multiprocessors * int(self._call(name, kernel.function, threads, kernel.shared_bytes))

    def run(
        self,
        kernel: Kernel,
        grid: tuple[int, int, int],
        threads: int,
        arguments: Sequence[Argument],
        *,
        is_cluster: bool = False,
    ) -> None:
        """Arguments by the kernel's signature: "p" pointer, "i" int, "f" float. `is_cluster`: blocks that differ in the
        grid's second index alone are one cluster, of eight at most.

        A launch may begin before the one before it has ended (`overlaps_launches`): kernels wait by themselves
        (`await_previous`).
        """
        values = (tuple(arguments), tuple(_ARGUMENT_TYPES[kind] for kind in kernel.signature))
        size, attributes = kernel.shared_bytes, self._attributes(grid, is_cluster=is_cluster)
        if not attributes:
            self._call("cuLaunchKernel", kernel.function, *grid, threads, 1, 1, size, self.stream, values, 0)
            return
        config = self._driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid
        config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
        config.sharedMemBytes, config.hStream = size, self.stream
        config.attrs, config.numAttrs = attributes, len(attributes)
        self._call("cuLaunchKernelEx", config, kernel.function, values, 0)

    def _attributes(self, grid: tuple[int, int, int], *, is_cluster: bool) -> list[Any]:
        attributes = []
        if self.overlaps_launches:
            attributes.append(self._attribute("PROGRAMMATIC_STREAM_SERIALIZATION"))
            attributes[-1].value.programmaticStreamSerializationAllowed = 1
        if is_cluster:
            attributes.append(self._attribute("CLUSTER_DIMENSION"))
            shape = attributes[-1].value.clusterDim
            shape.x, shape.y, shape.z = 1, grid[1], 1
        return attributes

    def _attribute(self, name: str) -> Any:
        attribute = self._driver.CUlaunchAttribute()
        attribute.id = getattr(self._driver.CUlaunchAttributeID, f"CU_LAUNCH_ATTRIBUTE_{name}")
        return attribute


_ARGUMENT_TYPES = {"p": ctypes.c_void_p, "i": ctypes.c_int, "f": ctypes.c_float}


class Event:
    """A place in a stream's work, recorded anew each time."""

    def __init__(self, handle: Any, cuda: Cuda, call: Callable[..., Any]) -> None:
        self.handle = handle
        self._cuda = cuda
        self._call = call

    def record(self) -> None:
        self._call("cuEventRecord", self.handle, self._cuda.stream)

    def wait(self) -> None:
        """Until the device has come there."""
        self._call("cuEventSynchronize", self.handle)

    def is_over(self) -> bool:
        """Whether the device has come there."""
        return self._cuda.has_come(self.handle)

    def hold_back(self) -> None:
        """What the stream is given from now on starts after it; at once where it was never recorded."""
        self._call("cuStreamWaitEvent", self._cuda.stream, self.handle, 0)

    def seconds_since(self, earlier: Event) -> float:
        """Of device time. Both must be over."""
        return 1e-3 * float(self._call("cuEventElapsedTime", earlier.handle, self.handle))


class Graph:
    """A captured, instantiated graph."""

    def __init__(self, executable: Any, cuda: Cuda) -> None:
        self._executable = executable
        self._cuda = cuda

    def launch(self) -> None:
        self._cuda.launch(self._executable)


class Kernel:
    def __init__(self, function: Any, signature: str, shared_bytes: int) -> None:
        self.function = function
        self.signature = signature
        self.shared_bytes = shared_bytes


class Module:
    def __init__(self, handle: Any, cuda: Cuda) -> None:
        self._handle = handle
        self._cuda = cuda

    def kernel(self, name: str, signature: str, shared_bytes: int = 0) -> Kernel:
        return Kernel(self._cuda.function(self._handle, name, shared_bytes), signature, shared_bytes)
