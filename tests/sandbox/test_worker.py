"""The worker process: hostile environment code is an observation or a named error, and never the end of the parent."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from envace.errors import DataError, DeadlineError, SandboxError, WorkerDied
from envace.sandbox import Session, Worker
from envace.scenarios import EnvironmentSpec, read_environment

HOSTILE = '''
import os, sys, time


class Hostile:
    """Everything that a generated environment can do to us."""

    STATE = {"things": {"key": "id", "record": {"type": "object"}}}

    def __init__(self):
        self.things = {}

    def put(self, id: str, value: object = None):
        self.things[id] = value
        return {"count": len(self.things)}

    def loop(self):
        while True:
            pass

    def stubborn_loop(self):
        while True:
            try:
                while True:
                    pass
            except BaseException:
                pass

    def leave(self):
        os._exit(3)

    def leave_politely(self):
        sys.exit("bye")

    def shout(self):
        print('{"id": 0, "value": "forged"}', flush=True)
        sys.stderr.write("noise")
        os.write(1, b"more noise\\n")
        return {"ok": True}

    def ask(self):
        return sys.stdin.read()

    def memory(self):
        return len(bytearray(3 << 30))

    def hoard(self):
        kept = []
        while True:
            kept.append(bytearray(64 << 20))

    def fail(self):
        raise KeyError("no such thing" * 100)

    def recurse(self):
        return self.recurse()

    def flood(self):
        return "x" * 200_000

    def most(self):
        return "x" * 90_000

    def cycle(self):
        one = []
        one.append(one)
        return one

    def nothing(self):
        return None

    def odd(self):
        return {1, 2}

    def change(self, values: list):
        values.append("changed")
        return values

    def fill_disk(self):
        with open("big", "wb") as file:
            file.write(b"x" * (8 << 20))

    def _secret(self):
        return "secret"


def solve(call, goal, slip=lambda name: False):
    if goal.get("do") == "leave":
        os._exit(3)
    return {"outcome": "done", "reply": "Done.", "facts": []}
'''


@pytest.fixture
def hostile(tmp_path: Path) -> EnvironmentSpec:
    path = tmp_path / "environment.py"
    path.write_text(HOSTILE)
    return read_environment(path, name="hostile")


@pytest.fixture
async def strict(hostile: EnvironmentSpec) -> AsyncIterator[Worker]:
    """A worker with short deadlines."""
    async with Worker([hostile.definition()], seconds=0.5, grace=0.7) as worker:
        yield worker


async def opened(worker: Worker, **things: Any) -> Session:
    return await worker.open("hostile", {"things": things})


async def works(worker: Worker) -> bool:
    session = await opened(worker)
    return bool(await session.call("put", {"id": "a"}) == {"count": 1})


async def test_an_endless_loop_is_a_deadline_error_and_the_worker_serves_on(strict: Worker) -> None:
    session, other = await opened(strict), await opened(strict, kept=1)
    with pytest.raises(DeadlineError, match=r"no answer within 0\.5 s"):
        await session.call("loop", {})
    assert strict.generation == 1
    assert await other.state() == {"things": {"kept": 1}}
    assert await session.call("put", {"id": "a"}) == {"count": 1}


async def test_a_loop_that_swallows_the_interrupt_is_killed_and_the_next_request_works(strict: Worker) -> None:
    session = await opened(strict)
    started = time.perf_counter()
    with pytest.raises(DeadlineError, match="killed"):
        await session.call("stubborn_loop", {})
    assert time.perf_counter() - started < 5
    assert await works(strict)
    assert strict.generation == 2
    with pytest.raises(WorkerDied, match="its state is lost"):
        await session.state()


async def test_exit_in_a_tool_is_a_named_error_and_the_next_request_works(strict: Worker) -> None:
    for generation in range(1, 6):  # again and again: a late end of the old process must not hurt the new one
        session = await opened(strict)
        assert strict.generation == generation
        with pytest.raises(WorkerDied):
            await session.call("leave", {})
    assert await works(strict)


async def test_everybody_who_waits_for_a_dying_worker_is_told(strict: Worker) -> None:
    session, others = await opened(strict), [await opened(strict) for _ in range(4)]
    calls = [session.call("leave", {}), *(other.call("put", {"id": "a"}) for other in others)]
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert all(isinstance(result, WorkerDied) for result in results)
    assert await works(strict)


async def test_a_worker_killed_from_outside_is_replaced(strict: Worker) -> None:
    session = await opened(strict)
    assert strict._process is not None
    strict._process.kill()
    await strict._process.wait()
    with pytest.raises(WorkerDied):
        await session.call("put", {"id": "a"})
    assert await works(strict)


async def test_prints_do_not_corrupt_the_protocol(strict: Worker) -> None:
    session = await opened(strict)
    for _ in range(3):
        assert await session.call("shout", {}) == {"ok": True}
    assert strict.generation == 1


async def test_code_cannot_read_our_requests(strict: Worker) -> None:
    session = await opened(strict)
    assert await session.call("ask", {}) == ""
    assert await session.call("put", {"id": "a"}) == {"count": 1}


@pytest.mark.parametrize("tool", ["memory", "hoard"])
async def test_a_memory_bomb_hits_the_limit(hostile: EnvironmentSpec, tool: str) -> None:
    async with Worker([hostile.definition()]) as worker:
        session = await opened(worker)
        answer = await session.call(tool, {})
        assert answer["error"] == "MemoryError"
        assert await works(worker)


async def test_files_are_limited(strict: Worker) -> None:
    session = await opened(strict)
    assert (await session.call("fill_disk", {}))["error"] == "OSError"
    assert await works(strict)


@pytest.mark.parametrize("name", ["_secret", "__init__", "__class__", "things", "solve", "nonsense", ""])
async def test_only_listed_tools_can_be_called(strict: Worker, name: str) -> None:
    session = await opened(strict)
    assert await session.call(name, {}) == {"error": "unknown_tool"}


@pytest.mark.parametrize("operation", ["nonsense", "_definition", "handle", "__init__", ""])
async def test_only_known_operations_are_served(strict: Worker, operation: str) -> None:
    with pytest.raises(SandboxError, match="unknown operation"):
        await strict.ask(operation)
    assert await works(strict)


async def test_an_unknown_environment_is_refused(strict: Worker) -> None:
    with pytest.raises(SandboxError, match="'nowhere' is not loaded"):
        await strict.open("nowhere", {})


@pytest.mark.parametrize(
    ("tool", "error"), [("fail", "KeyError"), ("recurse", "RecursionError"), ("leave_politely", "SystemExit")]
)
async def test_exceptions_are_observations(strict: Worker, tool: str, error: str) -> None:
    session = await opened(strict)
    answer = await session.call(tool, {})
    assert answer["error"] == error
    assert len(answer.get("detail", "")) <= 200


async def test_wrong_arguments_are_observations(strict: Worker) -> None:
    session = await opened(strict)
    assert (await session.call("put", {"nonsense": 1}))["error"] == "invalid_arguments"
    assert (await session.call("put", {}))["error"] == "invalid_arguments"


async def test_results_that_are_not_json_are_observations(strict: Worker) -> None:
    session = await opened(strict)
    assert "error" in await session.call("odd", {})
    assert "error" in await session.call("cycle", {})
    assert await session.call("nothing", {}) is None


async def test_huge_results_are_capped(strict: Worker) -> None:
    session = await opened(strict)
    assert await session.call("flood", {}) == {"error": "response_too_long"}
    assert len(await session.call("most", {})) == 90_000


async def test_state_is_never_shared_between_sessions(strict: Worker) -> None:
    opening = {"things": {"list": [1]}}
    one, two = await strict.open("hostile", opening), await strict.open("hostile", opening)
    await one.call("put", {"id": "a", "value": {"deep": []}})
    assert await one.state() == {"things": {"list": [1], "a": {"deep": []}}}
    assert await two.state() == opening == {"things": {"list": [1]}}


async def test_a_closed_session_is_gone(strict: Worker) -> None:
    session = await opened(strict)
    await session.close()
    with pytest.raises(SandboxError):
        await session.state()


async def test_a_tool_cannot_change_the_arguments_we_hold(strict: Worker) -> None:
    session, values = await opened(strict), ["mine"]
    assert await session.call("change", {"values": values}) == ["mine", "changed"]
    assert values == ["mine"]


async def test_real_calls_are_counted_and_nothing_else_is(strict: Worker) -> None:
    session = await opened(strict)
    await session.state()
    await session.call("put", {"id": "a"})
    await session.call("nonsense", {})
    assert strict.real_calls == 2


async def test_a_closed_worker_stays_closed(hostile: EnvironmentSpec) -> None:
    async with Worker([hostile.definition()]) as worker:
        session = await opened(worker)
    try:
        with pytest.raises(SandboxError):
            await session.call("put", {"id": "a"})
        assert worker.generation == 1
    finally:
        await worker._stop()


async def test_code_that_does_not_load_is_a_data_error(hostile: EnvironmentSpec) -> None:
    broken = {**hostile.definition(), "code": "raise RuntimeError('no')"}
    with pytest.raises(DataError, match=r"'hostile' does not load.*RuntimeError: no"):
        async with Worker([broken]):
            pass


async def test_answers_find_their_requests(strict: Worker) -> None:
    sessions = [await opened(strict) for _ in range(6)]
    for number, session in enumerate(sessions):
        for key in range(number):
            await session.call("put", {"id": str(key)})
    answers = await asyncio.gather(*(session.call("put", {"id": "x"}) for session in sessions))
    assert [answer["count"] for answer in answers] == [1, 2, 3, 4, 5, 6]


async def test_unusual_text_survives_both_ways(strict: Worker) -> None:
    session = await opened(strict)
    text = 'é\n漢字 🙂 \u2028 \x00 "quoted" \ud800'
    await session.call("put", {"id": text, "value": text})
    assert await session.state() == {"things": {text: text}}
