"""No client library: one XADD of a msgpack map, one blocking XREAD of the reply stream.

What any language can do. It goes without the client's queue bound, idempotency and tenant turns (docs/protocol.md).
"""

from __future__ import annotations

import os
import uuid

import msgpack
import redis

URL = os.environ.get("EDGELLM_REDIS_URL", "redis://localhost")
PREFIX = "edgellm:{default}:"


def main() -> None:
    job_id = str(uuid.uuid4())
    job = {"v": 1, "id": job_id, "prompt": "def fibonacci(n):", "max_tokens": 32, "temperature": 0.0}
    with redis.Redis.from_url(URL, socket_timeout=70, protocol=2) as server:
        server.xadd(PREFIX + "jobs:normal", {"job": msgpack.packb(job)})
        # A job without `stream` gets one entry, its answer; with `stream`, `delta` entries come before `done`.
        ((_, entries),) = server.xread({PREFIX + "reply:" + job_id: "0"}, block=60_000)
        _, fields = entries[-1]
        reply = msgpack.unpackb(fields[b"done"])
        print(reply["status"], repr(reply["text"]))


if __name__ == "__main__":
    main()
