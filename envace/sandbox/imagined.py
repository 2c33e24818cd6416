"""An imagined world: the environment's own rules, run on the records that a rehearsal has shown.

The opening state of a task is never read. A world starts empty; each rehearsed look-up adds the record it shows; every
other response is compared with what the environment class answers on the records known so far. The oracle program then
runs on the same records, which yields what should have been done *in this imagined world*.

This module runs inside the worker process.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from typing import Any

from jsonschema.validators import Draft202012Validator

CONSISTENT, INCONSISTENT, UNDETERMINED = "consistent", "inconsistent", "undetermined"


class Undetermined(Exception):
    """The oracle needs a record that this rehearsal has never shown."""


class Watch:
    """What one call touched that the rehearsal has not settled."""

    def __init__(self) -> None:
        self.absent: set[tuple[str, str]] = set()
        """(table, key) pairs that a rehearsed response has declared missing."""
        self.missed: set[tuple[str, str]] = set()
        self.scanned = False

    def clear(self) -> None:
        """Forget what the last call touched; what is known to be absent stays."""
        self.missed, self.scanned = set(), False


class Table(dict):  # type: ignore[type-arg]
    """A table of records that reports reads of keys nobody has shown yet."""

    def __init__(self, name: str, watch: Watch, records: dict[str, Any]) -> None:
        super().__init__(records)
        self._name, self._watch = name, watch

    def _note(self, key: Any) -> None:
        if not dict.__contains__(self, key) and (self._name, str(key)) not in self._watch.absent:
            self._watch.missed.add((self._name, str(key)))

    def get(self, key: Any, default: Any = None) -> Any:
        """As `dict.get`, noting a miss."""
        self._note(key)
        return super().get(key, default)

    def __getitem__(self, key: Any) -> Any:
        self._note(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self._note(key)
        return super().__contains__(key)

    def __iter__(self) -> Iterator[Any]:
        self._watch.scanned = True
        return super().__iter__()

    def keys(self) -> Any:
        """As `dict.keys`, noting the scan."""
        self._watch.scanned = True
        return super().keys()

    def values(self) -> Any:
        """As `dict.values`, noting the scan."""
        self._watch.scanned = True
        return super().values()

    def items(self) -> Any:
        """As `dict.items`, noting the scan."""
        self._watch.scanned = True
        return super().items()

    def plain(self) -> dict[str, Any]:
        """The records as an ordinary dict."""
        return copy.deepcopy(dict(dict.items(self)))


def call_key(name: str, arguments: dict[str, Any]) -> str:
    """A canonical text of a call."""
    return f"{name} {json.dumps(arguments, sort_keys=True)}"


def same(left: Any, right: Any) -> bool:
    """Equality of two responses; lists are compared without their order."""
    if isinstance(left, list) and isinstance(right, list):
        return sorted(map(_text, left)) == sorted(map(_text, right))
    return _text(left) == _text(right)


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


class ImaginedWorld:
    """What one rehearsal has shown of its world, and the environment's rules run on it."""

    def __init__(
        self,
        build: Callable[[dict[str, Any]], Any],
        *,
        tables: dict[str, Any],
        lookups: dict[str, str],
        call: Callable[[Any, str, dict[str, Any]], Any],
        solve: Callable[..., dict[str, Any]] | None,
    ) -> None:
        self._build, self._call, self._solve = build, call, solve
        self._tables, self._lookups = tables, lookups
        self._validators = {name: Draft202012Validator(table["record"]) for name, table in tables.items()}
        self._watch = Watch()
        self._opening: dict[str, dict[str, Any]] = {name: {} for name in tables}
        self._searched: dict[str, tuple[str, dict[str, Any]]] = {}
        """Searches whose whole result is known, by their canonical text."""
        self._instance = self._fresh(self._watch)

    def _fresh(self, watch: Watch) -> Any:
        """A new instance on the opening records known so far."""
        opening = {name: Table(name, watch, copy.deepcopy(rows)) for name, rows in self._opening.items()}
        return self._build(opening)

    def observe(self, name: str, arguments: dict[str, Any], response: Any) -> dict[str, Any]:
        """Judge one rehearsed response, and remember what it shows.

        Returns `consistency`, and `new`: True where it is a look-up whose value nothing had settled before.
        """
        added = self._absorb(name, response)
        self._watch.clear()
        replayed = self._call(self._instance, name, arguments)
        missed = self._watch.missed
        agrees = same(replayed, response)
        if name in self._lookups:
            if not agrees or self._breaks_a_search(added):
                self._forget(added)
                return {"consistency": INCONSISTENT, "new": bool(missed or added)}
            fresh_search = self._watch.scanned and call_key(name, arguments) not in self._searched
            if self._watch.scanned:
                self._searched[call_key(name, arguments)] = name, arguments
            self._watch.absent |= missed
            return {"consistency": CONSISTENT, "new": bool(added or missed or fresh_search)}
        partial = self._watch.scanned and call_key(name, arguments) not in self._searched
        if missed or partial:
            return {"consistency": UNDETERMINED, "new": False}
        return {"consistency": CONSISTENT if agrees else INCONSISTENT, "new": False}

    def _absorb(self, name: str, response: Any) -> list[tuple[str, str]]:
        """Add the records that a look-up shows; returns which were new."""
        table = self._lookups.get(name)
        rows = response if isinstance(response, list) else [response]
        if table is None or not all(isinstance(row, dict) and "error" not in row for row in rows):
            return []
        if not all(self._validators[table].is_valid(row) for row in rows):
            return []
        live = getattr(self._instance, table)
        added = []
        for row in rows:
            key: Any = row.get(self._tables[table]["key"])
            if not isinstance(key, str):
                continue
            if dict.__contains__(live, key) or (table, key) in self._watch.absent:
                continue
            dict.__setitem__(live, key, copy.deepcopy(row))
            self._opening[table][key] = copy.deepcopy(row)
            added.append((table, key))
        return added

    def _breaks_a_search(self, added: list[tuple[str, str]]) -> bool:
        """Whether a record just shown should have stood in the result of an earlier search."""
        for name, arguments in self._searched.values() if added else ():
            table = self._lookups[name]
            rows = self._call(self._fresh(Watch()), name, arguments)
            field = self._tables[table]["key"]
            found = {row.get(field) for row in rows if isinstance(row, dict)} if isinstance(rows, list) else set()
            if any(where == table and key in found for where, key in added):
                return True
        return False

    def _forget(self, added: list[tuple[str, str]]) -> None:
        for table, key in added:
            dict.pop(getattr(self._instance, table), key, None)
            self._opening[table].pop(key, None)

    def determined(self, name: str, arguments: dict[str, Any]) -> bool:
        """Whether the response to a call follows from what was shown so far. The world stays as it is."""
        watch = Watch()
        watch.absent = set(self._watch.absent)
        tables = {name: Table(name, watch, table.plain()) for name, table in self._live().items()}
        self._call(self._build(tables), name, arguments)
        unsearched = watch.scanned and call_key(name, arguments) not in self._searched
        return not watch.missed and not unsearched

    def _live(self) -> dict[str, Table]:
        return {name: getattr(self._instance, name) for name in self._tables}

    def final_state(self) -> dict[str, Any]:
        """The imagined tables after the calls made, by the environment's own rules."""
        return {name: Table.plain(table) for name, table in self._live().items()}

    def oracle(self, goal: dict[str, Any]) -> dict[str, Any]:
        """Run the oracle program on this world.

        Returns its `calls`, and where every record it needed had been shown (`determined`) also `outcome`, `reply`,
        `facts` and the `final_state` it leaves.
        """
        if self._solve is None:
            return {"determined": False, "calls": []}
        watch = Watch()
        watch.absent = self._watch.absent
        instance = self._fresh(watch)
        calls: list[dict[str, Any]] = []

        def call(name: str, **arguments: Any) -> Any:
            watch.clear()
            calls.append({"name": name, "arguments": arguments})
            response = self._call(instance, name, arguments)
            if watch.missed or (watch.scanned and call_key(name, arguments) not in self._searched):
                raise Undetermined
            return response

        try:
            result = self._solve(call, copy.deepcopy(goal))
        except Undetermined:
            return {"determined": False, "calls": calls}
        final = {name: getattr(instance, name).plain() for name in self._tables}
        return {"determined": True, "calls": calls, "final_state": final, **result}
