"""Device memory from shapes: the 27B configuration, the fleet's numbers, and what the executor will bind."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from edgellm_worker.cli.main import main
from edgellm_worker.engine.build.plan import plan_grid, plan_memory, verify_state_bytes_per_position
from edgellm_worker.engine.build.spec import EngineSpec
from edgellm_worker.engine.errors import CapacityError
from edgellm_worker.engine.models.registry import Model
from edgellm_worker.engine.ops.api import KvDtype
from edgellm_worker.engine.ops.graph import Lowering
from edgellm_worker.engine.runtime import tensorrt_engine, tensorrt_executor
from edgellm_worker.engine.runtime.attention_split import AttentionSplit
from edgellm_worker.engine.runtime.tensorrt_executor import TensorRtExecutor, TensorRtOptions
from tests.support.metered_device import ClosableNetworks, MeteredDevice, WeightlessStore
from tests.support.tensorrt_models import TINY, qwen_27b, tiny_shapes

SPEC = EngineSpec(4, 4096, 4, KvDtype.FP8, runs_fp8=True, runs_fp4=True)


@pytest.fixture(scope="module")
def large():
    return qwen_27b()


def test_a_verify_position_of_the_27b_costs_at_most_12_mb(large) -> None:
    """10.3 MB with every pending value once; the halves that are kept twice are reported beside it."""
    once = verify_state_bytes_per_position(large, SPEC, copies=1)
    kept = verify_state_bytes_per_position(large, SPEC, copies=2)
    assert once == 48 * 4 * (16 * 128 * 4 + 48 * 128 * 4 + 48 * 4 + 10240 * 2)
    assert once < 10.4e6
    assert once < kept <= 12e6


def test_that_cost_is_what_the_bindings_grow_by(large) -> None:
    """To the byte: pending of 5 positions less pending of 4, without the hidden states carried to the draft."""
    sizes = [
        sum(
            int(np.prod(shape)) * dtype.num_bytes
            for name, (shape, dtype) in replace(SPEC, max_verify=verify).layout.tensors(large).items()
            if "pending" in name
        )
        for verify in (4, 5)
    ]
    assert sizes[1] - sizes[0] == verify_state_bytes_per_position(large, SPEC, copies=2)


def test_the_recurrent_state_does_not_grow_with_the_draft_length(large) -> None:
    rows = plan_grid(large, SPEC, (1, 4), (1, 5))
    by_cell = {(row.max_batch_size, row.num_drafts): row.memory for row in rows}
    assert by_cell[4, 5].recurrent_state_bytes == by_cell[4, 1].recurrent_state_bytes
    assert by_cell[4, 1].recurrent_state_bytes == 4 * by_cell[1, 1].recurrent_state_bytes
    assert by_cell[4, 5].weights_bytes == by_cell[1, 1].weights_bytes


def test_kv_cache_is_one_byte_an_element_in_fp8(large) -> None:
    half = plan_memory(large, replace(SPEC, kv_dtype=KvDtype.FLOAT16)).kv_cache_bytes
    assert half == 2 * plan_memory(large, SPEC).kv_cache_bytes == 2 * 17 * 2 * 4 * 4 * 4096 * 256


def allocated(model: Model, spec: EngineSpec) -> int:
    """What an executor asks of its device until it is ready for jobs."""
    device = MeteredDevice()
    options = TensorRtOptions(spec.prefill_chunk, lowering=spec.lowering)
    executor = TensorRtExecutor(model, spec.layout, device, ClosableNetworks(), spec.reader(), options)
    executor.warm_up([spec.max_verify - 1])
    return device.allocated


@pytest.mark.parametrize(
    ("slots", "capacity", "verify", "lowering"),
    [(1, 32768, 1, Lowering.ROWS), (4, 4096, 4, Lowering.ROWS), (4, 4096, 4, Lowering.PRODUCTS)],
)
def test_what_is_planned_for_the_27b_is_what_a_start_allocates(
    large, monkeypatch: pytest.MonkeyPatch, slots: int, capacity: int, verify: int, lowering: Lowering
) -> None:
    """All but the weights, which are too large to make, and the scratch of networks, which only the library knows."""
    monkeypatch.setattr(tensorrt_executor, "WeightStore", WeightlessStore)
    spec = EngineSpec(slots, capacity, verify, KvDtype.FP8, packs=True, lowering=lowering)
    plan = plan_memory(large, spec)
    beside = allocated(large, spec) - (plan.kv_cache_bytes + plan.recurrent_state_bytes + plan.pending_bytes)
    assert beside <= plan.workspace_bytes <= 1.6 * beside


@pytest.mark.parametrize("lowering", Lowering)
@pytest.mark.parametrize("scheme", ["dense", "fp8", "nvfp4"])
@pytest.mark.parametrize("family", ["qwen3_5_text", "qwen3", "llama"])
def test_what_is_planned_holds_what_a_start_allocates_weights_included(
    family: str, scheme: str, lowering: Lowering
) -> None:
    spec = EngineSpec(3, 640, 4, KvDtype.FLOAT16, packs=True, lowering=lowering)
    model = tiny_shapes(family, scheme)
    plan = plan_memory(model, spec)
    parts = (plan.weights_bytes, plan.kv_cache_bytes, plan.recurrent_state_bytes, plan.pending_bytes)
    assert allocated(model, spec) <= sum(parts) + plan.workspace_bytes


def test_a_long_cache_does_not_make_partial_results_of_a_prompt_piece_long() -> None:
    """As they were up to 8192 positions; longer contexts are shared in longer spans."""
    heads = (1, 96, 24, 256)
    short, middle, long = (AttentionSplit.of_prompt(heads, 4, capacity) for capacity in (4096, 8192, 262144))
    assert (short.span, short.splits) == (128, 32)
    assert (middle.span, middle.splits) == (128, 64)
    assert (long.span, long.splits) == (4096, 64)
    assert long.num_bytes == middle.num_bytes < 160e6
    assert AttentionSplit.of_prompt((1, 128, 24, 256), 4, 262144).splits == 1


class SmallGpu:
    """What `_require_room` asks of a device."""

    def __init__(self, free_bytes: int) -> None:
        self._free_bytes = free_bytes

    def memory(self) -> tuple[int, int]:
        return self._free_bytes, 32 << 30


def test_a_gpu_without_room_is_refused_before_anything_is_built_or_loaded(large) -> None:
    plan = replace(plan_memory(large, SPEC), weights_bytes=20 << 30)
    tensorrt_engine._require_room(plan, SmallGpu(plan.total_bytes))
    with pytest.raises(
        CapacityError, match=r"needs 2\d\.\d\d GiB \(weights 20\.00.* of 32\.00 GiB free: fewer slots.*plan MODEL"
    ):
        tensorrt_engine._require_room(plan, SmallGpu(plan.total_bytes - 1))


def test_weights_without_a_draft_are_counted_without_it() -> None:
    model = tiny_shapes("qwen3_5_text")
    with_draft, without = (plan_memory(model, replace(SPEC, max_verify=verify)) for verify in (4, 1))
    assert with_draft.weights_bytes > without.weights_bytes > 0
    assert with_draft.kv_cache_bytes > without.kv_cache_bytes


def test_the_command_plans_what_was_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    """Tree sizes are the drafts that room is kept for; a cache type wins over the checkpoint's."""
    kv_bytes = []
    for flags in ([], ["--kv-cache-dtype", "fp8"]):
        assert main(["plan", str(TINY), "--json", "--max-verify-tree-size", "8", *flags], {}) == 0
        document = json.loads(capsys.readouterr().out)
        assert document["verify_state_bytes_per_position"]["one_copy"] == 62208
        rows = document["rows"]
        assert {row["num_drafts"] for row in rows} == {0, 1, 3, 5, 7}
        kv_bytes.append(rows[-1]["memory"]["kv_cache_bytes"])
    assert kv_bytes[0] == 2 * kv_bytes[1]
    assert main(["plan", str(TINY), "--max-verify-tree-size", "3"], {}) == 2
    assert "max-verify-tree-size 3 is below num_speculative_tokens + 1, 4" in capsys.readouterr().err


def test_a_cache_longer_than_the_models_positions_is_narrowed_and_said_to_be(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["plan", str(TINY), "--max-kv-cache-capacity", "100000"], {}) == 0
    assert "the model has 2048 positions: no row gets more of the cache" in capsys.readouterr().err


def test_the_command_prints_a_table_and_refuses_what_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(TINY), "--budget-gib", "8"], {}) == 0
    assert "a verify position costs" in capsys.readouterr().out
    assert main(["plan", str(TINY), "--budget-gib", "0.51"], {}) == 2
    captured = capsys.readouterr()
    assert "does not fit" in captured.out
    assert "4 rows with 3 drafts need" in captured.err


def test_the_command_refuses_forms_of_weights_that_the_checkpoint_does_not_have(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As a build would, and without a GPU."""
    assert main(["plan", str(TINY), "--quantization", "nvfp4,fp8"], {}) == 2
    assert capsys.readouterr().err == (
        "edgellm-worker: quantization fp8: the checkpoint has no such weights; its quantized ones are none\n"
        "edgellm-worker: quantization nvfp4: the checkpoint has no such weights; its quantized ones are none\n"
    )
