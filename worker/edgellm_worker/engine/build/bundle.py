"""Bundles: the plans of one engine on disk, and when they may be used again.

    <cache>/tensorrt/<library>-<version>_<gpu>/<digest>/    manifest.json and one <segment key>.plan per network
                                              /<digest>.lock, <digest>.log, <digest>.refused
                                              /.building-*     unfinished, never read

The digest is of the key: checkpoint content, model code version, every build option (tree sizes among them), library,
version, GPU, structure of the networks. A bundle is written to a temporary folder, synced, and renamed: it is whole or
absent. One that is damaged or foreign is a miss with its reason, and is built again in place. Weights are no part
of it: they are network inputs.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from edgellm_worker.engine.build.canary import FILE as CANARY_FILE
from edgellm_worker.engine.build.canary import Canary
from edgellm_worker.engine.build.spec import MODEL_CODE_VERSION, REFUSED, EngineSpec
from edgellm_worker.engine.builders import builder_failure, locked, log_tail
from edgellm_worker.engine.checkpoint.digest import content_digest
from edgellm_worker.engine.errors import BuildError, NetworkRefused
from edgellm_worker.engine.trt import Library

MANIFEST: Final = "manifest.json"
_LAYOUT_VERSION: Final = 3
_CHILD: Final = "edgellm_worker.engine.build.child"
_MOST_BUILDERS: Final = 4
_LEAST_FREE_BYTES: Final = 1 << 20

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BundleKey:
    """`fields` is plain data; two keys are equal exactly when a bundle of one serves the other."""

    library: str
    gpu: str
    fields: Mapping[str, Any]

    @classmethod
    def of(cls, model_dir: Path, spec: EngineSpec, library: Library, gpu: str, networks: Collection[str]) -> BundleKey:
        """`networks` are their structural keys. Some scales are constants of a network, and `content_digest` reads only
        samples of large files: a scale that was changed in the files must not meet the plan of the old one.
        """
        fields = {
            "layout_version": _LAYOUT_VERSION,
            "model_code_version": MODEL_CODE_VERSION,
            "library": library.name,
            "gpu": gpu,
            "options": spec.as_json(),
            "max_verify_tree_size": spec.max_verify,
            "max_draft_tree_size": spec.max_draft_tree_size,
            "checkpoint": content_digest(model_dir),
            "networks": hashlib.sha256(" ".join(sorted(networks)).encode()).hexdigest(),
        }
        return cls(library.name, gpu, fields)

    @property
    def has_native_forms(self) -> bool:
        return bool(self.fields["options"]["runs_fp8"] or self.fields["options"]["runs_fp4"])

    def folder(self, cache_dir: Path) -> Path:
        digest = hashlib.sha256(json.dumps(self.fields, sort_keys=True).encode()).hexdigest()[:16]
        return cache_dir / "tensorrt" / f"{self.library}_{self.gpu}" / digest


@dataclass(frozen=True, slots=True)
class Bundle:
    path: Path
    plans: Mapping[str, bytes]
    canary: Canary | None = None


@dataclass(frozen=True, slots=True)
class Miss:
    """Why there is no usable bundle."""

    reason: str


def read_bundle(path: Path, key: BundleKey) -> Bundle | Miss:
    """Reads and checks every plan."""
    if not path.exists():
        return Miss("not built yet")
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        if manifest["key"] != key.fields:
            return Miss(f"built for something else: {_difference(manifest['key'], key.fields)}")
        plans = {name: (path / f"{name}.plan").read_bytes() for name in manifest["plans"]}
        canary = Canary.read(manifest["canary"]) if manifest["canary"] is not None else None
    except (OSError, ValueError, KeyError, TypeError) as error:
        return Miss(f"damaged: {type(error).__name__}: {error}")
    for name, plan in plans.items():
        if _checksum(plan) != manifest["plans"][name]:
            return Miss(f"damaged: {name}.plan is not what was written")
    return Bundle(path, plans, canary)


def _checksum(plan: bytes) -> str:
    """Against damage, not malice: a cryptographic digest takes longer than reading the file."""
    return f"{len(plan)} bytes, crc32 {zlib.crc32(plan):08x}"


def _difference(one: object, other: Mapping[str, Any]) -> str:
    if not isinstance(one, Mapping):
        return "its key is not a table"
    names = sorted(name for name in {*one, *other} if one.get(name) != other.get(name))
    return ", ".join(names)


PlanMaker = Callable[[Path], None]
"""Writes `<key>.plan` files into a folder, and what the canary must write (build/canary.py) where it is known."""


def ensure_bundle(cache_dir: Path, key: BundleKey, make: PlanMaker) -> tuple[Bundle, bool]:
    """The bundle, built by `make` where there is none -> (bundle, whether it was there). One builder per key at a time
    on this machine: others wait for it. Raises `BuildError`. Quantized products that the library refused are not tried
    again.
    """
    path = key.folder(cache_dir)
    path.parent.mkdir(parents=True, exist_ok=True)
    with locked(path.with_suffix(".lock")):
        found = read_bundle(path, key)
        if isinstance(found, Bundle):
            return found, True
        refusal = path.with_suffix(".refused")
        if refusal.exists():
            raise _as_noted(refusal)
        _log.info("building %s: %s", path, found.reason)
        for leftover in path.parent.glob(f".building-{path.name}-*"):
            shutil.rmtree(leftover, ignore_errors=True)
        staging = Path(tempfile.mkdtemp(prefix=f".building-{path.name}-", dir=path.parent))
        try:
            make(staging)
            _finish(staging, path, key)
        except NetworkRefused as error:
            if not key.has_native_forms:  # nothing else is tried, so this is again: it may have been memory
                raise
            refusal.write_text(str(error))
            raise _as_noted(refusal) from error
        finally:
            shutil.rmtree(staging, ignore_errors=True)
        built = read_bundle(path, key)
    if isinstance(built, Miss):
        raise BuildError(f"{path} cannot be read back: {built.reason}")
    return built, False


def _as_noted(refusal: Path) -> NetworkRefused:
    """The library's words, and in the last line how to have them asked for again."""
    reason = refusal.read_text(errors="replace")
    return NetworkRefused(f"{reason}\n(noted in {refusal}: remove it to try again)")


def _finish(staging: Path, path: Path, key: BundleKey) -> None:
    plans = {plan.stem: _checksum(plan.read_bytes()) for plan in sorted(staging.glob("*.plan"))}
    recorded = staging / CANARY_FILE
    canary = json.loads(recorded.read_text()) if recorded.exists() else None
    recorded.unlink(missing_ok=True)
    (staging / MANIFEST).write_text(json.dumps({"key": key.fields, "plans": plans, "canary": canary}, indent=1))
    for file in staging.iterdir():
        _sync(file)
    _sync(staging)
    shutil.rmtree(path, ignore_errors=True)
    staging.rename(path)
    _sync(path.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def compile_in_children(model_dir: Path, spec: EngineSpec, library: Library, num_networks: int, log: Path) -> PlanMaker:
    """A `PlanMaker` that shares the networks out among builder processes. It raises `BuildError` with the log's tail
    when one fails or is killed.
    """
    count = max(1, min(_MOST_BUILDERS, num_networks, len(os.sched_getaffinity(0)) // 2))

    def make(out: Path) -> None:
        order = {"model_dir": str(model_dir), "spec": spec.as_json(), "flavour": library.flavour.value, "out": str(out)}
        with log.open("wb") as output:
            command: Sequence[str] = (sys.executable, "-m", _CHILD)
            children = [
                subprocess.Popen(command, stdin=subprocess.PIPE, stdout=output, stderr=subprocess.STDOUT)
                for _ in range(count)
            ]
            for index, child in enumerate(children):
                _send(child, {**order, "part": [index, count]})
            codes = [child.wait() for child in children]
        failed = sorted((code for code in codes if code), key=REFUSED.__eq__)  # a refusal is told where nothing else is
        if failed:
            if shutil.disk_usage(out).free < _LEAST_FREE_BYTES:  # the log could not say it
                raise BuildError(f"{out.parent}: no space left on the disk")
            if failed[0] == REFUSED:
                raise NetworkRefused(log_tail(log))
            raise builder_failure("the TensorRT builder", failed[0], log)
        written = len(list(out.glob("*.plan")))
        if written != num_networks:
            raise BuildError(f"the builder wrote {written} of {num_networks} plans; its log is {log}")

    return make


def _send(child: subprocess.Popen[bytes], order: Mapping[str, Any]) -> None:
    if child.stdin is None:
        raise BuildError("the builder has no input")
    child.stdin.write(json.dumps(order).encode())
    child.stdin.close()
