"""A sweep over batch sizes and draft lengths: how fast an engine is at each, against the serialized run.

    repeat        every cell once; cells of all draft lengths and batch sizes take turns, so that a machine that gets
                  slower or faster in between does it to all of them
    cell          the same requests, at most `batch_size` of them at once, each joining as soon as another leaves (an
                  engine whose batches are closed: as soon as the batch is through)
    serialized    the cell with batch size 1 and the same drafts; plain is the one with batch size 1 and no drafts. A
                  ratio is always of two cells of one repeat

One engine is opened per repeat and draft length, made for the largest batch size of the sweep, and has run one request
before anything counts (weights are decoded, kernels loaded at first use). Rates are of the steps alone, without
tokenizer, queue or child process:

    decode tokens/s     tokens committed by rounds over the time of rounds
    tokens/s            all tokens over all steps, prompts included
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import cycle, islice
from typing import Final, Self

from edgellm_producer.errors import JobRejected
from edgellm_producer.wire import Job
from edgellm_worker.engine.api import Engine, GenerationRequest, Phase, StepReport
from edgellm_worker.engine.errors import DemandError, EngineError, RequestError
from edgellm_worker.engine.runtime.speculative_config import MAX_SPECULATIVE_TOKENS, SpeculativeConfig
from edgellm_worker.errors import ConfigError
from edgellm_worker.tokenizer import Tokenizer

ADAPTIVE: Final = "adaptive"
DEFAULT_ADAPTIVE_DRAFTS: Final = 5
_WARM_UP_TOKENS: Final = 8
_WARM_UP_ROW: Final = -1

Clock = Callable[[], float]
"""Seconds; only differences count."""
OpenEngine = Callable[[SpeculativeConfig], Engine]


@dataclass(frozen=True, slots=True)
class Cell:
    """One place of the table."""

    batch_size: int
    drafting: SpeculativeConfig

    @property
    def serialized(self) -> Cell:
        return replace(self, batch_size=1)


PLAIN: Final = Cell(1, SpeculativeConfig(0))


@dataclass(frozen=True, slots=True)
class CellRun:
    """One cell, once. `texts` are the tokens of every request. A rate without any step to measure it by is 0."""

    decode_tokens_per_s: float
    tokens_per_s: float
    acceptance: float
    mean_step_ms: float
    texts: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Spread:
    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Self:
        return cls(statistics.median(values), min(values), max(values))


@dataclass(frozen=True, slots=True)
class CellSummary:
    """`mean_step_ms` is of rounds, the ratios of decode tokens/s; `over_plain` is None in a sweep without 0 drafts."""

    batch_size: int
    drafts: str
    decode_tokens_per_s: Spread
    tokens_per_s: Spread
    acceptance: Spread
    mean_step_ms: Spread
    over_serialized: Spread
    over_plain: Spread | None


@dataclass(frozen=True, slots=True)
class SweepPlan:
    """`batch_sizes` holds 1."""

    batch_sizes: tuple[int, ...]
    draftings: tuple[SpeculativeConfig, ...]
    repeats: int

    @property
    def max_batch_size(self) -> int:
        return max(self.batch_sizes)


@dataclass(frozen=True, slots=True)
class SweepResult:
    """`runs` holds one run per repeat. `left_out` says why for drafts that the engine does not do."""

    runs: Mapping[Cell, Sequence[CellRun]]
    left_out: Mapping[str, str]

    @property
    def num_different_texts(self) -> int:
        """Requests whose tokens were not the same in all runs. An engine that is lossless and seeded has none, unless
        its numbers depend on the batch and two candidates were next to equal.
        """
        texts = [run.texts for of_cell in self.runs.values() for run in of_cell]
        return sum(len(set(of_request)) > 1 for of_request in zip(*texts, strict=True))

    def ratio(self, cell: Cell, base: Cell) -> Spread:
        """Decode tokens/s of `cell` over those of `base`, repeat by repeat."""
        pairs = zip(self.runs[cell], self.runs[base], strict=True)
        return Spread.of([_rate(one.decode_tokens_per_s, other.decode_tokens_per_s) for one, other in pairs])

    def summaries(self) -> list[CellSummary]:
        return [self._summary(cell) for cell in self.runs]

    def _summary(self, cell: Cell) -> CellSummary:
        runs = self.runs[cell]
        return CellSummary(
            batch_size=cell.batch_size,
            drafts=drafts_name(cell.drafting),
            decode_tokens_per_s=Spread.of([run.decode_tokens_per_s for run in runs]),
            tokens_per_s=Spread.of([run.tokens_per_s for run in runs]),
            acceptance=Spread.of([run.acceptance for run in runs]),
            mean_step_ms=Spread.of([run.mean_step_ms for run in runs]),
            over_serialized=self.ratio(cell, cell.serialized),
            over_plain=self.ratio(cell, PLAIN) if PLAIN in self.runs else None,
        )


def read_batch_sizes(text: str) -> tuple[int, ...]:
    """`1,2,4`; 1 is always among them, it is what the others are compared with. Raises `ValueError`."""
    sizes = {int(part) if part.strip().isdecimal() else 0 for part in text.split(",")}
    if 0 in sizes:
        raise ValueError(f"{text!r} is not a list of batch sizes such as 1,2,4")
    return tuple(sorted(sizes | {1}))


def read_drafts(text: str) -> tuple[SpeculativeConfig, ...]:
    """`0,1,3,adaptive`; adaptive may go up to the largest length beside it. Raises `ValueError`."""
    parts = [part.strip() for part in text.split(",")]
    fixed = sorted({int(part) for part in parts if part.isdecimal()})
    strange = [part for part in parts if not part.isdecimal() and part != ADAPTIVE]
    if strange or any(length > MAX_SPECULATIVE_TOKENS for length in fixed):
        raise ValueError(f"{text!r} is not a list of 0 to {MAX_SPECULATIVE_TOKENS} and {ADAPTIVE!r}, such as 0,3")
    most = max((*fixed, 0)) or DEFAULT_ADAPTIVE_DRAFTS
    adaptive = [SpeculativeConfig(most, adaptive=True)] if ADAPTIVE in parts else []
    return (*(SpeculativeConfig(length) for length in fixed), *adaptive)


def drafts_name(drafting: SpeculativeConfig) -> str:
    return ADAPTIVE if drafting.adaptive else str(drafting.num_speculative_tokens)


def bench_requests(
    tokenizer: Tokenizer, texts: Sequence[str], num_requests: int, max_new_tokens: int
) -> list[GenerationRequest]:
    """Greedy, ended by the checkpoint's EOS ids. Each text is a user's message where the checkpoint has a chat
    template, else a prompt as it stands; texts come round again when there are fewer than requests. Raises
    `ConfigError`.
    """
    requests = []
    for number, text in enumerate(islice(cycle(texts), num_requests)):
        given = {"messages": [{"role": "user", "content": text}]} if tokenizer.has_chat_template else {"prompt": text}
        try:
            prompt = tokenizer.prompt_token_ids(Job.model_validate({"id": f"bench-{number}", **given}))
        except JobRejected as error:
            raise ConfigError([f"prompt {number + 1}: {error}"]) from error
        requests.append(GenerationRequest(prompt, max_new_tokens, eos_token_ids=tokenizer.eos_token_ids))
    return requests


def sweep(
    plan: SweepPlan,
    open_engine: OpenEngine,
    requests: Sequence[GenerationRequest],
    clock: Clock,
    progress: Callable[[int, Cell], None] = lambda _repeat, _cell: None,
) -> SweepResult:
    """`progress` is called before each cell. Raises `ConfigError` for a request that this engine cannot take,
    `DemandError` where it can do none of the drafts, and what opening and running an engine raises.
    """
    cells = [Cell(size, drafting) for size in plan.batch_sizes for drafting in plan.draftings]
    runs: dict[Cell, list[CellRun]] = {cell: [] for cell in cells}
    left_out: dict[str, str] = {}
    for repeat in range(plan.repeats):
        for drafting in plan.draftings:
            name = drafts_name(drafting)
            if name in left_out:
                continue
            try:
                opened = open_engine(drafting)
            except DemandError as error:
                left_out[name] = str(error)
                continue
            with closing(opened) as engine:
                if engine.limits.num_speculative_tokens != drafting.num_speculative_tokens:
                    left_out[name] = engine.traits.speculative_method
                    continue
                _warm_up(engine, requests)
                for batch_size in plan.batch_sizes:
                    cell = Cell(batch_size, drafting)
                    progress(repeat, cell)
                    runs[cell].append(_Run(engine, batch_size, requests).run(clock))
    if not any(runs.values()):
        raise DemandError("\n".join(dict.fromkeys(left_out.values())))
    return SweepResult({cell: of_cell for cell, of_cell in runs.items() if of_cell}, left_out)


def _warm_up(engine: Engine, requests: Sequence[GenerationRequest]) -> None:
    for number, request in enumerate(requests):
        try:
            engine.validate(request)
        except RequestError as error:
            raise ConfigError([f"prompt {number + 1}: {error}"]) from error
    first = requests[0]
    engine.add(_WARM_UP_ROW, replace(first, max_new_tokens=min(first.max_new_tokens, _WARM_UP_TOKENS)))
    while engine.num_rows:
        engine.step()


class _Run:
    """One cell's run and its counts."""

    def __init__(self, engine: Engine, batch_size: int, requests: Sequence[GenerationRequest]) -> None:
        self._engine = engine
        self._batch_size = batch_size
        first_id = batch_size * len(requests)  # no batch size comes twice, so no row id does
        self._tokens: dict[int, list[int]] = {first_id + i: [] for i in range(len(requests))}
        self._waiting = deque(zip(self._tokens, requests, strict=True))
        self._key: Hashable = None
        self._rounds_s: list[float] = []
        self._prefill_s = 0.0
        self._num_decoded = self._num_drafted = self._num_accepted = 0

    def run(self, clock: Clock) -> CellRun:
        while self._waiting or self._engine.num_rows:
            self._admit()
            began = clock()
            report = self._engine.step()
            self._count(report, clock() - began)
        rounds_s, total = sum(self._rounds_s), sum(map(len, self._tokens.values()))
        return CellRun(
            decode_tokens_per_s=_rate(self._num_decoded, rounds_s),
            tokens_per_s=_rate(total, rounds_s + self._prefill_s),
            acceptance=_rate(self._num_accepted, self._num_drafted),
            mean_step_ms=1e3 * _rate(rounds_s, len(self._rounds_s)),
            texts=tuple(tuple(tokens) for tokens in self._tokens.values()),
        )

    def _admit(self) -> None:
        """As a worker would: free slots are filled in order, rows of different keys never meet."""
        engine, waiting = self._engine, self._waiting
        if not engine.num_rows:
            self._key = engine.compat_key(waiting[0][1])
        elif not engine.traits.in_flight:
            return
        while waiting and engine.num_rows < self._batch_size and engine.compat_key(waiting[0][1]) == self._key:
            engine.add(*waiting.popleft())

    def _count(self, report: StepReport, step_s: float) -> None:
        is_round = Phase.PREFILL not in report.phase_s
        if is_round:
            self._rounds_s.append(step_s)
        else:
            self._prefill_s += step_s
        for update in report.updates:
            if update.error is not None:
                raise EngineError(f"row {update.row_id}: {update.error}")
            self._tokens[update.row_id] += update.token_ids
            self._num_decoded += len(update.token_ids) if is_round else 0
            self._num_drafted += update.num_drafted
            self._num_accepted += update.num_accepted


def _rate(amount: float, per: float) -> float:
    return amount / per if per else 0.0
