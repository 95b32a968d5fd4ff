"""The client for code without an event loop: a thin front of `Producer`, whose loop runs in a thread of its own.

It may be shared by threads. It must not cross a fork: make one in each process.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Coroutine, Iterable, Iterator, Mapping
from types import TracebackType
from typing import Any, Self, TypeVar

from edgellm_producer.client import MapOutcome, Producer
from edgellm_producer.job import CancelOutcome, JobStatus, SubmittedJob
from edgellm_producer.streaming import Restarted
from edgellm_producer.wire import Delta, Reply

T = TypeVar("T")


class BlockingProducer:
    """`with BlockingProducer("redis://localhost") as producer:`; arguments and errors are `Producer`'s."""

    def __init__(
        self, url: str = "redis://localhost:6379", *, queue: str = "default", password: str | None = None
    ) -> None:
        self._producer = Producer(url, queue=queue, password=password)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="edgellm-producer", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self.call(self._producer.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run on the loop's thread and wait; an interrupt here cancels it there."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        finally:
            future.cancel()

    def iterate(self, items: AsyncIterator[T]) -> Iterator[T]:
        end = object()

        async def following() -> T | object:
            return await anext(items, end)

        try:
            while (item := self.call(following())) is not end:
                yield item  # type: ignore[misc]
        finally:
            if (close := getattr(items, "aclose", None)) is not None:
                self.call(close())

    def submit(self, prompt: str | None = None, **fields: Any) -> BlockingJob:
        return BlockingJob(self, self.call(self._producer.submit(prompt, **fields)))

    def submit_many(self, jobs: Iterable[Mapping[str, Any]]) -> list[BlockingJob]:
        return [BlockingJob(self, job) for job in self.call(self._producer.submit_many(jobs))]

    def job(self, job_id: str) -> BlockingJob:
        return BlockingJob(self, self._producer.job(job_id))

    def status(self, job_id: str) -> JobStatus:
        return self.call(self._producer.status(job_id))

    def cancel(self, job_id: str) -> CancelOutcome:
        return self.call(self._producer.cancel(job_id))

    def has_worker(self) -> bool:
        return self.call(self._producer.has_worker())

    def map(
        self, jobs: Iterable[Mapping[str, Any]], *, concurrency: int = 64, timeout_s: float | None = None
    ) -> Iterator[MapOutcome]:
        return self.iterate(self._producer.map(jobs, concurrency=concurrency, timeout_s=timeout_s))


class BlockingJob:
    def __init__(self, producer: BlockingProducer, job: SubmittedJob) -> None:
        self._producer = producer
        self._job = job

    @property
    def id(self) -> str:
        return self._job.id

    @property
    def is_duplicate(self) -> bool:
        return self._job.is_duplicate

    def result(self, timeout: float | None = None) -> Reply:
        return self._producer.call(self._job.result(timeout))

    def stream(self) -> Iterator[Delta | Restarted]:
        return self._producer.iterate(self._job.stream())

    def status(self) -> JobStatus:
        return self._producer.call(self._job.status())

    def cancel(self) -> CancelOutcome:
        return self._producer.call(self._job.cancel())
