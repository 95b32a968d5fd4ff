"""dramatiq with Redis as broker and for results: `send` has no bulk form; its workers are threads, eight by default."""

from __future__ import annotations

import sys

import dramatiq
from dramatiq.brokers.redis import RedisBroker
from dramatiq.results import Results
from dramatiq.results.backends import RedisBackend
from peer import RESULT_TTL_S, URL
from server import Server

NUM_THREADS = 8

backend = RedisBackend(url=URL)
broker = RedisBroker(url=URL)
broker.add_middleware(Results(backend=backend, store_results=True, result_ttl=RESULT_TTL_S * 1000))
dramatiq.set_broker(broker)


@dramatiq.actor
def echo(number: int) -> int:
    return number


class Peer:
    settings = f"{NUM_THREADS} threads, hiredis"
    worker = (sys.executable, "-m", "dramatiq", "peer_dramatiq", "-p", "1", "-t", str(NUM_THREADS))

    async def open(self) -> None:
        pass

    async def submit(self, count: int) -> list[str]:
        return [backend.build_message_key(echo.send(number)) for number in range(count)]

    def waiting(self, server: Server, jobs: list[str]) -> list[str]:
        return server.without(jobs)

    async def close(self) -> None:
        broker.close()
