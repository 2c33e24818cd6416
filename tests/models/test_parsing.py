"""Parsing of acting steps: calls, or a reply, or a failure in words; never two of these, never a crash."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envace.models.parsing import MAX_CALLS, Parsed, parse_step
from envace.types import ToolCall


def test_a_call() -> None:
    assert parse_step(["", 'get {"id": "#W1", "n": 2}']) == Parsed(
        calls=(ToolCall(name="get", arguments={"id": "#W1", "n": 2}),)
    )


def test_two_calls_keep_their_order() -> None:
    assert parse_step(["", 'b {"x": 1}', "a {}"]) == Parsed(
        calls=(ToolCall(name="b", arguments={"x": 1}), ToolCall(name="a", arguments={}))
    )


def test_a_reply_is_stripped() -> None:
    assert parse_step([" Done. \n"]) == Parsed(reply="Done.")


def test_spaces_around_a_call_do_not_matter() -> None:
    assert parse_step(["  ", '  get   {"id": 1}  ']).calls == (ToolCall(name="get", arguments={"id": 1}),)


@pytest.mark.parametrize(
    ("texts", "failure"),
    [
        (["I will look it up. ", "get {}"], "text before a call"),
        (["", "get"], "call 'get' has no arguments object"),
        (["", ""], "a call without a name"),
        (["", "   "], "a call without a name"),
        (["", "get {id: 1}"], "arguments of 'get' are not JSON"),
        (["", 'get {"id": 1'], "arguments of 'get' are not JSON"),
        (["", 'get {"id": 1} and more'], "arguments of 'get' are not JSON"),
        (["", "get " + "[" * 5000], "arguments of 'get' are not JSON"),
        (["", "get " + "9" * 5000], "arguments of 'get' are not JSON"),
        (["", "get [1]"], "arguments of 'get' are not an object"),
        (["", "get null"], "arguments of 'get' are not an object"),
        (["", 'get "x"'], "arguments of 'get' are not an object"),
        (["", "good {}", "bad"], "call 'bad' has no arguments object"),
        ([""], "an empty step"),
        ([" \n "], "an empty step"),
        (["", *["get {}"] * (MAX_CALLS + 1)], "9 calls in one step, at most 8 are allowed"),
    ],
)
def test_malformed_steps_say_what_is_wrong(texts: list[str], failure: str) -> None:
    parsed = parse_step(texts)
    assert parsed.failure is not None
    assert parsed.failure.startswith(failure)
    assert (parsed.calls, parsed.reply) == ((), None)
    assert len(parsed.failure) <= 200


def test_as_many_calls_as_allowed_are_no_flood() -> None:
    assert len(parse_step(["", *["get {}"] * MAX_CALLS]).calls) == MAX_CALLS


pieces = st.one_of(
    st.text(max_size=12),
    st.sampled_from(["get {}", 'get {"a": [1, {}]}', "get", " ", "get []", 'get {"a": NaN}', "é {}", "{}"]),
)


@given(st.lists(pieces, min_size=1, max_size=MAX_CALLS + 3))
def test_every_step_is_calls_or_a_reply_or_a_failure(texts: list[str]) -> None:
    parsed = parse_step(texts)
    assert [bool(parsed.calls), parsed.reply is not None, parsed.failure is not None].count(True) == 1
    # Nothing is lost: a step of n call tokens yields n calls or none.
    assert len(parsed.calls) in (0, len(texts) - 1)


@given(
    st.dictionaries(
        st.text(), st.recursive(st.none() | st.booleans() | st.integers() | st.text(), st.lists), max_size=3
    )
)
def test_equal_calls_have_equal_keys_whatever_the_order_of_arguments(arguments: dict[str, object]) -> None:
    backwards = dict(reversed(arguments.items()))
    call, same = ToolCall(name="get", arguments=arguments), ToolCall(name="get", arguments=backwards)
    assert call.key() == same.key()
    assert call.key() != ToolCall(name="put", arguments=arguments).key()
