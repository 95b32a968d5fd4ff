"""The same client without an event loop: a chat message, a tenant, a time limit, and an id to come back to."""

from __future__ import annotations

import os

from edgellm_producer import BlockingProducer, ResultTimeout

URL = os.environ.get("EDGELLM_REDIS_URL", "redis://localhost")


def main() -> None:
    with BlockingProducer(URL) as producer:
        job = producer.submit(
            messages=[{"role": "user", "content": "Write a Python function `add(a, b)`. What it does."}],
            max_tokens=48,
            temperature=0.0,
            tenant="example",
            timeout_s=120.0,
            idempotency_key="example-add-1",
        )
        try:
            print(job.result(timeout=100).text)
        except ResultTimeout:
            print(f"still running; ask again for {job.id}")


if __name__ == "__main__":
    main()
