"""The kernel that leads from one round to the next, its own source run on the CPU, against what the host writes for the
same round: its acceptance, its round input, its block.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from importlib import resources
from pathlib import Path

import numpy as np
import pytest

from edgellm_worker.engine.api import GenerationRequest, SamplingParams
from edgellm_worker.engine.build.passes import StateLayout
from edgellm_worker.engine.ops.api import KvDtype
from edgellm_worker.engine.runtime.acceptance import Accepted, accept_rows
from edgellm_worker.engine.runtime.executor import RoundInput
from edgellm_worker.engine.runtime.rows import Row
from edgellm_worker.engine.runtime.sampling import RowSampler
from edgellm_worker.engine.runtime.scores import Candidates, RoundScores
from edgellm_worker.engine.runtime.speculative import _round_input
from edgellm_worker.engine.runtime.tensorrt_block import ChangeBlock, RoundBlock
from edgellm_worker.engine.runtime.tensorrt_rounds import ADVANCED, CHANGES

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++")

HEADER = Path(__file__).parents[1] / "support" / "cuda_on_cpu.hpp"
ENTRY = """
static int* p[16];
static int n[7];
static void thread() {
  advance_rows(p[0], p[1], p[2], p[3], p[4], p[5], p[6], p[7], p[8], p[9], p[10], p[11], p[12], p[13], p[14], p[15], n[0],
               n[1], n[2], n[3], n[4], n[5], n[6]);
}
extern "C" void run(void** pointers, int* numbers) {
  memcpy(p, pointers, sizeof p), memcpy(n, numbers, sizeof n);
  launch(1, thread);
}
"""
SLOTS, WIDTH, CANDIDATES = 5, 6, 3
LAYOUT = StateLayout(SLOTS, 4096, WIDTH, KvDtype.FLOAT16)


def compiled(folder: Path, change: tuple[str, str] = ("", "")) -> ctypes.CDLL:
    text = (resources.files("edgellm_worker.engine.runtime") / "kernels" / "advance.cu").read_text()
    assert change[0] in text
    source = folder / "advance.cpp"
    source.write_text(f'#include "{HEADER}"\n#define take_turn() ((void)0)\n{text.replace(*change)}{ENTRY}')
    library = folder / "advance.so"
    command = ["g++", "-std=c++20", "-O1", "-w", "-shared", "-fPIC", "-o", str(library), str(source)]
    made = subprocess.run(command, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr
    return ctypes.CDLL(str(library))


class OwnMemory:
    """A device whose memory is the host's."""

    def __init__(self) -> None:
        self._kept: list[np.ndarray] = []

    def pinned(self, shape: tuple[int, ...], dtype: type) -> np.ndarray:
        return np.zeros(shape, dtype)

    def allocate(self, num_bytes: int) -> int:
        self._kept.append(np.full(num_bytes // 4, 0x7E7E7E7E, np.int32))
        return self._kept[-1].ctypes.data

    def upload_async(self, pinned: np.ndarray, pointer: int) -> None:
        ctypes.memmove(pointer, pinned.ctypes.data, pinned.nbytes)


def device_copy(block: RoundBlock) -> np.ndarray:
    copy = np.empty_like(block.host)
    ctypes.memmove(copy.ctypes.data, block.device, copy.nbytes)
    return copy


class Case:
    """A round of random rows, some drafts of which are the best candidates, and the next one: of the same rows or, by
    every other seed, of those that stayed, in places of their own, and of some that joined.
    """

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.num_rows = int(rng.integers(1, SLOTS + 1))
        self.drafts, self.next_drafts = (int(count) for count in rng.integers(0, WIDTH, 2))
        self.slots = rng.permutation(SLOTS)[: self.num_rows].tolist()
        self.parity = rng.integers(0, 2, SLOTS).tolist()
        shape = (self.num_rows, self.drafts + 1, CANDIDATES)
        self.best = rng.integers(0, 1 << 17, shape).astype(np.int32)
        agrees = rng.random((self.num_rows, self.drafts)) < rng.choice([0.0, 0.7, 1.0])
        self.proposed = np.where(agrees, self.best[:, :-1, 0], self.best[:, :-1, 1] + 1).astype(np.int32)
        self.rows = [self._row(rng, slot) for slot in range(self.num_rows)]
        self.before = _round_input(self.rows)
        self.places: list[int | None] = list(range(self.num_rows))
        if seed % 2:
            staying = rng.permutation(self.num_rows)[: rng.integers(0, self.num_rows + 1)].tolist()
            num_free = SLOTS - len(staying)
            joining = [None] * int(rng.integers(0 if staying else 1, num_free + 1))
            both = [*staying, *joining]
            self.places = [both[i] for i in rng.permutation(len(both))]
        free = iter(
            [slot for slot in range(SLOTS) if slot not in {self.slots[p] for p in self.places if p is not None}]
        )
        self.new = [self._row(rng, 0) for place in self.places if place is None]
        for row in self.new:
            row.commit = 0  # after a prompt
        self.next_slots = [next(free) if place is None else self.slots[place] for place in self.places]

    def _row(self, rng: np.random.Generator, slot: int) -> Row:
        request = GenerationRequest((1,), 1000)
        row = Row(slot, request, RowSampler(SamplingParams(), (1,)), slot)
        row.pairs = tuple(rng.integers(0, 1 << 17, rng.integers(1, WIDTH + 1)).tolist())
        row.commit = len(row.pairs)
        row.position = int(rng.integers(20, 3000))
        return row

    def on_the_host(self) -> tuple[RoundInput, RoundBlock]:
        """The next round as the loop and the block put it."""
        falling = np.broadcast_to(np.arange(CANDIDATES, 0, -1, dtype=np.float32), self.best.shape)
        candidates = Candidates(falling, self.best, np.zeros(self.best.shape[:2], np.float32))
        for row, accepted in zip(
            self.rows,
            accept_rows(self.rows, self.proposed, RoundScores(self.drafts + 1, candidates, None)),
            strict=True,
        ):
            assert isinstance(accepted, Accepted)
            row.pairs = accepted.token_ids
            row.position += len(accepted.token_ids)
            row.commit = len(accepted.token_ids)
        parity = [bit ^ (slot in self.slots) for slot, bit in enumerate(self.parity)]
        new = iter(self.new)
        rows = [next(new) if place is None else self.rows[place] for place in self.places]
        block, batch = RoundBlock(OwnMemory(), LAYOUT), _round_input(rows)
        block.fill(batch, self.next_drafts, self.next_slots, parity)
        return batch, block

    def on_the_device(self, library: ctypes.CDLL) -> tuple[RoundInput, RoundBlock, np.ndarray]:
        block = RoundBlock(OwnMemory(), LAYOUT)
        block.fill(self.before, self.drafts, self.slots, self.parity)
        ids = block.view("ids")[: self.num_rows * (self.drafts + 1)].reshape(self.num_rows, -1)
        ids[:, 1:] = self.proposed
        block.upload()
        changes = ChangeBlock(OwnMemory(), LAYOUT)
        changes.fill(self.places, self.next_slots, _round_input(self.new) if self.new else None)
        changes.upload()
        is_same = self.places == list(range(self.num_rows))
        changed = [0 if is_same else changes.pointer(name) for name in CHANGES]
        steering = [block.pointer(name) for name in ADVANCED]
        pointers = (ctypes.c_void_p * 16)(*steering, *changed, self.best.ctypes.data)
        sizes = (self.num_rows, len(self.places), SLOTS, WIDTH, self.drafts, self.next_drafts, CANDIDATES)
        library.run(pointers, (ctypes.c_int * 7)(*sizes))
        copy = device_copy(block)
        batch, _ = block.read(copy, len(self.places), self.next_drafts)
        return batch, block, copy

    def differences(self, library: ctypes.CDLL) -> list[str]:
        wanted, wanted_block = self.on_the_host()
        found, block, copy = self.on_the_device(library)
        rows, apart = len(self.places), self.next_drafts + 1
        names = [
            name
            for name in ("position", "commit", "num_pairs")
            if (getattr(found, name) != getattr(wanted, name)).any()
        ]
        counts = wanted.num_pairs.tolist()
        if any((found.pairs[i, :n] != wanted.pairs[i, :n]).any() for i, n in enumerate(counts)):
            names.append("pairs")

        def differs(name: str, part: slice) -> bool:
            return bool((block.view(name, copy)[part] != wanted_block.view(name)[part]).any())

        parts = {name: slice(0, rows) for name in ("slots", "draft_start")}
        parts |= {"parity": slice(0, SLOTS), "ids": slice(0, rows * apart, apart)}
        names += [name for name, part in parts.items() if differs(name, part)]
        steps = [slice(step * SLOTS, step * SLOTS + rows) for step in range(1, self.next_drafts)]
        return names + ["next_start" for step in steps if differs("next_start", step)]


def test_the_device_goes_on_from_a_round_as_the_host_does(tmp_path: Path) -> None:
    library = compiled(tmp_path)
    for seed in range(150):
        assert not Case(seed).differences(library), seed


@pytest.mark.parametrize(
    "change",
    [
        ("folded = count = accepted + 1", "count = accepted + 1, folded = accepted"),
        ("own[accepted * candidates]) ++accepted", "own[(accepted + 1) * candidates]) ++accepted"),
        ("last_row[b] = count - 1", "last_row[b] = count"),
        ("position + next - 1", "position + next"),
        ("draft_start[b] = position - count", "draft_start[b] = position"),
        ("i < count", "i < count - 1"),
        ("parity[slots[b]] ^= 1", "parity[b] ^= 1"),
        ("ids[b * (next_drafts + 1)] =", "ids[b * (drafts + 1)] ="),
        ("__syncthreads();", ""),
        ("start[place] + count", "start[b] + count"),
        ("if (places) slots[b] = new_slots[b];", ""),
        ("folded = new_commit[b]", "folded = count"),
        ("b < rows", "b < next_rows"),
    ],
)
def test_a_mistake_in_it_would_be_seen(tmp_path: Path, change: tuple[str, str]) -> None:
    library = compiled(tmp_path, change)
    assert any(Case(seed).differences(library) for seed in range(150))
