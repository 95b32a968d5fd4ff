"""Run many jobs, a bounded number at a time, and take each as it ends; wrong jobs are told apart from lost ones."""

from __future__ import annotations

import asyncio
import os

from edgellm_producer import JobRejected, Producer

URL = os.environ.get("EDGELLM_REDIS_URL", "redis://localhost")
PROMPTS = [f"def to_{unit}(value):" for unit in ("celsius", "kelvin", "miles", "grams", "litres", "radians")]


async def main() -> None:
    jobs = [{"prompt": prompt, "max_tokens": 32, "temperature": 0.7, "seed": 1} for prompt in PROMPTS]
    jobs.append({"prompt": "x", "model": "not-served-here"})
    async with Producer(URL) as producer:
        async for outcome in producer.map(jobs, concurrency=4, timeout_s=60):
            if outcome.reply is not None:
                print(f"{outcome.index}: {outcome.reply.text!r}")
            elif isinstance(outcome.error, JobRejected):
                print(f"{outcome.index}: wrong ({outcome.error.field}): {outcome.error.message}")
            else:
                print(f"{outcome.index}: try again later: {outcome.error}")


if __name__ == "__main__":
    asyncio.run(main())
