"""A TCP proxy that breaks connections on demand, in ways a network does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Proxy:
    """Between clients (TCP on `port`) and a server's unix socket.

    `cut()` resets every connection. `drop_next_reply(needle)` lets the first request that contains `needle` through to
    the server and cuts the connection once the server has answered: the reply is lost, the effect is not.
    `swallow` holds back all bytes in both directions while it is set, as a firewall does that forgot the connection.
    """

    def __init__(self, socket_path: str) -> None:
        self._socket_path = socket_path
        self._writers: set[asyncio.StreamWriter] = set()
        self._needle: bytes | None = None
        self._server: asyncio.Server | None = None
        self.swallow = False
        self.refuse = False
        self.num_dropped = 0

    @property
    def url(self) -> str:
        assert self._server is not None
        return f"redis://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        self.cut()
        await self._server.wait_closed()

    def cut(self) -> None:
        for writer in list(self._writers):
            writer.transport.abort()

    def drop_next_reply(self, needle: bytes) -> None:
        self._needle = needle

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.refuse:
            writer.transport.abort()
            return
        upstream_reader, upstream = await asyncio.open_unix_connection(self._socket_path)
        self._writers |= {writer, upstream}
        doomed = asyncio.Event()
        try:
            await asyncio.gather(
                self._requests(reader, upstream, doomed), self._replies(upstream_reader, writer, doomed)
            )
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self._writers -= {writer, upstream}
            writer.transport.abort()
            upstream.transport.abort()

    async def _requests(
        self, reader: asyncio.StreamReader, upstream: asyncio.StreamWriter, doomed: asyncio.Event
    ) -> None:
        while data := await reader.read(1 << 20):
            while self.swallow:
                await asyncio.sleep(0.02)
            if self._needle is not None and self._needle in data:
                self._needle = None
                doomed.set()
            upstream.write(data)
            await upstream.drain()
        raise ConnectionResetError

    async def _replies(
        self, upstream_reader: asyncio.StreamReader, writer: asyncio.StreamWriter, doomed: asyncio.Event
    ) -> None:
        while data := await upstream_reader.read(1 << 20):
            while self.swallow:
                await asyncio.sleep(0.02)
            if doomed.is_set():
                self.num_dropped += 1
                raise ConnectionResetError
            writer.write(data)
            await writer.drain()
        raise ConnectionResetError


@asynccontextmanager
async def proxy_to(socket_path: str) -> AsyncIterator[Proxy]:
    proxy = Proxy(socket_path)
    await proxy.start()
    try:
        yield proxy
    finally:
        await proxy.stop()
