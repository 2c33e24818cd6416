"""The parent's side of the worker process: start it, ask it, bound it, replace it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import envace
from envace.errors import DataError, DeadlineError, SandboxError, WorkerDied

LINE_LIMIT = 256 << 20
"""Bytes of one answer line; batches of demonstrations are the longest."""


class Worker:
    """One worker process that holds environment definitions and sessions.

    Use it as an async context manager, inside one event loop. A request that gets no answer in time is first
    interrupted inside the worker; when that fails too, the process is killed and the next request starts a new one
    with the same definitions. Sessions of a killed process are lost: their next request raises WorkerDied.
    """

    def __init__(self, definitions: Sequence[dict[str, Any]], *, seconds: float = 5.0, grace: float = 2.0) -> None:
        self._definitions = {definition["environment"]: definition for definition in definitions}
        self._seconds, self._grace = seconds, grace
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None
        self._waiting: dict[int, tuple[asyncio.subprocess.Process, asyncio.Future[Any]]] = {}
        """Request -> the process it went to, and who waits: a late end of an old process must not hurt the new one."""
        self._ids = itertools.count()
        self._sessions = itertools.count()
        self._starting = asyncio.Lock()
        self._scratch = tempfile.TemporaryDirectory(prefix="envace-worker-")
        self._closed = False
        self.generation = 0
        """How often a process was started; a session is valid within one generation."""
        self.real_calls = 0
        """Calls executed on a task's real state since the worker was made."""

    async def __aenter__(self) -> Worker:
        try:
            await self._start()
        except BaseException:
            await self._close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._close()

    async def _close(self) -> None:
        """End for good."""
        self._closed = True
        await self._stop()
        self._scratch.cleanup()

    async def _start(self) -> None:
        """Start a process and load every definition. Raises DataError when code does not load."""
        root = str(Path(envace.__file__).parent.parent)
        bootstrap = f"import sys; sys.path.insert(0, {root!r}); from envace.sandbox.child import main; main()"
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-I",
            "-c",
            bootstrap,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            cwd=self._scratch.name,
            env={"PATH": os.defpath, "PYTHONHASHSEED": "0"},
            limit=LINE_LIMIT,
            start_new_session=True,
        )
        self.generation += 1
        self._reader = asyncio.create_task(self._read(self._process))
        for name, definition in self._definitions.items():
            try:
                await self._send("load", 20.0, definition)
            except SandboxError as error:
                await self._stop()
                if self.generation > 1:
                    raise WorkerDied(f"the replaced worker does not load {name!r}: {error}") from None
                raise DataError(f"environment {name!r} does not load: {error}") from None

    async def _stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            _kill(process)
            await process.wait()
        if self._reader is not None:
            await asyncio.gather(self._reader, return_exceptions=True)

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        """Hand each answer to whoever waits for it; when the process ends, tell everybody."""
        assert process.stdout is not None
        try:
            while line := await process.stdout.readline():
                answer = json.loads(line)
                _, future = self._waiting.pop(answer["id"], (None, None))
                if future is not None and not future.done():
                    future.set_result(answer)
        except (ValueError, KeyError):
            _kill(process)
        if self._process is process:
            self._process = None  # the next request starts another
        for number, (owner, future) in list(self._waiting.items()):
            if owner is process:
                del self._waiting[number]
                if not future.done():
                    future.set_exception(WorkerDied("the worker process ended before it answered"))
        await process.wait()

    async def ask(
        self, operation: str, *, seconds: float | None = None, generation: int | None = None, **fields: Any
    ) -> Any:
        """Send one request and return its value; `generation` names the process it must go to.

        Raises:
            DeadlineError: The code behind it did not finish in time.
            WorkerDied: The process ended.
            SandboxError: The request was refused, or environment code failed outside a tool call.
        """
        async with self._starting:
            if self._closed:
                raise WorkerDied(f"{operation}: the worker is closed")
            if self._process is None or self._process.returncode is not None:
                await self._start()
        if generation not in (None, self.generation):
            raise WorkerDied(f"{operation}: the worker of this session was replaced, its state is lost")
        return await self._send(operation, seconds or self._seconds, fields)

    async def _send(self, operation: str, seconds: float, fields: dict[str, Any]) -> Any:
        process = self._process
        assert process is not None and process.stdin is not None
        number = next(self._ids)
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting[number] = process, future
        request = {"id": number, "do": operation, "seconds": seconds, **fields}
        try:
            process.stdin.write(json.dumps(request).encode() + b"\n")
            queue = len(self._waiting)
            answer = await asyncio.wait_for(future, seconds * queue + self._grace)
        except asyncio.TimeoutError:
            if self._process is process:
                self._process = None
            _kill(process)
            raise DeadlineError(f"{operation}: no answer within {seconds} s; the worker was killed") from None
        except (BrokenPipeError, ConnectionResetError):
            raise WorkerDied(f"{operation}: the worker process is gone") from None
        finally:
            self._waiting.pop(number, None)
        if "error" in answer:
            kind, text = answer["error"]
            raise (
                DeadlineError(f"{operation}: {text}") if kind == "deadline" else SandboxError(f"{operation}: {text}")
            )
        return answer["value"]

    async def open(self, environment: str, state: dict[str, Any]) -> Session:
        """Open an episode on a task's real opening state."""
        return await self._session("open", environment=environment, state=state)

    async def imagine(self, environment: str) -> Session:
        """Open an imagined world: it has no state of a task, and cannot get one."""
        return await self._session("imagine", environment=environment)

    async def _session(self, operation: str, **fields: Any) -> Session:
        """A new session, of the process that opened it."""
        name = f"s{next(self._sessions)}"
        await self.ask(operation, session=name, **fields)
        return Session(self, name, self.generation)


class Session:
    """An episode or an imagined world inside a worker."""

    def __init__(self, worker: Worker, name: str, generation: int) -> None:
        self._worker, self.name, self.generation = worker, name, generation

    async def _ask(self, operation: str, **fields: Any) -> Any:
        return await self._worker.ask(operation, generation=self.generation, session=self.name, **fields)

    async def call(self, name: str, arguments: dict[str, Any]) -> Any:
        """Execute a call on the real state; counted."""
        self._worker.real_calls += 1
        return await self._ask("call", name=name, arguments=arguments)

    async def state(self) -> dict[str, Any]:
        """The tables as they are now."""
        state: dict[str, Any] = await self._ask("state")
        return state

    async def observe(self, name: str, arguments: dict[str, Any], response: Any) -> dict[str, Any]:
        """Judge a rehearsed response; see `ImaginedWorld.observe`."""
        verdict: dict[str, Any] = await self._ask("observe", name=name, arguments=arguments, response=response)
        return verdict

    async def determined(self, name: str, arguments: dict[str, Any]) -> bool:
        """Whether the response to a call follows from what was observed."""
        return bool(await self._ask("determined", name=name, arguments=arguments))

    async def grade(self, goal: dict[str, Any]) -> dict[str, Any]:
        """The oracle's doing in this imagined world, and its tables now."""
        grade: dict[str, Any] = await self._ask("grade", goal=goal)
        return grade

    async def close(self) -> None:
        """Free the session."""
        await self._ask("close")


def _kill(process: asyncio.subprocess.Process) -> None:
    """Kill a process that may have ended by itself."""
    with contextlib.suppress(ProcessLookupError):
        process.kill()
