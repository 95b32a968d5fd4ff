"""One native call: a closed batch from its rows to its counters.

    start ──▶ thread: handle_request ──▶ returns (or raises)
                 │ writes chunks                 │
    poll  ◀── stream channels             settle: rows whose channel never ended are read from the response

`handle_request` blocks for the whole batch without the interpreter lock, so it has a thread of its own, and what the
rows get is read from their channels meanwhile. The thread cannot be stopped: a runtime that hangs is the business of
the watchdog around the engine's process, which sees that no row makes progress.

Failures. One bad row fails a native call for all. The runtime marks such calls with a prefix; a batch that fails so
before any token came out is run again row by row, and then the row at fault is the only one that fails. Every other
exception means that the runtime itself is broken.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from edgellm_worker.engine.edgellm.fields import BatchFields, new_request, new_row
from edgellm_worker.engine.edgellm.native import NativeRuntime
from edgellm_worker.engine.edgellm.rows import Row
from edgellm_worker.engine.errors import EngineError

# The runtime's own marks of an error that the request caused.
REQUEST_ERROR_PREFIXES: Final = ("EDGELLM_INPUT_TOO_LONG", "EDGELLM_BAD_MEDIA_COUNT")


class RowsAtFaultError(Exception):
    """The runtime refused the whole call because of one of its rows."""


@dataclass(frozen=True, slots=True)
class DraftingCounters:
    """The runtime's own totals since it was loaded; they cover all rows and exist for drafted calls only."""

    num_rounds: int = 0
    num_generated: int = 0
    num_accepted: int = 0
    num_proposed: int = 0

    def since(self, before: DraftingCounters) -> DraftingCounters:
        return DraftingCounters(
            self.num_rounds - before.num_rounds,
            self.num_generated - before.num_generated,
            self.num_accepted - before.num_accepted,
            self.num_proposed - before.num_proposed,
        )


def read_counters(runtime: NativeRuntime) -> DraftingCounters:
    metrics = runtime.get_spec_decode_generation_metrics()
    return DraftingCounters(
        metrics.total_iterations,
        metrics.total_generated_tokens,
        metrics.total_accepted_draft_tokens,
        metrics.total_proposed_draft_tokens,
    )


def native_request(
    module: Any, fields: BatchFields, rows: Sequence[Row], texts: Sequence[str], max_generate_length: int
) -> Any:
    """The rows as one native request, each with a fresh channel that writes a chunk per round."""
    request = new_request(module, fields, max_generate_length)
    # Lists are copied by the binding: they are assigned whole, never appended to.
    request.requests = [
        new_row(module, text, row.request.sampling, seeded=fields.has_row_seeds)
        for row, text in zip(rows, texts, strict=True)
    ]
    channels = []
    for row in rows:
        channel = module.StreamChannel.create()
        channel.set_stream_interval(1)
        channel.set_skip_special_tokens(skip=False)
        row.attach(channel)
        channels.append(channel)
    request.stream_channels = channels
    return request


class NativeCall:
    """One running `handle_request`. `poll` and `settle` belong to one caller; the thread only runs the call."""

    def __init__(self, runtime: NativeRuntime, request: Any, rows: Sequence[Row]) -> None:
        self.rows = tuple(rows)
        self._request = request
        self._response: Any = None
        self._error: BaseException | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(
            target=self._run, args=(runtime.handle_request,), name="edgellm-call", daemon=True
        )
        self._thread.start()

    def _run(self, handle_request: Callable[[Any], Any]) -> None:
        try:
            self._response = handle_request(self._request)
        except BaseException as error:  # noqa: BLE001 - a thread's edge; `settle` raises it where it belongs
            self._error = error
        finally:
            self._ended.set()

    @property
    def has_ended(self) -> bool:
        return self._ended.is_set()

    def poll(self, timeout_ms: int) -> None:
        """Read all channels; wait up to `timeout_ms` for one of them when none has anything."""
        self._pull()
        if any(row.has_updates for row in self.rows) or self.has_ended:
            return
        running = next((row for row in self.rows if row.channel is not None), None)
        if running is None:  # every row reached its own end: the call is about to return
            self._ended.wait(timeout_ms / 1000)
        else:
            running.wait(timeout_ms)
        self._pull()

    def settle(self) -> None:
        """After the call ended: whatever the channels did not tell. Raises `RowsAtFaultError` or `EngineError`."""
        self._thread.join()
        self._pull()
        if self._error is not None:
            message = f"{self._error}"
            if isinstance(self._error, RuntimeError) and any(p in message for p in REQUEST_ERROR_PREFIXES):
                raise RowsAtFaultError(message) from self._error
            raise EngineError(f"the native call failed: {self._error!r}") from self._error
        response = self._response
        if len(response.output_ids) != len(self.rows) or len(response.finish_reasons) != len(self.rows):
            message = f"the native call returned {len(response.output_ids)} rows for {len(self.rows)}"
            raise EngineError(message)
        logprobs = list(response.logprobs) or [[] for _ in self.rows]
        for row, token_ids, entries, reason in zip(
            self.rows, response.output_ids, logprobs, response.finish_reasons, strict=True
        ):
            row.take_rest(list(token_ids), list(entries), reason.name)

    def abandon(self, timeout_s: float) -> bool:
        """Cancel every row and wait; False when the runtime does not come back."""
        for row in self.rows:
            row.drop()
        return self._ended.wait(timeout_s)

    def _pull(self) -> None:
        for row in self.rows:
            row.pull()
