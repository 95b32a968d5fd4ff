"""What the executor gives a GPU, and in which order: rounds and prompts on streams of their own. Nothing runs here."""

from __future__ import annotations

import numpy as np
import pytest

from edgellm_worker.engine.build.spec import EngineSpec
from edgellm_worker.engine.checkpoint.weights import Array
from edgellm_worker.engine.errors import EngineError
from edgellm_worker.engine.ops.api import KvDtype
from edgellm_worker.engine.ops.graph import Lowering
from edgellm_worker.engine.runtime.executor import PrefillChunk, RoundInput
from edgellm_worker.engine.runtime.tensorrt_executor import TensorRtExecutor, TensorRtOptions
from tests.support.metered_device import ClosableNetworks, MeteredDevice
from tests.support.recording_device import IdleEvent, RecordedKernel
from tests.support.tensorrt_models import tiny_shapes

ROUNDS, PROMPTS = 0, 1


class OrderedDevice(MeteredDevice):
    """`order`: (stream, what was put on it, numbers). `constant`: addresses of what is uploaded once and stays."""

    def __init__(self) -> None:
        super().__init__()
        self.order: list[tuple[int, str, tuple[float, ...]]] = []
        self.constant: set[int] = set()
        self._free = 1 << 40

    def allocate(self, num_bytes: int, *, zero: bool = False) -> int:
        super().allocate(num_bytes, zero=zero)
        self._free += num_bytes + 256
        return self._free - num_bytes

    def upload(self, array: Array) -> int:
        self.constant.add(super().upload(array))
        return max(self.constant)

    def run(self, kernel: RecordedKernel, *launch: object, **_how: object) -> None:
        names = [name for name, known in self.kernels.items() if known is kernel]
        self.order.append((self.stream, names[0] if names else kernel.signature, tuple(launch[-1])))

    def download(self, _pointer: int, shape: tuple[int, ...], dtype: type) -> Array:
        return np.zeros(shape, dtype)

    def upload_async(self, pinned: Array, pointer: int) -> None:
        self.order.append((self.stream, "upload", (pointer,)))

    def event(self) -> IdleEvent:
        return OrderedEvent(self)


class OrderedEvent(IdleEvent):
    def __init__(self, device: OrderedDevice) -> None:
        self._device = device

    def hold_back(self) -> None:
        self._device.order.append((self._device.stream, "hold back", ()))


def executor_on(device: OrderedDevice, lowering: Lowering = Lowering.PRODUCTS) -> TensorRtExecutor:
    spec = EngineSpec(4, 256, 4, KvDtype.FLOAT16, prefill_chunk=32, packs=True, lowering=lowering)
    options = TensorRtOptions(32, use_graphs=False, lowering=lowering)
    model = tiny_shapes("qwen3_5_text", "nvfp4")
    return TensorRtExecutor(model, spec.layout, device, ClosableNetworks(), spec.reader(), options)


def batch_of(num_rows: int) -> RoundInput:
    one = np.ones(num_rows, np.int32)
    return RoundInput(np.zeros((num_rows, 1), np.int32), one, 20 * one, one)


def piece(length: int = 20) -> PrefillChunk:
    return PrefillChunk(np.zeros(length, np.int32), 0, None)


@pytest.mark.parametrize("lowering", Lowering)
def test_a_prompt_and_a_round_share_nothing_but_weights_and_state(lowering: Lowering) -> None:
    """Neither activations nor results nor what blocks of a kernel leave for each other: they run at the same time."""
    device = OrderedDevice()
    executor = executor_on(device, lowering)
    device.order.clear()
    executor.start_round(batch_of(3), 3, [None] * 3)()
    executor.follow_round(3, [0, 1, 2])()
    executor.follow_round(3, [0, None], batch_of(1))()
    executor.start_prefill(3, piece()).wait()
    executor.start_prefill(3, piece(4)).wait()
    used: tuple[set[float], set[float]] = (set(), set())
    for stream, _, numbers in device.order:
        used[stream].update(number for number in numbers if number >= 1 << 40)
    state = {binding.pointer for binding in executor.machine.state.values()}
    assert min(len(used[ROUNDS]), len(used[PROMPTS])) > 30
    assert used[ROUNDS] & used[PROMPTS] <= state | device.constant
    assert used[ROUNDS] & used[PROMPTS] & state


def test_a_slot_is_cleared_after_the_round_under_way_that_has_a_row_in_it() -> None:
    device = OrderedDevice()
    executor = executor_on(device)
    executor.start_round(batch_of(2), 3, [None] * 2)
    executor.swap(1, 3)  # the row of slot 1 left, and another took its place
    device.order.clear()
    executor.clear(3)
    executor.clear(2)
    assert [(stream, what) for stream, what, _ in device.order] == [
        (PROMPTS, "hold back"),
        (PROMPTS, "clear_slot"),
        (PROMPTS, "clear_slot"),
    ]


def test_a_round_that_follows_is_steered_by_the_device() -> None:
    device = OrderedDevice()
    executor = executor_on(device)
    executor.start_round(batch_of(2), 3, [None] * 2)
    device.order.clear()
    executor.follow_round(1, [0, 1])()
    kinds = [what for _, what, _ in device.order]
    assert kinds[0] == "advance_rows"
    assert "upload" not in kinds
    assert device.order[0][2][-7:] == (2, 2, 4, 4, 3, 1, 64)
    device.order.clear()
    executor.follow_round(2, [1, 0, None], batch_of(1))()
    kinds = [what for _, what, _ in device.order]
    assert kinds[:2] == ["upload", "advance_rows"]
    assert device.order[1][2][-7:] == (2, 3, 4, 4, 1, 2, 64)


def test_a_slot_is_cleared_after_the_last_round_with_its_row_though_another_followed() -> None:
    device = OrderedDevice()
    executor = executor_on(device)
    executor.start_round(batch_of(2), 3, [None] * 2)
    executor.swap(1, 3)
    executor.follow_round(3, [0])
    device.order.clear()
    executor.clear(3)
    assert [what for _, what, _ in device.order] == ["hold back", "clear_slot"]
    executor.follow_round(3, [0])
    device.order.clear()
    executor.clear(3)  # that round is over: it was waited for before another could follow
    assert [what for _, what, _ in device.order] == ["clear_slot"]


def test_logits_of_a_round_cannot_be_read_once_the_next_was_started() -> None:
    executor = executor_on(OrderedDevice())
    first = executor.start_round(batch_of(2), 3, [None] * 2)()
    assert first.scores.read_logits(1, 2).shape == (executor.machine.model.config.vocab_size,)
    executor.follow_round(3, [0, 1])
    with pytest.raises(EngineError, match="overwritten"):
        first.scores.read_logits(1, 2)


def test_nothing_follows_before_the_first_round() -> None:
    with pytest.raises(EngineError, match="no round"):
        executor_on(OrderedDevice()).follow_round(3, [0])


def test_a_pass_that_needs_more_than_was_reserved_is_not_run() -> None:
    executor = executor_on(OrderedDevice())
    rounds, recorder = executor.rounds, executor.machine.recorder
    rounds.lane.reserve([recorder.verify(1, 4)], rounds.results.bindings(1, 4))
    with pytest.raises(EngineError, match="a pass of 4 rows needs"):
        executor.run_round(batch_of(4), 3)
