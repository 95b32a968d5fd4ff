"""What the queue costs: enqueue to done with an engine that returns at once, against bare Redis, in the same run.

Prints the p50 of one job at a time for both, their ratio, the commands per job at batch 8 (as clients send them, and as
the server executes them inside scripts), and the rate of bulk submits. `--check` fails when a bound is broken.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from typing import Any

import redis.asyncio

from edgellm_producer import Producer, Reply, Status
from edgellm_worker.embedded import EmbeddedServer
from edgellm_worker.queue.api import Answer, Delivery
from edgellm_worker.queue.config import QueueConfig
from edgellm_worker.queue.redis_queue import RedisQueue

MAX_RATIO = 3.0
MAX_COMMANDS_PER_JOB = 4.0
MIN_BULK_PER_S = 20_000
NOT_COUNTED = {"info", "config|resetstat", "config", "client|unblock", "client|id", "xread", "ping", "hello"}
"""Waiting and measuring: the same whatever the number of jobs."""


def answered(delivery: Delivery) -> Answer:
    return Answer(delivery, Reply(id=delivery.id, status=Status.OK, text="text", token_ids=[1], attempt=1))


async def serve(queue: RedisQueue, size: int, stop: asyncio.Event) -> None:
    while not stop.is_set():
        deliveries = await queue.take(size)
        if not deliveries:
            await queue.wait(0.2)
            continue
        await queue.begin(deliveries)
        await queue.finish([answered(delivery) for delivery in deliveries])


async def product_round_trips(url: str, count: int) -> list[float]:
    queue = RedisQueue(QueueConfig(url=url, queue="one"))
    await queue.open()
    stop = asyncio.Event()
    task = asyncio.create_task(serve(queue, 8, stop))
    times = []
    async with Producer(url, queue="one") as producer:
        for number in range(count + 20):
            start = time.perf_counter()
            job = await producer.submit("x" * 100, max_tokens=16)
            await job.result()
            if number >= 20:
                times.append(time.perf_counter() - start)
    stop.set()
    await task
    await queue.close()
    return times


async def bare_round_trips(url: str, count: int) -> list[float]:
    """XADD; a blocked XREADGROUP; the reply with its time to live, XACK and XDEL in one pipeline; a blocked XREAD."""
    path = url.removeprefix("unix://")
    clients = [redis.asyncio.Redis(unix_socket_path=path, protocol=2, socket_timeout=10) for _ in range(2)]
    producer, worker = clients
    await worker.xgroup_create("bare", "g", "0", mkstream=True)
    times = []

    async def work() -> None:
        while True:
            reply = await worker.xreadgroup("g", "w", {"bare": ">"}, count=8, block=1000)
            for _, entries in reply or ():
                for entry, fields in entries:
                    if b"stop" in fields:
                        return
                    pipe = worker.pipeline(transaction=False)
                    pipe.xadd(b"r:" + fields[b"id"], {"done": b"x" * 300})
                    pipe.expire(b"r:" + fields[b"id"], 3600)
                    pipe.xack("bare", "g", entry)
                    pipe.xdel("bare", entry)
                    await pipe.execute()

    task = asyncio.create_task(work())
    for number in range(count + 20):
        start = time.perf_counter()
        await producer.xadd("bare", {"id": str(number), "job": b"x" * 150})
        await producer.xread({f"r:{number}": "0-0"}, block=5000)
        if number >= 20:
            times.append(time.perf_counter() - start)
    await producer.xadd("bare", {"stop": "1"})
    await task
    for client in clients:
        await client.aclose()
    return times


async def commands_per_job(url: str, jobs: int) -> tuple[float, float, dict[str, float]]:
    """Client commands are what the server reports as EVALSHA and plain calls; the rest runs inside those scripts."""
    queue = RedisQueue(QueueConfig(url=url, queue="eight"))
    await queue.open()
    path = url.removeprefix("unix://")
    admin = redis.asyncio.Redis(unix_socket_path=path, protocol=2)
    async with Producer(url, queue="eight") as producer:
        warm = await producer.submit("warm")
        deliveries = await queue.take(8)
        await queue.begin(deliveries)
        await queue.finish([answered(delivery) for delivery in deliveries])
        await warm.result()
        await admin.config_resetstat()
        submitted = [await producer.submit("x") for _ in range(jobs)]
        for _ in range(jobs // 8):
            deliveries = await queue.take(8)
            await queue.begin(deliveries)
            await queue.finish([answered(delivery) for delivery in deliveries])
        await asyncio.gather(*(job.result() for job in submitted))
        stats: dict[str, Any] = await admin.info("commandstats")
    await queue.close()
    await admin.aclose()
    calls = {name.removeprefix("cmdstat_"): row["calls"] for name, row in stats.items()}
    sent = sum(calls.get(name, 0) for name in ("evalsha", "eval", "xread"))
    inside = {n: c / jobs for n, c in calls.items() if n not in NOT_COUNTED | {"evalsha", "eval"}}
    return sent / jobs, sum(inside.values()), inside


async def bulk_rate(url: str, count: int) -> float:
    async with Producer(url, queue="bulk") as producer:
        await producer.call("HSET", producer.keys.config, "max_jobs", 10 * count)
        await producer.submit("warm")
        jobs = [{"prompt": f"prompt number {number}", "max_tokens": 16} for number in range(count)]
        start = time.perf_counter()
        await producer.submit_many(jobs)
        return count / (time.perf_counter() - start)


async def measure(jobs: int) -> dict[str, Any]:
    with EmbeddedServer() as server:
        bare, product = [], []
        for _ in range(3):  # interleaved: both see the same neighbours on this machine
            bare += await bare_round_trips(server.url, jobs // 3)
            product += await product_round_trips(server.url, jobs // 3)
            flush = redis.asyncio.Redis(unix_socket_path=str(server.socket_path))
            await flush.flushall()
            await flush.aclose()
        sent, inside, by_name = await commands_per_job(server.url, 400)
        rate = await bulk_rate(server.url, 20_000)
    p50_bare, p50_product = statistics.median(bare), statistics.median(product)
    return {
        "bare_p50_ms": round(p50_bare * 1000, 3),
        "product_p50_ms": round(p50_product * 1000, 3),
        "ratio": round(p50_product / p50_bare, 2),
        "client_commands_per_job_batch_8": round(sent, 2),
        "server_commands_per_job_batch_8": round(inside, 2),
        "server_commands": {name: round(count, 2) for name, count in sorted(by_name.items())},
        "bulk_submits_per_s": round(rate),
    }


def broken(result: dict[str, Any]) -> list[str]:
    bounds = (
        ("ratio", result["ratio"] <= MAX_RATIO, f"at most {MAX_RATIO}"),
        (
            "client_commands_per_job_batch_8",
            result["client_commands_per_job_batch_8"] <= MAX_COMMANDS_PER_JOB,
            f"at most {MAX_COMMANDS_PER_JOB}",
        ),
        ("bulk_submits_per_s", result["bulk_submits_per_s"] >= MIN_BULK_PER_S, f"at least {MIN_BULK_PER_S}"),
    )
    return [f"{name} is {result[name]}, wanted {wanted}" for name, holds, wanted in bounds if not holds]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=900)
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    result = asyncio.run(measure(arguments.jobs))
    print(json.dumps(result, indent=2))
    problems = broken(result)
    for problem in problems:
        print("!", problem)
    return 1 if arguments.check and problems else 0


if __name__ == "__main__":
    sys.exit(main())
