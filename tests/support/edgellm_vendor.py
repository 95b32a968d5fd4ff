"""The vendor's real wheel, unpacked, for the tests marked `vendor`: EDGELLM_VENDOR_WHEEL names its folder.

    pip download --no-deps tensorrt-edgellm==0.11.0 && python -m zipfile -e tensorrt_edgellm-*.whl DIR

Its native module is a cp311 build for x86-64 that needs CUDA and TensorRT libraries to load. On a machine without them
libraries of the same names are made here, in which every function that the module imports returns 0: enough for its
value classes, which are all that these tests use of it.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

VARIABLE = "EDGELLM_VENDOR_WHEEL"
PAYLOAD = "tensorrt_edgellm/_native/payloads/x86-ubuntu2204-cu13-sm80"
_NEEDED = re.compile(r"\(NEEDED\).*\[(lib(?:cuda|cudart|nvinfer|nvonnxparser)[^\]]*)\]")
_NOT_OURS = re.compile(r"^(_?Py|_ITM|__gmon|GLIBC)|@(GLIBC|GLIBCXX|GCC|CXXABI)")


def wheel_folder() -> Path:
    folder = os.environ.get(VARIABLE)
    if not folder:
        pytest.skip(f"{VARIABLE} does not name an unpacked wheel of the vendor")
    return Path(folder)


def load_real_module(scratch: Path) -> Any:
    """The vendor's pybind11 module. Loaded once per process."""
    if "_edgellm_runtime" in sys.modules:
        return sys.modules["_edgellm_runtime"]
    (extension,) = (wheel_folder() / PAYLOAD).glob("_edgellm_runtime*.so")
    for library in _stubs(extension, scratch):
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    spec = importlib.util.spec_from_file_location("_edgellm_runtime", extension)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["_edgellm_runtime"] = module
    spec.loader.exec_module(module)
    return module


def _stubs(extension: Path, scratch: Path) -> Iterator[Path]:
    """One library per name that the extension needs; all unresolved functions in the one that they are versioned for,
    or in the first.
    """
    dynamic = subprocess.run(["readelf", "-d", extension], check=True, capture_output=True, text=True).stdout
    undefined = subprocess.run(
        ["nm", "-D", "--undefined-only", extension], check=True, capture_output=True, text=True
    ).stdout
    names = [line.split()[-1] for line in undefined.splitlines() if not _NOT_OURS.search(line.split()[-1])]
    libraries = _NEEDED.findall(dynamic)
    plain = [name for name in names if "@" not in name]
    for index, library in enumerate(libraries):
        functions = plain if index == 0 else []
        versioned = [name.partition("@")[0] for name in names if name.endswith(f"@{library}")]
        source = scratch / f"{library}.c"
        source.write_text("".join(f"long {name}(void) {{ return 0; }}\n" for name in functions + versioned))
        command = ["gcc", "-shared", "-fPIC", "-w", "-o", str(scratch / library), str(source), f"-Wl,-soname,{library}"]
        if versioned:
            script = scratch / f"{library}.map"
            script.write_text(f"{library} {{ global: *; }};\n")
            command.append(f"-Wl,--version-script={script}")
        subprocess.run(command, check=True)
        yield scratch / library


class _Anything:
    """Whatever TensorRT's names are used for while the vendor's modules are imported."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _Anything()


class _AbsentTensorRt(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything()


def import_draft_module(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The vendor's real module of the Qwen3.5 draft, on a machine without TensorRT: its forward pass is plain Python
    over the builder's own operations.
    """
    if importlib.util.find_spec("tensorrt") is None:
        monkeypatch.setitem(sys.modules, "tensorrt", _AbsentTensorRt("tensorrt"))
    return importlib.import_module("experimental.builder.models.qwen3_5.modeling_qwen3_5_mtp")
