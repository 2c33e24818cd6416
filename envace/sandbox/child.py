"""The worker process: one JSON request a line on standard input, one JSON answer a line.

Run as `python -I -m envace.sandbox.child`. It holds environment classes and the episodes opened on them, and nothing
else of ours: no model, no scenario file. Every request is bounded by an alarm, so a loop in environment code is an
error, not a hang; the parent kills the process when even that does not help.

What this covers: crashes, endless loops, memory and output floods, prints on standard output. It is a process boundary
with limits, **not yet a security boundary**: code here can still read files and open sockets.
"""

from __future__ import annotations

import copy
import inspect
import json
import os
import random
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from envace.sandbox.imagined import ImaginedWorld

MAX_RESPONSE_CHARACTERS = 100_000
MEMORY_BYTES = 1 << 30


class Overtime(BaseException):
    """Raised by the alarm inside environment code; a BaseException so that `except Exception` there cannot eat it."""


class Refused(Exception):
    """A request that cannot be served; its text is the answer."""


class Definition:
    """A loaded environment: its class, its oracle program, its tables and tools."""

    def __init__(self, request: dict[str, Any]) -> None:
        namespace: dict[str, Any] = {"__name__": f"environment_{request['environment']}"}
        exec(compile(request["code"], f"<{request['environment']}>", "exec"), namespace)
        self.entry = namespace[request["entry"]]
        self.solve = namespace.get("solve")
        self.tables: dict[str, Any] = request["tables"]
        self.lookups: dict[str, str] = request["lookups"]
        self.tools: set[str] = set(request["tools"])
        self.positional = {name: _positional_only(getattr(self.entry, name)) for name in self.tools}

    def build(self, state: dict[str, Any]) -> Any:
        """An instance in a given opening state: constructed empty, then every table set."""
        instance = self.entry()
        for name, value in state.items():
            setattr(instance, name, value)
        return instance

    def call(self, instance: Any, name: str, arguments: dict[str, Any]) -> Any:
        """Call a listed tool; whatever it raises is an observation. The result is plain JSON data."""
        if name not in self.tools:
            return {"error": "unknown_tool"}
        named = copy.deepcopy(arguments)
        try:
            given = [named.pop(argument) for argument in self.positional.get(name, ()) if argument in named]
            result = getattr(instance, name)(*given, **named)
            text = json.dumps(result)
        except TypeError as error:
            return {"error": "invalid_arguments", "detail": str(error)[:200]}
        except Overtime:
            raise
        except BaseException as error:  # noqa: BLE001 - a tool may raise anything, and that is what it answers
            return {"error": type(error).__name__, "detail": str(error)[:200]}
        if len(text) > MAX_RESPONSE_CHARACTERS:
            return {"error": "response_too_long"}
        return json.loads(text)

    def state(self, instance: Any) -> dict[str, Any]:
        """The tables of an instance as plain data."""
        plain: dict[str, Any] = json.loads(json.dumps({name: getattr(instance, name) for name in self.tables}))
        return plain

    def imagine(self) -> ImaginedWorld:
        """An empty imagined world under this environment's rules."""
        return ImaginedWorld(self.build, tables=self.tables, lookups=self.lookups, call=self.call, solve=self.solve)


def _positional_only(method: Any) -> list[str]:
    """Names of the arguments that cannot be given by name, without `self`."""
    parameters = list(inspect.signature(method).parameters.values())[1:]
    return [parameter.name for parameter in parameters if parameter.kind is parameter.POSITIONAL_ONLY]


class Server:
    """Definitions and open sessions; `handle` maps a request to an answer."""

    def __init__(self) -> None:
        self.definitions: dict[str, Definition] = {}
        self.episodes: dict[str, tuple[Definition, Any]] = {}
        self.worlds: dict[str, ImaginedWorld] = {}

    def handle(self, request: dict[str, Any]) -> Any:
        """Answer one request. Raises Refused for what cannot be served."""
        operation = getattr(self, f"on_{request['do']}", None)
        if operation is None:
            raise Refused(f"unknown operation {request['do']!r}")
        return operation(request)

    def _definition(self, request: dict[str, Any]) -> Definition:
        if request["environment"] not in self.definitions:
            raise Refused(f"environment {request['environment']!r} is not loaded")
        return self.definitions[request["environment"]]

    def on_load(self, request: dict[str, Any]) -> Any:
        """Load an environment's code."""
        self.definitions[request["environment"]] = definition = Definition(request)
        definition.build({name: {} for name in definition.tables})
        return {"oracle": definition.solve is not None}

    def on_open(self, request: dict[str, Any]) -> Any:
        """Open an episode on a task's real opening state."""
        definition = self._definition(request)
        self.episodes[request["session"]] = (definition, definition.build(request["state"]))
        return {}

    def on_call(self, request: dict[str, Any]) -> Any:
        """Execute one call."""
        definition, instance = self.episodes[request["session"]]
        return definition.call(instance, request["name"], request["arguments"])

    def on_state(self, request: dict[str, Any]) -> Any:
        """The state of an episode."""
        definition, instance = self.episodes[request["session"]]
        return definition.state(instance)

    def on_imagine(self, request: dict[str, Any]) -> Any:
        """Open an imagined world: no state is given, and none is read."""
        self.worlds[request["session"]] = self._definition(request).imagine()
        return {}

    def on_observe(self, request: dict[str, Any]) -> Any:
        """Judge one rehearsed response."""
        return self.worlds[request["session"]].observe(request["name"], request["arguments"], request["response"])

    def on_determined(self, request: dict[str, Any]) -> Any:
        """Whether a response would follow from what was shown so far."""
        return self.worlds[request["session"]].determined(request["name"], request["arguments"])

    def on_grade(self, request: dict[str, Any]) -> Any:
        """What should have been done in an imagined world, and what its tables are now."""
        world = self.worlds[request["session"]]
        return {"oracle": world.oracle(request["goal"]), "final_state": world.final_state()}

    def on_close(self, request: dict[str, Any]) -> Any:
        """Forget a session of either kind."""
        self.episodes.pop(request["session"], None)
        self.worlds.pop(request["session"], None)
        return {}

    def on_demonstrate(self, request: dict[str, Any]) -> Any:
        """Run the oracle program on many opening states, with slips where asked for."""
        definition = self._definition(request)
        if definition.solve is None:
            raise Refused("this environment has no `solve` function, so it cannot demonstrate")
        return [demonstrate(definition, item) for item in request["items"]]

    def on_procedure(self, request: dict[str, Any]) -> Any:
        """What the oracle program does when its calls get the responses that stand in a transcript."""
        definition = self._definition(request)
        return follow(definition, request["goal"], request["exchanges"], set(request["slips"]))


def demonstrate(definition: Definition, item: dict[str, Any]) -> dict[str, Any]:
    """One demonstration: the calls with their responses, the reply, and the state before and after."""
    instance = definition.build(copy.deepcopy(item["state"]))
    chance, rng = item.get("carelessness", 0.0), random.Random(item.get("seed", 0))
    calls: list[dict[str, Any]] = []

    def call(name: str, **arguments: Any) -> Any:
        response = definition.call(instance, name, arguments)
        calls.append({"name": name, "arguments": arguments, "response": response})
        return copy.deepcopy(response)

    def slip(name: str) -> bool:
        return bool(rng.random() < chance)

    assert definition.solve is not None
    result = definition.solve(call, copy.deepcopy(item["goal"]), slip)
    return {**result, "calls": calls, "final_state": definition.state(instance)}


def follow(
    definition: Definition, goal: dict[str, Any], exchanges: list[dict[str, Any]], slips: set[str]
) -> dict[str, Any]:
    """Run the oracle program against recorded responses: each call takes the first unused response to an equal call."""
    unused = list(exchanges)
    calls: list[dict[str, Any]] = []

    class NeverAsked(Exception):
        """The transcript has no response to this call."""

    def call(name: str, **arguments: Any) -> Any:
        calls.append({"name": name, "arguments": arguments})
        for exchange in unused:
            if exchange["name"] == name and exchange["arguments"] == arguments:
                unused.remove(exchange)
                return copy.deepcopy(exchange["response"])
        raise NeverAsked

    if definition.solve is None:
        return {"determined": False, "calls": []}
    try:
        result = definition.solve(call, copy.deepcopy(goal), lambda name: name in slips)
    except NeverAsked:
        return {"determined": False, "calls": calls}
    except Exception:  # noqa: BLE001 - the oracle met a response no real tool gives (a rehearsed one of a wrong shape)
        return {"determined": False, "calls": calls}
    return {"determined": True, "calls": calls, **result}


@contextmanager
def alarm(seconds: float) -> Iterator[None]:
    """Raise Overtime in the code inside once the time is up."""

    def ring(signum: int, frame: Any) -> None:
        raise Overtime

    signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def answer(server: Server, line: str) -> str:
    """One request line to one answer line; whatever goes wrong in environment code is an `error` of a named class."""
    request = json.loads(line)
    reply: dict[str, Any] = {"id": request["id"]}
    try:
        with alarm(request["seconds"]):
            reply["value"] = server.handle(request)
    except Overtime:
        reply["error"] = ["deadline", f"no answer within {request['seconds']} s"]
    except Refused as refusal:
        reply["error"] = ["refused", str(refusal)]
    except MemoryError:
        reply["error"] = ["memory", f"more than {MEMORY_BYTES >> 20} MiB"]
    except BaseException as error:  # noqa: BLE001 - environment code may raise anything; the boundary is here
        reply["error"] = ["environment", f"{type(error).__name__}: {error}"[:500]]
    return json.dumps(reply)


def limit() -> None:
    """Cap memory, file size, descriptors and core dumps of this process."""
    for kind, value in (
        (resource.RLIMIT_AS, MEMORY_BYTES),
        (resource.RLIMIT_FSIZE, 1 << 20),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_CORE, 0),
    ):
        hard = resource.getrlimit(kind)[1]
        resource.setrlimit(kind, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


def take_over_output() -> Callable[[str], None]:
    """Keep the real standard output for answers; whatever environment code prints goes nowhere."""
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)

    def send(text: str) -> None:
        channel.write(text + "\n")
        channel.flush()

    return send


def main() -> None:
    """Serve until standard input closes."""
    requests = os.fdopen(os.dup(0), "r", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    send = take_over_output()
    limit()
    server = Server()
    for line in requests:
        send(answer(server, line))


if __name__ == "__main__":
    main()
