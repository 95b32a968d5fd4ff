"""Stream one job's text: `python examples/stream.py "def fibonacci(n):"`. EDGELLM_REDIS_URL says where the queue is."""

from __future__ import annotations

import asyncio
import os
import sys

from edgellm_producer import Delta, Producer

URL = os.environ.get("EDGELLM_REDIS_URL", "redis://localhost")


async def main(prompt: str) -> None:
    async with Producer(URL) as producer:
        job = await producer.submit(prompt, max_tokens=64, temperature=0.0, stream=True)
        async for piece in job.stream():
            if isinstance(piece, Delta):
                print(piece.text, end="", flush=True)
            else:  # the job was started again and writes another text: forget what was printed
                print("\n--- restarted ---")
        result = await job.result()
    length = result.speculative.mean_acceptance_length
    print(f"\n[{result.finish_reason}, {result.usage.completion_tokens} tokens, {length:.2f} per step]")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "def fibonacci(n):"))
