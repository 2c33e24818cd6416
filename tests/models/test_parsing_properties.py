"""What holds for any step at all, on more than 10,000 well-formed outputs that were damaged in every way.

Each example is parsed strictly and in repair: nothing crashes, no character is lost, calls stand in order where they
say, and what strict parsing accepts repair accepts as it is.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from envace.models.parsing import MAX_CALLS, Dialect, Mode, parse, parse_starter, parse_wire
from envace.types import CallFailure, Parsed, ToolSpec

EXAMPLES = 2_100
"""Of each of the five dialects: 10,500 damaged outputs, 21,000 parses."""

TOOLS = [
    ToolSpec(
        name=name,
        description="",
        parameters={
            "type": "object",
            "properties": {
                "id": {"type": "string"},
                "n": {"type": "integer"},
                "list": {"type": "array"},
                "flag": {"type": ["boolean", "null"]},
            },
        },
    )
    for name in ("get", "ping")
]

OUTPUTS = {
    Dialect.STARTER: [
        '<|call|>get {"id": "#W1", "n": 2}',
        '<|call|>get {"list": [1, {"a": null}]}<|call|>ping {}',
        "Done, refund 120.",
    ],
    Dialect.HERMES: [
        '<tool_call>\n{"name": "get", "arguments": {"id": "a </tool_call> b", "n": 2}}\n</tool_call>',
        '<think>\nHm, <tool_call> first.\n</think>\n\nOne moment.\n<tool_call>\n{"name": "get", "arguments": {"list": '
        '[1.5, "é", true]}}\n</tool_call>\n<tool_call>\n{"name": "ping", "arguments": {}}\n</tool_call>',
        "Your order #W1 is 'on its way': \"tomorrow\".",
    ],
    Dialect.LLAMA: [
        '{"name": "get", "parameters": {"id": "{\\"name\\": 1}", "n": 2}}',
        '<|python_tag|>{"type": "function", "name": "get", "parameters": {"list": [null]}}; '
        '{"name": "ping", "parameters": {}}',
        'Here it is: {"name": "Bob", "age": 3}.',
    ],
    Dialect.PYTHONIC: [
        '[get(id="#W1", n=-2, list=[1, {"a": None}]), ping()]',
        "<|python_start|>[get(id='it\\'s', flag=True)]<|python_end|>",
        "ping()",
        "See [the list](http://x) and f(x).",
    ],
    Dialect.QWEN_XML: [
        "<tool_call>\n<function=get>\n<parameter=id>\n#W1\n</parameter>\n<parameter=n>\n2\n</parameter>\n</function>\n"
        "</tool_call>",
        "<think>\nHm.\n</think>\n\nWait.\n\n<tool_call>\n<function=get>\n<parameter=list>\n[1, {}]\n</parameter>\n"
        "<parameter=flag>\nNone\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=ping>\n</function>\n"
        "</tool_call>",
        "Done <b>now</b>.",
    ],
}

FRAGMENTS = [
    "<tool_call>", "</tool_call>", "<function=get>", "<function=", "</function>", "<parameter=n>", "</parameter>",
    "<think>", "</think>", "<|call|>", "<|call|>get ", "<|python_tag|>", "<|python_end|>", "<|im_end|>", "```json\n",
    "```python\nping()", "```", '"', "'", "\\", "{", "}", "[", "]", "(", ")", ",", ":", ";", "=", "#", "\n", "\t", " ",
    "\x00", "\x1c", "\u2028", "\xa0", "\ud800", "\udc00", "\U0001f600", "é", "True", "None", "null", "NaN", "1e999",
    "9" * 30, '{"name": "get", "arguments": {}}', '{"name": "get", "parameters": {}}', "[get(n=1)]", "get(n=1)",
    '"arguments"', '"parameters"', '"name"', "\\u", "\\x", "'''", '"""', "**", "-", "f", '"a": ', "and then", "{'a': ",
]  # fmt: skip

Edit = tuple[str, int, int, str]
edits: st.SearchStrategy[list[Edit]] = st.lists(
    st.tuples(
        st.sampled_from(["delete", "repeat", "insert", "insert", "replace", "move"]),
        st.integers(0, 400),
        st.integers(0, 40),
        st.sampled_from(FRAGMENTS),
    ),
    min_size=1,
    max_size=4,
)


def damaged(text: str, changes: Sequence[Edit]) -> str:
    """The text after each change at its place, counted round the text's end."""
    for kind, place, length, fragment in changes:
        start = place % (len(text) + 1)
        end = min(len(text), start + length)
        span = text[start:end]
        if kind == "delete":
            text = text[:start] + text[end:]
        elif kind == "repeat":
            text = text[:end] + span + text[end:]
        elif kind == "insert":
            text = text[:start] + fragment + text[start:]
        elif kind == "replace":
            text = text[:start] + fragment + text[end:]
        else:
            text = span + text[:start] + text[end:]
    return text


@pytest.mark.parametrize("dialect", Dialect)
def test_damaged_outputs_are_read_or_refused_and_never_lost(dialect: Dialect) -> None:
    @settings(max_examples=EXAMPLES, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.sampled_from(OUTPUTS[dialect]), edits)
    def holds(output: str, changes: list[Edit]) -> None:
        text = damaged(output, changes)
        strict, repair = (parse(text, dialect, mode=mode, tools=TOOLS) for mode in ("strict", "repair"))
        check(text, strict, "strict")
        check(text, repair, "repair")
        if strict.failure is None:
            assert repair == strict or (not strict.items and all(item.repairs for item in repair.items))

    holds()


def check(text: str, parsed: Parsed, mode: Mode) -> None:
    check_items(parsed, mode)
    check_places(text, parsed)
    assert visible(outside(text, parsed)) == visible((parsed.reasoning or "") + parsed.text)


def check_items(parsed: Parsed, mode: Mode) -> None:
    states = [parsed.reply is not None, bool(parsed.items) and parsed.failure is None, parsed.failure is not None]
    assert states.count(True) == 1
    assert len(parsed.items) <= MAX_CALLS + 1
    assert len(parsed.detail) <= 200
    assert bool(parsed.detail) == (parsed.failure is not None)
    for item in parsed.items:
        assert (item.call is None) == (item.failure is not None) == bool(item.detail)
        assert len(item.detail) <= 200
        assert not (item.repairs and (mode == "strict" or item.call is None))
    for call in parsed.calls:
        assert call.name.strip()
        written = json.dumps(call.arguments, allow_nan=False)
        assert json.dumps(json.loads(written)) == written
    if mode == "repair":
        assert parsed.failure in (None, CallFailure.EMPTY, CallFailure.UNCLOSED_REASONING)
    elif any(item.failure is not None for item in parsed.items):
        assert parsed.failure is not None


def check_places(text: str, parsed: Parsed) -> None:
    ends = 0
    for item in parsed.items:
        assert ends <= item.start < item.end <= len(text)
        ends = item.end


def outside(text: str, parsed: Parsed) -> str:
    ends = [0, *(item.end for item in parsed.items)]
    starts = [*(item.start for item in parsed.items), len(text)]
    return "".join(text[a:b] for a, b in zip(ends, starts, strict=True))


def visible(text: str) -> str:
    """Without white space and the tags of reasoning, the only characters that a parse may drop.

    Tags are removed until none is left: where one was dropped, what stood around it may look like another.
    """
    text = "".join(text.split())
    while (less := text.replace("</think>", "").replace("<think>", "")) != text:
        text = less
    return text


pieces = st.one_of(
    st.text(max_size=12),
    st.sampled_from(["get {}", 'get {"a": [1, {}]}', "get", " ", "get []", 'get {"a": NaN}', "é {}", "{}", "<|call|>"]),
)


@settings(max_examples=600, derandomize=True, deadline=None)
@given(st.lists(pieces, min_size=1, max_size=MAX_CALLS + 3))
def test_a_starter_step_of_n_call_tokens_has_n_attempted_calls(texts: list[str]) -> None:
    tokens = len(texts) - 1
    for mode in ("strict", "repair"):
        parsed = parse_starter(texts, mode=mode)
        check("<|call|>".join(texts), parsed, mode)
        assert len(parsed.items) == min(tokens, MAX_CALLS + 1)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6) | st.sampled_from(FRAGMENTS),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
arguments = st.one_of(values, values.map(repr), values.map(json.dumps), st.just('{"n": 1}'))
functions = st.one_of(values, st.fixed_dictionaries({"name": st.just("get"), "arguments": arguments}))
entries = st.one_of(values, st.fixed_dictionaries({"function": functions}, optional={"id": values}))
messages = st.fixed_dictionaries(
    {},
    optional={
        "content": st.one_of(values, st.just("<think>a</think>b"), st.just("<think>a")),
        "tool_calls": st.one_of(values, st.lists(entries, max_size=MAX_CALLS + 2)),
        "function_call": functions,
        "reasoning_content": values,
        "reasoning": values,
        "refusal": values,
    },
)


@settings(max_examples=500, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
@given(messages)
def test_any_message_of_the_wire_is_read_or_refused(message: dict[str, Any]) -> None:
    strict, repair = (parse_wire(message, mode=mode) for mode in ("strict", "repair"))
    check_items(strict, "strict")
    check_items(repair, "repair")
    assert len(strict.items) == len(repair.items)
    if strict.failure is None:
        assert (strict.calls, strict.text, strict.reasoning) == (repair.calls, repair.text, repair.reasoning)


@settings(max_examples=50, derandomize=True, deadline=None)
@given(
    st.dictionaries(
        st.text(), st.recursive(st.none() | st.booleans() | st.integers() | st.text(), st.lists), max_size=3
    )
)
def test_equal_calls_have_equal_keys_whatever_the_order_of_arguments(arguments: dict[str, object]) -> None:
    one, other = (
        parse_wire({"tool_calls": [{"function": {"name": "get", "arguments": json.dumps(pairs)}}]}).calls[0]
        for pairs in (arguments, dict(reversed(arguments.items())))
    )
    assert one.key() == other.key()
    assert one.key() != f"put {json.dumps(arguments, sort_keys=True, separators=(',', ':'))}"
