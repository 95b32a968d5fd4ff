"""Bundles: whole or absent, one builder at a time, and a miss that says why."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from edgellm_worker.engine.build import bundle
from edgellm_worker.engine.build.bundle import Bundle, BundleKey, Miss, compile_in_children, ensure_bundle, read_bundle
from edgellm_worker.engine.build.canary import FILE as CANARY_FILE
from edgellm_worker.engine.build.canary import Canary
from edgellm_worker.engine.build.choice import Machine
from edgellm_worker.engine.build.segments import Segment, cut
from edgellm_worker.engine.build.spec import EngineSpec
from edgellm_worker.engine.build.weight_policy import WeightPolicy, WeightReader
from edgellm_worker.engine.checkpoint.weights import Nvfp4Weight
from edgellm_worker.engine.errors import BuildError, EngineError, NetworkRefused
from edgellm_worker.engine.ops.api import KvDtype
from edgellm_worker.engine.ops.graph import Dtype
from edgellm_worker.engine.ops.tensorrt import TensorRtOps
from edgellm_worker.engine.runtime import tensorrt_engine
from edgellm_worker.engine.trt import Flavour, Library
from tests.support.redis_server import wait_until
from tests.support.tensorrt_models import TINY, tiny_shapes

SPEC = EngineSpec(4, 512, 4, KvDtype.FLOAT16)
NETWORKS = ("a", "b")
LIBRARY = Library(None, Flavour.TENSORRT, (10, 15, 0))


@pytest.fixture(scope="module")
def key() -> BundleKey:
    return BundleKey.of(TINY, SPEC, LIBRARY, "sm90", NETWORKS)


def write(out: Path) -> None:
    (out / "a.plan").write_bytes(b"one")
    (out / "b.plan").write_bytes(b"two")


def test_a_bundle_is_built_once_and_read_back(tmp_path: Path, key: BundleKey) -> None:
    built, was_there = ensure_bundle(tmp_path, key, write)
    again, is_there = ensure_bundle(tmp_path, key, _never)
    assert (was_there, is_there) == (False, True)
    assert built.plans == again.plans == {"a": b"one", "b": b"two"}


@pytest.mark.parametrize(
    "change",
    [
        {"max_verify": 5},
        {"max_batch_size": 8},
        {"max_kv_cache_capacity": 1024},
        {"kv_dtype": KvDtype.FP8},
        {"prefill_chunk": 64},
        {"runs_fp8": True},
        {"optimization_level": 3},
    ],
)
def test_every_option_is_in_the_key(key: BundleKey, change: dict[str, object], tmp_path: Path) -> None:
    other = BundleKey.of(TINY, replace(SPEC, **change), LIBRARY, "sm90", NETWORKS)
    assert other.folder(tmp_path) != key.folder(tmp_path)


def test_library_gpu_and_checkpoint_are_in_the_key(key: BundleKey, tmp_path: Path) -> None:
    copy = tmp_path / "model"
    copy.mkdir()
    for file in TINY.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    (copy / "config.json").write_text((TINY / "config.json").read_text().replace("1e-06", "1e-05"))
    others = (
        BundleKey.of(TINY, SPEC, replace(LIBRARY, version=(10, 15, 1)), "sm90", NETWORKS),
        BundleKey.of(TINY, SPEC, LIBRARY, "sm110", NETWORKS),
        BundleKey.of(copy, SPEC, LIBRARY, "sm90", NETWORKS),
        BundleKey.of(TINY, SPEC, LIBRARY, "sm90", ("a", "c")),
    )
    assert len({k.folder(tmp_path) for k in (key, *others)}) == 5


def test_a_scale_that_is_a_constant_of_a_network_is_in_its_key() -> None:
    """So is the bundle's, where the files' digest does not see one number in a large file."""
    keys = []
    for scale in (0.5, 0.25):
        weight = Nvfp4Weight(
            np.zeros((16, 8), np.uint8), np.ones((16, 1), np.float32), np.float32(1), np.float32(scale)
        )
        ops = TensorRtOps(WeightReader(WeightPolicy(runs_fp8=True, runs_fp4=True)))
        graph = ops.graph({"y": ops.linear(ops.input("x", (1, 1, 16), Dtype.FLOAT16), weight)})
        keys.append([step.key for step in cut(graph) if isinstance(step, Segment)])
    assert len(keys[0]) == 1
    assert keys[0] != keys[1]


def test_a_plan_that_its_library_does_not_read_says_what_to_remove() -> None:
    module = SimpleNamespace(
        Runtime=lambda _logger: SimpleNamespace(deserialize_cuda_engine=lambda _plan: None),
        ILogger=type("ILogger", (), {"Severity": SimpleNamespace(ERROR=1)}),
    )
    with pytest.raises(
        EngineError, match=r"plan a cannot be read by tensorrt-10\.15\.0 on this GPU; remove /cache/x to"
    ):
        tensorrt_engine._loaded(Bundle(Path("/cache/x"), {"a": b"?"}), replace(LIBRARY, module=module), None)


def test_a_damaged_plan_is_a_miss_and_is_built_again(tmp_path: Path, key: BundleKey) -> None:
    built, _ = ensure_bundle(tmp_path, key, write)
    (built.path / "a.plan").write_bytes(b"onf")
    assert read_bundle(built.path, key) == Miss("damaged: a.plan is not what was written")
    again, was_there = ensure_bundle(tmp_path, key, write)
    assert not was_there
    assert again.plans["a"] == b"one"


def test_what_the_canary_must_write_is_kept_with_the_plans(tmp_path: Path, key: BundleKey) -> None:
    recorded = Canary((1, 2), (3, 4), (0.5, 1.25))

    def with_canary(out: Path) -> None:
        write(out)
        (out / CANARY_FILE).write_text(json.dumps(recorded.as_json()))

    built, _ = ensure_bundle(tmp_path, key, with_canary)
    assert built.canary == recorded
    assert read_bundle(built.path, key) == built


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"key": 1, "plans": {}}'])
def test_a_manifest_that_is_none_is_a_miss_with_a_reason(tmp_path: Path, key: BundleKey, content: str) -> None:
    built, _ = ensure_bundle(tmp_path, key, write)
    (built.path / "manifest.json").write_text(content)
    found = read_bundle(built.path, key)
    assert isinstance(found, Miss)
    assert found.reason.startswith(("damaged", "built for something else"))


def test_a_foreign_bundle_names_what_differs(tmp_path: Path, key: BundleKey) -> None:
    built, _ = ensure_bundle(tmp_path, key, write)
    other = BundleKey.of(TINY, replace(SPEC, max_verify=6), LIBRARY, "sm89", NETWORKS)
    expected = Miss("built for something else: gpu, max_draft_tree_size, max_verify_tree_size, options")
    assert read_bundle(built.path, other) == expected


def test_a_build_that_fails_leaves_nothing_to_be_taken_for_a_bundle(tmp_path: Path, key: BundleKey) -> None:
    def breaks(out: Path) -> None:
        write(out)
        raise BuildError("no")

    with pytest.raises(BuildError):
        ensure_bundle(tmp_path, key, breaks)
    assert read_bundle(key.folder(tmp_path), key) == Miss("not built yet")
    assert not list(key.folder(tmp_path).parent.glob(".building-*"))


def test_what_a_killed_builder_left_is_removed_by_the_next(tmp_path: Path, key: BundleKey) -> None:
    path = key.folder(tmp_path)
    leftover = path.parent / f".building-{path.name}-x"
    leftover.mkdir(parents=True)
    write(leftover)
    ensure_bundle(tmp_path, key, write)
    assert not leftover.exists()


def test_of_two_builders_one_builds_and_one_waits(tmp_path: Path, key: BundleKey, caplog) -> None:
    """And says so."""
    caplog.set_level("INFO")
    begun, go_on, built = threading.Event(), threading.Event(), []

    def slow(out: Path) -> None:
        begun.set()
        assert go_on.wait(20)
        write(out)
        built.append(out)

    results: list[tuple[Bundle, bool]] = []
    threads = [threading.Thread(target=lambda: results.append(ensure_bundle(tmp_path, key, slow))) for _ in range(2)]
    threads[0].start()
    assert begun.wait(20)
    threads[1].start()
    wait_until(lambda: "another process is building the same: waiting for it" in caplog.text, "the second's wait", 20)
    go_on.set()
    for thread in threads:
        thread.join(20)
    assert len(built) == 1
    assert sorted(was_there for _, was_there in results) == [False, True]


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (f"import os; os.kill(os.getpid(), {int(signal.SIGKILL)})", "was killed by signal 9"),
        ("import sys; print('out of luck'); sys.exit(3)", "exited 3.*\n.*out of luck"),
    ],
)
def test_a_builder_that_dies_is_reported_with_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, message: str
) -> None:
    module = tmp_path / "dying_builder.py"
    module.write_text("import sys; sys.stdin.read()\n" + script)
    monkeypatch.setattr(bundle, "_CHILD", "dying_builder")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    make = compile_in_children(TINY, SPEC, LIBRARY, 2, tmp_path / "log")
    with pytest.raises(BuildError, match=message):
        make(tmp_path)


def test_quantized_products_that_the_library_refused_are_not_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until the note is removed."""
    key = BundleKey.of(TINY, replace(SPEC, runs_fp8=True), LIBRARY, "sm110", NETWORKS)
    (tmp_path / "refused_builder.py").write_text("import sys; sys.stdin.read(); print('no FP8 here'); sys.exit(20)")
    monkeypatch.setattr(bundle, "_CHILD", "refused_builder")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    make = compile_in_children(TINY, SPEC, LIBRARY, 2, tmp_path / "log")
    note = key.folder(tmp_path).with_suffix(".refused")
    words = rf"^no FP8 here\n\(noted in {note}: remove it to try again\)$"
    for maker in (make, _never):
        with pytest.raises(NetworkRefused, match=words):
            ensure_bundle(tmp_path, key, maker)
    note.unlink()
    assert not ensure_bundle(tmp_path, key, write)[1]


def test_quantized_products_that_the_library_refuses_run_in_our_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog
) -> None:
    asked: list[EngineSpec] = []

    def compiling(_model_dir: Path, spec: EngineSpec, *_more: object):
        def make(out: Path) -> None:
            asked.append(spec)
            if spec.runs_fp8 or spec.runs_fp4:
                raise NetworkRefused("tensorrt cannot compile a network\nand much more")
            write(out)

        return make

    monkeypatch.setattr(tensorrt_engine, "compile_in_children", compiling)
    model, native = tiny_shapes("qwen3_5_text", "fp8"), replace(SPEC, runs_fp8=True, runs_fp4=True, packs=True)
    machine = Machine(LIBRARY, "sm110")
    built, was_there, spec = tensorrt_engine._bundle(TINY, model, native, machine, tmp_path)
    assert (was_there, spec) == (False, replace(native, runs_fp8=False, runs_fp4=False))
    assert asked == [native, spec]
    (note,) = tmp_path.rglob("*.refused")
    assert f"networks: tensorrt cannot compile a network (noted in {note}: remove it to try again)" in caplog.text
    again, is_there, _ = tensorrt_engine._bundle(TINY, model, native, machine, tmp_path)
    assert (again.path, is_there, len(asked)) == (built.path, True, 2)


def test_a_refusal_of_plain_networks_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refusing(*_order: object):
        def make(_out: Path) -> None:
            raise NetworkRefused("no")

        return make

    monkeypatch.setattr(tensorrt_engine, "compile_in_children", refusing)
    for _ in range(2):  # tried again: nothing else would be
        with pytest.raises(NetworkRefused, match=r"^no$"):
            tensorrt_engine._bundle(TINY, tiny_shapes("llama"), SPEC, Machine(LIBRARY, "sm110"), tmp_path)


def test_a_full_disk_is_called_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A builder that fails for it cannot write why into its log."""
    (tmp_path / "dying_builder.py").write_text("import sys; sys.stdin.read(); sys.exit(1)")
    monkeypatch.setattr(bundle, "_CHILD", "dying_builder")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    make = compile_in_children(TINY, SPEC, LIBRARY, 1, tmp_path / "log")
    with pytest.raises(BuildError, match="exited 1"):
        make(tmp_path)
    monkeypatch.setattr(bundle.shutil, "disk_usage", lambda _path: SimpleNamespace(free=4096))
    with pytest.raises(BuildError, match=f"^{tmp_path.parent}: no space left on the disk$"):
        make(tmp_path)


def test_a_builder_that_writes_too_little_is_not_called_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "idle_builder.py").write_text("import sys; sys.stdin.read()")
    monkeypatch.setattr(bundle, "_CHILD", "idle_builder")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(BuildError, match="wrote 0 of 2 plans"):
        compile_in_children(TINY, SPEC, LIBRARY, 2, tmp_path / "log")(tmp_path)


def test_a_killed_build_takes_its_builders_with_it(tmp_path: Path) -> None:
    (tmp_path / "slow_builder.py").write_text(
        "import os, pathlib, time\n"
        "from edgellm_worker.engine.build import child\n"
        "def slow(order):\n"
        "    pathlib.Path(order['out'], 'pid').write_text(str(os.getpid()))\n"
        "    time.sleep(60)\n"
        "child.compile_part = slow\n"
        "child.main()\n"
    )
    script = (
        "import sys, pathlib; from edgellm_worker.engine.build import bundle; from tests.unit import test_tensorrt_bundle as t;"
        "bundle._CHILD = 'slow_builder'; out = pathlib.Path(sys.argv[1]);"
        "bundle.compile_in_children(t.TINY, t.SPEC, t.LIBRARY, 1, out / 'log')(out)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    with subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], env=environment) as build:
        wait_until(
            lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text() != "", "a builder at work", 30
        )
        builder = int((tmp_path / "pid").read_text())
        build.kill()
    wait_until(lambda: not _runs(builder), "the builder's end", 10)


def _runs(pid: int) -> bool:
    """A killed process that nobody has waited for yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _never(out: Path) -> None:
    pytest.fail(f"built again into {out}")
