"""One queue, measured once; run by run.py in that queue's own virtual environment. Prints one line of JSON.

bulk          submit `jobs` jobs with no worker there, `bulks` times from an empty server: jobs per second, median. One
              lasts a quarter of a second, and the first meets a cold process
end to end    a warm worker process; from the first submit until the last answer is in Redis
CPU           of the worker's process group, of Redis and of the submitting process, over the same jobs
round trip    one job at a time, submit until its answer is in Redis (asked for every 0.2 ms), median
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from peer import SOCKET, Peer
from server import Server

PEERS: Final = {
    "edgellm": ("edgellm_side", "QueuePeer"),
    "edgellm-daemon": ("edgellm_side", "DaemonPeer"),
    **{name: (f"peer_{name}", "Peer") for name in ("arq", "saq", "streaq", "dramatiq", "taskiq")},
}
NUM_WARM_UP: Final = 50
TIMEOUT_S: Final = 120.0
STOP_TIMEOUT_S: Final = 10.0


def cpu_s(process_group: int) -> float:
    """User and system seconds that the group's processes, and the children they waited for, have used."""
    ticks = 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        except OSError:
            continue  # it ended
        if int(fields[2]) == process_group:
            ticks += sum(map(int, fields[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


@contextmanager
def worker_of(peer: Peer) -> Iterator[int]:
    """Its process group."""
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(peer.worker, cwd=Path(__file__).parent, start_new_session=True, **quiet) as process:
        try:
            yield process.pid
        finally:
            os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)


async def answered(peer: Peer, server: Server, count: int, pause_s: float) -> float:
    """Submit, wait for all the answers; the seconds from the first submit."""
    start = time.perf_counter()
    jobs = await peer.submit(count)
    while jobs:
        left = peer.waiting(server, jobs)
        if len(left) == len(jobs):
            await asyncio.sleep(pause_s)
        if time.perf_counter() - start > TIMEOUT_S:
            raise TimeoutError(f"{len(left)} jobs without an answer")
        jobs = left
    return time.perf_counter() - start


async def bulk_rate(peer: Peer, server: Server, count: int) -> float:
    server("FLUSHALL")
    await peer.open()
    await peer.submit(1)
    start = time.perf_counter()
    await peer.submit(count)
    rate = count / (time.perf_counter() - start)
    await peer.close()
    return rate


async def measure(peer: Peer, server: Server, arguments: argparse.Namespace) -> dict[str, Any]:
    jobs = arguments.jobs
    bulks = [await bulk_rate(peer, server, jobs) for _ in range(arguments.bulks)]
    result: dict[str, Any] = {"settings": peer.settings, "bulk_per_s": round(statistics.median(bulks))}
    result["bulks"] = [round(rate) for rate in bulks]
    server("FLUSHALL")
    with worker_of(peer) as group:
        await peer.open()
        await answered(peer, server, NUM_WARM_UP, 0.01)
        before = cpu_s(group), server.cpu_s(), time.process_time()
        result["end_to_end_per_s"] = round(jobs / await answered(peer, server, jobs, 0.01))
        after = cpu_s(group), server.cpu_s(), time.process_time()
        for name, used, had in zip(("worker", "redis", "client"), after, before, strict=True):
            result[f"{name}_cpu_ms"] = round((used - had) / jobs * 1e3, 4)
        times = [await answered(peer, server, 1, 0.0002) for _ in range(arguments.trips)]
        result["round_trip_p50_ms"] = round(statistics.median(times) * 1e3, 2)
        await peer.close()
    return result


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("peer", choices=PEERS)
    parser.add_argument("--jobs", type=int, required=True)
    parser.add_argument("--bulks", type=int, required=True)
    parser.add_argument("--trips", type=int, required=True)
    arguments = parser.parse_args()
    module, kind = PEERS[arguments.peer]
    peer: Peer = getattr(importlib.import_module(module), kind)()
    with Server(SOCKET) as server:
        print(json.dumps(asyncio.run(measure(peer, server, arguments))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
