"""The demo: the whole product in one process and a child, on the tiny checkpoint that the package carries.

    producer ─▶ embedded server ─▶ worker (reference engine) ─▶ embedded server ─▶ producer

Nothing is special-cased: the jobs go through Redis, the numbers come from the replies and from /metrics. All jobs are
submitted at once, faster than they are served, so that batches fill by themselves. One job is wrong, one is cancelled
while it runs.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

from edgellm_producer.client import Producer
from edgellm_producer.errors import JobError
from edgellm_producer.job import SubmittedJob
from edgellm_producer.streaming import Restarted
from edgellm_producer.wire import Delta, Reply, Status
from edgellm_worker.app import assembled, daemon_config, redis_url
from edgellm_worker.config import Settings
from edgellm_worker.daemon import Daemon, DaemonParts
from edgellm_worker.metrics import Metrics
from edgellm_worker.metrics.server import MetricsServer

TINY_MODEL: Final = "tiny-qwen3.5-mtp"
MAX_TOKENS: Final = 64
LONG_TOKENS: Final = 600
CANCEL_AFTER_TOKENS: Final = 24
WRONG_MODEL: Final = "some-other-model"


@dataclass(frozen=True, slots=True)
class DemoJob:
    """`fields` go to the producer; `cancel` asks for a cancellation once it has written a little."""

    label: str
    fields: Mapping[str, Any]
    cancel: bool = False

    @property
    def is_greedy(self) -> bool:
        return self.fields.get("temperature") == 0.0


@dataclass(frozen=True, slots=True)
class DemoResult:
    job: DemoJob
    reply: Reply


Show = Callable[[int, DemoJob, str, Reply | None], None]
"""Called with a job's number, the job, its text so far, and its reply once there is one."""


def data_folder() -> Path:
    return Path(str(files("edgellm_worker") / "data"))


def demo_jobs() -> list[DemoJob]:
    jobs = []
    for entry in json.loads((data_folder() / "demo_jobs.json").read_text(encoding="utf-8")):
        label, request = entry.pop("label"), entry.pop("request", None)
        prompt = {"messages": [{"role": "user", "content": request}]} if request else {}
        jobs.append(DemoJob(label, {"temperature": 0.0, "max_tokens": MAX_TOKENS, "stream": True, **prompt, **entry}))
    wrong = {**jobs[0].fields, "model": WRONG_MODEL}
    long = {**jobs[1].fields, "max_tokens": LONG_TOKENS, "ignore_eos": True}
    jobs.insert(3, DemoJob("wrong model", wrong))
    jobs.insert(6, DemoJob("long, to be cancelled", long, cancel=True))
    return jobs


@dataclass(frozen=True, slots=True)
class DemoWorker:
    url: str
    metrics: Metrics
    metrics_url: str


@asynccontextmanager
async def demo_worker(settings: Settings) -> AsyncIterator[DemoWorker]:
    """A worker in this process, drained at the end."""
    with redis_url(settings) as url:
        async with assembled(settings, url) as parts:
            daemon = Daemon(
                DaemonParts(parts.queue, parts.engine, parts.model, parts.metrics, time.monotonic),
                daemon_config(settings),
            )
            with MetricsServer(
                daemon.render, daemon.snapshot, host=settings.metrics_host, port=settings.metrics_port
            ) as port:
                running = asyncio.create_task(daemon.run(), name="daemon")
                try:
                    yield DemoWorker(url, parts.metrics, port.url)
                finally:
                    daemon.stop()
                    await running


async def run_demo(settings: Settings, jobs: Sequence[DemoJob], show: Show) -> dict[str, Any]:
    """Run the jobs and return the summary."""
    async with demo_worker(settings) as worker, Producer(worker.url, queue=settings.queue) as producer:
        began = time.monotonic()
        submitted = await producer.submit_many([job.fields for job in jobs])
        results = await asyncio.gather(
            *(
                _follow(number, job, handle, show)
                for number, (job, handle) in enumerate(zip(jobs, submitted, strict=True))
            )
        )
        return summary(results, worker.metrics, worker.metrics_url, time.monotonic() - began)


async def _follow(number: int, job: DemoJob, handle: SubmittedJob, show: Show) -> DemoResult:
    """Stream one job to its end."""
    text, num_tokens, cancelled = "", 0, False
    try:
        async for event in handle.stream():
            text = "" if isinstance(event, Restarted) else text + event.text
            num_tokens += len(event.token_ids) if isinstance(event, Delta) else 0
            show(number, job, text, None)
            if job.cancel and not cancelled and num_tokens >= CANCEL_AFTER_TOKENS:
                cancelled = True
                await handle.cancel()
    except JobError:
        pass  # the reply says the same
    reply = await handle.reply()
    show(number, job, reply.text, reply)
    return DemoResult(job, reply)


def _acceptance(results: Sequence[DemoResult]) -> float:
    counts = [result.reply.speculative for result in results]
    num_drafted = sum(count.num_draft_tokens for count in counts)
    return sum(count.num_accepted_draft_tokens for count in counts) / num_drafted if num_drafted else 0.0


def summary(results: Sequence[DemoResult], metrics: Metrics, metrics_url: str, wall_s: float) -> dict[str, Any]:
    """The last line of the demo. Acceptance is accepted over verified drafts; a batch's mean size is rows per step."""
    by_status = Counter(result.reply.status for result in results)
    num_drafts = metrics.value("spec_decode_num_drafts_total")
    accepted = metrics.per_position("spec_decode_num_accepted_tokens_per_pos_total")
    num_steps = metrics.value("step_rows_count")
    return {
        "jobs": len(results),
        "ok": by_status[Status.OK],
        "rejected": by_status[Status.REJECTED],
        "cancelled": by_status[Status.CANCELLED],
        "failed": by_status[Status.FAILED] + by_status[Status.EXPIRED],
        "batches": round(metrics.value("batch_size_count")),
        "mean_batch_size": round(metrics.value("step_rows_sum") / num_steps, 2) if num_steps else 0.0,
        "tokens_per_second": round(sum(r.reply.usage.completion_tokens for r in results) / wall_s, 1),
        "draft_acceptance_rate": round(_acceptance(results), 3),
        "draft_acceptance_rate_greedy": round(_acceptance([r for r in results if r.job.is_greedy]), 3),
        "acceptance_per_position": [round(count / num_drafts, 3) if num_drafts else 0.0 for count in accepted],
        "metrics_url": metrics_url,
    }
