"""Peak memory of `edgellm-producer batch` over a long file, beside a short one: `python bench/batch_memory.py --check`.

A worker that answers at once stands at the other end. Memory is the peak resident set of the batch process alone, as
the kernel counted it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from edgellm_producer import Producer
from edgellm_worker.embedded import EmbeddedServer

LIMIT_MB = 200
ROOT = Path(__file__).parents[1]
WORKER = """
import asyncio, sys
from tests.support.instant_worker import instant_worker
async def main():
    async with instant_worker(sys.argv[1], "default", batch=256):
        await asyncio.Event().wait()
asyncio.run(main())
"""


def write_lines(path: Path, count: int) -> None:
    with path.open("w", encoding="utf-8") as file:
        for number in range(count):
            messages = [{"role": "user", "content": f"Question {number}: " + "what is this about? " * 8}]
            body = {"model": "tiny", "messages": messages, "max_tokens": 16}
            line = {"custom_id": f"q-{number}", "method": "POST", "url": "/v1/chat/completions", "body": body}
            file.write(json.dumps(line) + "\n")


def run_batch(url: str, folder: Path, count: int) -> dict[str, float]:
    source, output = folder / f"in-{count}.jsonl", folder / f"out-{count}.jsonl"
    write_lines(source, count)
    command = [str(Path(sys.executable).with_name("edgellm-producer")), "batch", str(source), "-o", str(output)]
    start = time.perf_counter()
    process = subprocess.Popen([*command, "--redis-url", url], stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    seconds = time.perf_counter() - start
    assert process.returncode == 0, f"exit code {process.returncode}"
    with output.open("rb") as file:
        answered = {json.loads(line)["custom_id"] for line in file}
    assert len(answered) == count, f"{len(answered)} of {count} lines answered"
    return {"lines": count, "peak_mb": round(usage.ru_maxrss / 1024, 1), "lines_per_s": round(count / seconds)}


async def set_bound(url: str) -> None:
    async with Producer(url) as producer:
        await producer.call("HSET", producer.keys.config, "max_jobs", 100_000)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lines", type=int, default=100_000)
    parser.add_argument("--check", action="store_true", help=f"fail above {LIMIT_MB} MB")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="edgellm-batch-") as name, EmbeddedServer() as server:
        asyncio.run(set_bound(server.url))
        worker = subprocess.Popen([sys.executable, "-c", WORKER, server.url], cwd=ROOT)
        try:
            rows = [run_batch(server.url, Path(name), count) for count in (arguments.lines // 10, arguments.lines)]
        finally:
            worker.terminate()
            worker.wait()
    print(json.dumps(rows, indent=2))
    return 1 if arguments.check and rows[-1]["peak_mb"] > LIMIT_MB else 0


if __name__ == "__main__":
    sys.exit(main())
