"""Rehearsed answers beside real ones, and training trajectories, as rows to show. Pure.

Everything here is text that a policy or a tool wrote; the template escapes it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from envace.fidelity.compare import error_class
from envace.report.reading import number, objects, section
from envace.report.tables import MISSING

MAX_CHARACTERS = 600
"""Longer texts are cut, and say so."""
SHOWN = 3
"""Rehearsals on a page."""
ABSENT = "(absent)"
NOT_RECORDED = "(not recorded)"

SAME, WRONG, OPEN, UNKNOWN = "same", "wrong", "open", "unknown"
"""Marks: equal; differs, though it could be known; differs, and could not; nothing to compare with."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """One value of a response, rehearsed and real."""

    key: str
    """Path of the value within the response; empty for a response that is one value."""
    rehearsed: str
    real: str
    mark: str


@dataclass(frozen=True, kw_only=True)
class ExchangeView:
    """A call and both answers to it."""

    call: str
    lines: Sequence[Line]
    breaks_rules: bool
    """Whether the rehearsed answer is one that the tools' rules exclude."""

    @property
    def mark(self) -> str:
        """The worst mark of its lines."""
        marks = {line.mark for line in self.lines}
        if self.breaks_rules:
            return WRONG
        return next((mark for mark in (WRONG, OPEN, UNKNOWN) if mark in marks), SAME)


@dataclass(frozen=True, kw_only=True)
class CheckView:
    """One check of the real execution."""

    question: str
    verdict: str


@dataclass(frozen=True, kw_only=True)
class RehearsalView:
    """A private rehearsal beside the real execution of the same scenario."""

    run: str
    scenario: str
    environment: str
    instruction: str
    feasible: bool | None
    """Whether the request can be done in the real world."""
    success: bool | None
    """Of the real execution."""
    exchanges: Sequence[ExchangeView]
    reply: str
    real_reply: str
    real_calls: Sequence[tuple[str, str]]
    """Calls of the real execution, and their responses."""
    checks: Sequence[CheckView]

    @property
    def faulty(self) -> bool:
        """Whether a rehearsed answer is wrong."""
        return any(exchange.mark == WRONG for exchange in self.exchanges)


@dataclass(frozen=True, kw_only=True)
class SpanView:
    """A run of text with one author."""

    text: str
    style: str
    """`act`, `rehearse`, `handed` or `given`."""
    anchored: bool
    """A look-up value without policy gradient."""
    starts_line: bool


@dataclass(frozen=True, kw_only=True)
class TrajectoryView:
    """One training trajectory."""

    title: str
    reward: str
    parts: str
    stop: str
    feasible: str
    spans: Sequence[SpanView]


def rehearsal_views(records: Sequence[Mapping[str, Any]], *, run: str) -> list[RehearsalView]:
    """All rehearsals of a run."""
    return [_rehearsal(record, run) for record in records]


def pick(views: Sequence[RehearsalView]) -> list[RehearsalView]:
    """Up to three, unlike where possible: one done, one declined, one with a wrong answer; then the first."""
    kinds = [_kind(view) for view in views]
    wanted = [kinds.index(kind) for kind in ("done", "declined", "faulty") if kind in kinds]
    rest = [i for i in range(len(views)) if i not in wanted]
    return [views[i] for i in (*wanted, *rest)[:SHOWN]]


def _kind(view: RehearsalView) -> str:
    if view.faulty:
        return "faulty"
    if not view.success or view.feasible is None:
        return "other"
    return "done" if view.feasible else "declined"


def trajectory_views(records: Sequence[Mapping[str, Any]]) -> list[TrajectoryView]:
    """All trajectories of a recorded group."""
    return [_trajectory(record) for record in records]


def compare(rehearsed: Any, real: Any, *, determined: bool) -> list[Line]:
    """Both responses value by value, marked.

    A value that does not follow from the history is not wrong but open. Which keys a record has can always be
    known, so a key too many or too few is wrong even there, unless one of the two is an error.
    """
    left, right = _flat(rehearsed), _flat(real)
    both_answer = error_class(rehearsed) is None and error_class(real) is None
    lines = []
    for key in dict.fromkeys([*right, *left]):
        ours, theirs = left.get(key), right.get(key)
        lacking = ours is None or theirs is None
        if ours == theirs:
            mark = SAME
        else:
            mark = WRONG if determined or (lacking and both_answer and not isinstance(real, list)) else OPEN
        lines.append(Line(key=key, rehearsed=ours or ABSENT, real=theirs or ABSENT, mark=mark))
    return lines


def _flat(value: Any) -> dict[str, str]:
    """Values by path: objects, and objects in lists, are opened; what lies deeper stays together."""
    if isinstance(value, dict) and value:
        return {key: _text(item) for key, item in value.items()}
    if isinstance(value, list) and value and all(isinstance(item, dict) and item for item in value):
        return {f"{n}. {key}": _text(item) for n, row in enumerate(value, 1) for key, item in row.items()}
    return {"": _text(value)}


def _text(value: Any) -> str:
    """Canonical JSON; equal for equal values."""
    try:
        return json.dumps(value, ensure_ascii=False, sort_keys=True)
    except RecursionError:
        return "(nested too deeply to be shown)"


def cut(text: str) -> str:
    """A text of at most MAX_CHARACTERS, and how much was cut."""
    rest = len(text) - MAX_CHARACTERS
    return text if rest <= 0 else f"{text[:MAX_CHARACTERS]}… ({rest} more characters)"


def _call(call: Any) -> str:
    arguments = section(call, "arguments")
    given = ", ".join(f"{key}={_text(value)}" for key, value in arguments.items())
    return cut(f"{call.get('name')}({given})" if isinstance(call, dict) else NOT_RECORDED)


def _exchange(record: Mapping[str, Any]) -> ExchangeView:
    determined, rehearsed = record.get("determined") is True, record.get("rehearsed")
    text = record.get("rehearsed_text")
    unreadable = rehearsed is None and isinstance(text, str) and text.strip() != "null"
    shown: list[Line]
    if "real" not in record:
        shown = [Line(key=k, rehearsed=v, real=NOT_RECORDED, mark=UNKNOWN) for k, v in _flat(rehearsed).items()]
    elif unreadable:
        shown = [Line(key="", rehearsed=str(text), real=_text(record["real"]), mark=WRONG)]
    else:
        shown = compare(rehearsed, record["real"], determined=determined)
    lines = [Line(key=cut(s.key), rehearsed=cut(s.rehearsed), real=cut(s.real), mark=s.mark) for s in shown]
    broken = unreadable or record.get("consistency") == "inconsistent"
    return ExchangeView(call=_call(record.get("call")), lines=lines, breaks_rules=broken)


def _rehearsal(record: Mapping[str, Any], run: str) -> RehearsalView:
    real, feasible = section(record, "real"), record.get("feasible_real")
    success = real.get("success")
    return RehearsalView(
        run=run,
        scenario=_string(record.get("scenario_id")),
        environment=_string(record.get("environment_id")),
        instruction=_string(record.get("instruction")),
        feasible=feasible if isinstance(feasible, bool) else None,
        success=success if isinstance(success, bool) else None,
        exchanges=[_exchange(exchange) for exchange in objects(record.get("exchanges"))],
        reply=_string(record.get("reply"), empty="(no reply)"),
        real_reply=_string(real.get("reply"), empty="(no reply)" if real else NOT_RECORDED),
        real_calls=[
            (_call(exchange.get("call")), cut(_text(exchange.get("response"))))
            for exchange in objects(real.get("exchanges"))
        ],
        checks=[
            CheckView(
                question=_string(check.get("question")) or _string(check.get("id")),
                verdict=_string(check.get("verdict")),
            )
            for check in objects(real.get("checks"))
        ],
    )


def _string(value: Any, *, empty: str = "") -> str:
    if value is None:
        return empty
    return cut(value if isinstance(value, str) else _text(value))


def _trajectory(record: Mapping[str, Any]) -> TrajectoryView:
    reward = number(record, "reward")
    parts = section(record, "parts")
    stop = _string(record.get("stop"), empty=NOT_RECORDED)
    error = _string(record.get("error"))
    feasible = record.get("feasible")
    return TrajectoryView(
        title=f"{_string(record.get('scenario_id'))}, rollout {_string(record.get('index'), empty='?')}",
        reward="not scored" if reward is None else f"{reward:.2f}",
        parts=", ".join(f"{cut(name)} {_part(parts, name)}" for name in parts),
        stop=f"{stop}: {error}" if error else stop,
        feasible={True: "yes", False: "no"}[feasible] if isinstance(feasible, bool) else "not determined",
        spans=list(_spans(objects(record.get("segments")))),
    )


def _part(parts: Mapping[str, Any], name: str) -> str:
    value = number(parts, name)
    return MISSING if value is None else f"{value:.2f}"


def _spans(segments: Sequence[Mapping[str, Any]]) -> Iterator[SpanView]:
    """Segments coloured by who wrote them; a header begins a line."""
    for position, segment in enumerate(segments):
        role, anchored = segment.get("role"), segment.get("learn") == "anchor"
        style = role if role in ("act", "rehearse") else "handed" if anchored else "given"
        yield SpanView(
            text=_segment_text(segment),
            style=str(style),
            anchored=anchored,
            starts_line=style == "given" and position > 0,
        )


def _segment_text(segment: Mapping[str, Any]) -> str:
    text, ids = segment.get("text"), segment.get("ids")
    if isinstance(text, str):
        rest = len(text) - 10 * MAX_CHARACTERS
        return text if rest <= 0 else f"{text[: 10 * MAX_CHARACTERS]}… ({rest} more characters)"
    return f"({len(ids) if isinstance(ids, list) else '?'} tokens, text not recorded)"
