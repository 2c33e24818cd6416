"""A small HTTP server on 127.0.0.1 that answers as a test tells it, badly too, and notes what it was asked."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class Reply:
    """One answer. A body that is not bytes is sent as JSON."""

    def __init__(
        self,
        body: Any = b"",
        *,
        status: int = 200,
        kind: str = "application/json",
        headers: dict[str, str] | None = None,
        delay: float = 0.0,
        drip: float | None = None,
        cut: int | None = None,
        reset: bool = False,
    ) -> None:
        self.body = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.status, self.kind, self.headers = status, kind, headers or {}
        self.delay = delay  # seconds before the first byte
        self.drip = drip  # seconds between bytes of the body
        self.cut = cut  # bytes of the body after which the connection closes
        self.reset = reset  # close without an answer


class Asked:
    """One request."""

    def __init__(self, method: str, path: str, headers: dict[str, str], body: bytes) -> None:
        self.method, self.path, self.headers = method, path, headers
        self.json: Any = json.loads(body) if body else None
        self.at = asyncio.get_running_loop().time()


class Loopback:
    """Answers from a list, then the last for ever; `now` and `most` count requests under way."""

    def __init__(self) -> None:
        self.asked: list[Asked] = []
        self.now = self.most = 0
        self.first = asyncio.Event()
        self.models: list[str] = ["tiny"]
        self._replies: list[Reply | Callable[[Asked], Reply]] = []
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        assert self._server is not None
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}/v1"

    def answers(self, *replies: Reply | Callable[[Asked], Reply]) -> None:
        self._replies = list(replies)

    @property
    def posts(self) -> list[Asked]:
        return [asked for asked in self.asked if asked.method == "POST"]

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            while asked := await _read(reader):
                self.asked.append(asked)
                self.first.set()
                if not await self._counted(asked, writer):
                    break
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _counted(self, asked: Asked, writer: asyncio.StreamWriter) -> bool:
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            return await self._answer(self._next(asked), writer)
        finally:
            self.now -= 1

    def _next(self, asked: Asked) -> Reply:
        if asked.method == "GET":
            return Reply({"data": [{"id": name} for name in self.models]})
        reply = self._replies.pop(0) if len(self._replies) > 1 else self._replies[0]
        return reply if isinstance(reply, Reply) else reply(asked)

    async def _answer(self, reply: Reply, writer: asyncio.StreamWriter) -> bool:
        """Whether the connection stays open."""
        await asyncio.sleep(reply.delay)
        if reply.reset:
            return False
        headers = {"Content-Type": reply.kind, "Content-Length": str(len(reply.body)), **reply.headers}
        head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        writer.write(f"HTTP/1.1 {reply.status} Whatever\r\n{head}\r\n".encode())
        body = reply.body[: reply.cut]
        for start in range(0, len(body), 1) if reply.drip is not None else ():
            writer.write(body[start : start + 1])
            await writer.drain()
            await asyncio.sleep(reply.drip or 0.0)
        if reply.drip is None:
            writer.write(body)
        await writer.drain()
        return reply.cut is None


async def _read(reader: asyncio.StreamReader) -> Asked | None:
    """One request; None where the client has gone."""
    first = await reader.readline()
    if not first:
        return None
    method, path, _ = first.decode().split()
    headers: dict[str, str] = {}
    while line := (await reader.readline()).decode().strip():
        name, _, value = line.partition(":")
        headers[name.lower()] = value.strip()
    return Asked(method, path, headers, await reader.readexactly(int(headers.get("content-length", 0))))


@contextmanager
def in_a_thread() -> Iterator[Loopback]:
    """A loopback whose loop runs beside the test, for code that brings a loop of its own."""
    loop, server = asyncio.new_event_loop(), Loopback()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        asyncio.run_coroutine_threadsafe(server.start(), loop).result(5)
        yield server
        asyncio.run_coroutine_threadsafe(server.stop(), loop).result(5)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(5)
        loop.close()
