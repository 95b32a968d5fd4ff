"""Every network this product builds, compiled by NVIDIA's own compiler for the GPUs that can run it. No GPU needed."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest

from edgellm_worker.engine.build.builder import Builder, BuildSettings, RowRange, collecting_logger
from edgellm_worker.engine.build.passes import Recorder
from edgellm_worker.engine.build.spec import EngineSpec
from edgellm_worker.engine.checkpoint.weights import DenseWeight
from edgellm_worker.engine.errors import BuildError
from edgellm_worker.engine.ops.api import KvDtype
from edgellm_worker.engine.ops.graph import Lowering
from edgellm_worker.engine.trt import Flavour, Library, Target, load_library
from tests.support.tensorrt_models import qwen_27b, tiny_shapes
from tests.support.whole_27b import SPEC, first_layers

pytest.importorskip("tensorrt_rtx")

ALL = (Target.SM80, Target.SM86, Target.SM89, Target.SM120, Target.SM121)
BLACKWELL = (Target.SM120, Target.SM121)

# family, scheme, targets. Every family, scheme and target is met in every run; all their combinations in the soak.
MATRIX = (
    ("qwen3_5_text", "dense", (Target.SM80, Target.SM121)),
    ("qwen3_5_text", "fp8", (Target.SM89,)),
    ("qwen3_5_text", "fp8 weight-only", (Target.SM89,)),
    ("qwen3_5_text", "nvfp4", (Target.SM120,)),
    ("qwen3_5_text", "w4a16", (Target.SM121,)),
    ("qwen3", "dense", (Target.SM86, Target.SM120)),
    ("qwen3", "fp8", (Target.SM120,)),
    ("qwen3", "nvfp4", (Target.SM121,)),
    ("llama", "dense", (Target.SM89,)),
    ("llama", "fp8", (Target.SM121,)),
    ("llama", "w4a16", (Target.SM120,)),
)
FULL_MATRIX = tuple(
    (family, scheme, targets)
    for family in ("qwen3_5_text", "qwen3", "llama")
    for scheme, targets in (
        ("dense", ALL),
        ("fp8", (Target.SM89, *BLACKWELL)),
        ("fp8 weight-only", (Target.SM89, *BLACKWELL)),
        ("nvfp4", BLACKWELL),
        ("w4a16", BLACKWELL),
    )
)
RANGES = (RowRange(1, 6, 64),)

Combination = tuple[str, str, tuple[Target, ...]]
Record = Callable[[str, object], None]
SCORES = {"verified", "logits", "values", "best", "log_sum_exp"}


@pytest.fixture(scope="module")
def library() -> Library:
    return load_library(Flavour.TENSORRT_RTX)


def spec(target: Target, kv_dtype: KvDtype = KvDtype.FLOAT16) -> EngineSpec:
    return EngineSpec(4, 256, 4, kv_dtype, prefill_chunk=16, target=target, runs_fp8=True, runs_fp4=True)


@pytest.mark.timeout(300)
def test_networks_of_every_family_scheme_and_target_compile(library: Library, record_property: Record) -> None:
    done = compile_matrix(library, MATRIX, record_property)
    assert {target for target, _ in done} == set(ALL)


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_every_supported_combination_compiles(library: Library, record_property: Record) -> None:
    compile_matrix(library, FULL_MATRIX, record_property)


def compile_matrix(library: Library, matrix: tuple[Combination, ...], record: Record) -> dict[tuple[Target, str], int]:
    """Prefill, verify and the draft's passes; equal networks of one target are compiled once. Prints what there was."""
    done: dict[tuple[Target, str], int] = {}
    counts: Counter[tuple[str, str, Target]] = Counter()
    for family, scheme, targets in matrix:
        model = tiny_shapes(family, scheme)
        for target in targets:
            wanted = spec(target)
            builder = Builder(library, BuildSettings(target))
            for key, segment in wanted.segments(model, wanted.reader()).items():
                counts[family, scheme, target] += 1
                if (target, key) not in done:
                    done[target, key] = len(builder.compile(segment, RANGES))
    num_targets = len({target for target, _ in done})
    record("seen", f"{library.name}: {len(done)} distinct networks for {num_targets} targets")
    for (family, scheme, target), count in counts.items():
        record("seen", f"  {family:14s} {scheme:16s} {target:6s} {count} networks")
    assert min(done.values()) > 1000
    assert all(count >= 4 for count in counts.values())
    return done


@pytest.mark.parametrize(("lowering", "target"), [(Lowering.ROWS, Target.SM86), (Lowering.PRODUCTS, Target.SM121)])
def test_what_stands_around_packed_products_compiles(library: Library, lowering: Lowering, target: Target) -> None:
    """No network holds a quantized weight then, and some hold no product at all."""
    model = tiny_shapes("qwen3_5_text", "w4a16")
    wanted = replace(spec(target), runs_fp8=False, runs_fp4=False, packs=True, lowering=lowering)
    builder = Builder(library, BuildSettings(target))
    segments = wanted.segments(model, wanted.reader()).values()
    assert all(isinstance(weight, DenseWeight) for one in segments for node in one.nodes for weight in node.weights)
    assert min(len(builder.compile(segment, RANGES)) for segment in segments) > 1000


@pytest.mark.parametrize(("scheme", "target"), [("nvfp4", Target.SM89), ("w4a16", Target.SM89), ("fp8", Target.SM86)])
def test_a_gpu_that_lacks_the_type_is_refused_by_name(library: Library, scheme: str, target: Target) -> None:
    model = tiny_shapes("llama", scheme)
    wanted = spec(target)
    builder = Builder(library, BuildSettings(target))
    quantized = [
        s for s in wanted.segments(model, wanted.reader()).values() if any(g.is_matrix for g in s.weight_groups)
    ]
    with pytest.raises(BuildError, match=rf"cannot compile a network for {target}.*fp\d"):
        builder.compile(quantized[0], RANGES)
    assert not library.supports(target, fp8=True, fp4=scheme != "fp8")


# family, scheme, KV type, target of whole passes as one network.
WHOLE = (
    ("qwen3_5_text", "dense", KvDtype.FLOAT16, Target.SM80),
    ("qwen3_5_text", "nvfp4", KvDtype.FP8, Target.SM120),
    ("qwen3", "fp8", KvDtype.FLOAT16, Target.SM89),
    ("llama", "dense", KvDtype.FP8, Target.SM121),
)


@pytest.mark.timeout(300)
def test_whole_passes_compile_as_one_network_each(library: Library, record_property: Record) -> None:
    """Native attention and cache over float16, the decomposed form over FP8, the decomposed delta rule. Four layers hold
    every kind of layer.
    """
    sizes = {}
    for family, scheme, kv_dtype, target in WHOLE:
        model, wanted = first_layers(tiny_shapes(family, scheme), 4), spec(target, kv_dtype)
        recorder = Recorder(model, wanted.layout, wanted.reader())
        graphs = {"verify": recorder.verify(4, 4 if model.mtp else 1)}
        if model.mtp is not None:
            graphs |= {"draft first": recorder.draft_first(4, is_chosen=True), "draft next": recorder.draft_next(4)}
        builder = Builder(library, BuildSettings(target))
        for name, graph in graphs.items():
            sizes[family, scheme, kv_dtype, target, name] = len(builder.compile_whole(graph))
    assert min(sizes.values()) > 1000
    record_property("seen", f"{library.name}: {len(sizes)} whole passes as one network each")


@pytest.mark.timeout(1800)
def test_all_64_layers_of_the_27b_compile_as_one_network(record_property: Record) -> None:
    """Every layer's state goes in and comes out; memory is bounded, as all weights are inputs."""
    command = (sys.executable, "-m", "tests.support.whole_27b", "64")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    made = json.loads(done.stdout)
    state = {name for name in SPEC.layout.tensors(qwen_27b()) if name.startswith("base.")}
    assert {int(name.split(".")[1]) for name in state} == set(range(64))
    weights = {name for name in made["inputs"] if re.match(r"w\d+(\.|$)", name)}
    assert set(made["inputs"]) - weights == state | {"ids", "start", "commit"}
    assert set(made["outputs"]) == {f"{name}'" for name in state} | SCORES
    assert made["peak_bytes"] < 3e9
    record_property(
        "seen",
        f"64 layers as one network: {len(made['inputs'])} inputs ({len(weights)} of weights), {len(made['outputs'])} outputs,"
        f" {made['cpu_s']:.0f} s of CPU time, {made['plan_bytes'] / 1e6:.0f} MB, peak {made['peak_bytes'] / 1e9:.1f} GB",
    )


@pytest.mark.timeout(300)
def test_native_cache_updates_take_no_fp8(library: Library) -> None:
    """Why an FP8 cache is attended in the decomposed form: a library that takes it should get the native one."""
    trt = library.module
    logger = collecting_logger(library)
    network = trt.Builder(logger).create_network(0)
    cache, update = (
        network.add_input(name, trt.DataType.FP8, (1, 2, length, 64)) for name, length in (("c", 32), ("u", 4))
    )
    start = network.add_input("s", trt.DataType.INT32, (1,))
    layer = network.add_kv_cache_update(cache, update, start, trt.KVCacheMode.LINEAR)
    with pytest.raises(RuntimeError, match="shape"):
        _ = layer.get_output(0).shape
    assert "cache has type FP8 but must have type Float, Half, or BFloat16" in logger.text()


@pytest.mark.timeout(300)
def test_all_64_layers_of_the_public_27b_configuration_compile_for_spark(library: Library) -> None:
    """Mixed FP8 and W4A16 NVFP4 as its hf_quant_config.json says, 16-bit draft, FP8 cache; weights are inputs."""
    model = qwen_27b()
    wanted = spec(Target.SM121, KvDtype.FP8)
    segments = wanted.segments(model, wanted.reader())
    assert len(model.base.layers) == 64
    assert len(segments) < 20, "layers of one kind share their networks"
    builder = Builder(library, BuildSettings(Target.SM121))
    assert all(builder.compile(segment, RANGES) for segment in segments.values())
