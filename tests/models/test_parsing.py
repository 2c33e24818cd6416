"""Parsing of acting steps: what each dialect accepts by the letter, what repair makes of the rest, and that nothing of
a step is lost. The tests with a letter and a number are named after the field cases of the users of such tools.
"""

from __future__ import annotations

import json
import time
import warnings
from typing import Any

import pytest

from envace.models.parsing import MAX_CALLS, MAX_CHARACTERS, Dialect, Mode, parse, parse_starter, parse_wire
from envace.types import CallFailure, Parsed, ToolCall, ToolSpec

BOTH: tuple[Mode, Mode] = ("strict", "repair")


def tool(name: str, **properties: Any) -> ToolSpec:
    return ToolSpec(name=name, description="", parameters={"type": "object", "properties": properties})


TEXT = {"type": "string"}
TOOLS = (tool("get", id=TEXT, n={"type": "integer"}), tool("write", content=TEXT), tool("ping"))


def call(name: str, /, **arguments: Any) -> ToolCall:
    return ToolCall(name=name, arguments=arguments)


def hermes(body: str) -> str:
    return f"<tool_call>\n{body}\n</tool_call>"


def qwen(name: str, **parameters: str) -> str:
    written = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in parameters.items())
    return f"<tool_call>\n<function={name}>\n{written}</function>\n</tool_call>"


def as_json(name: str, /, **arguments: Any) -> str:
    return json.dumps({"name": name, "arguments": arguments})


def strict(text: str, dialect: Dialect, **options: Any) -> Parsed:
    return parse(text, dialect, mode="strict", **options)


def repaired(text: str, dialect: Dialect = Dialect.HERMES, **options: Any) -> Parsed:
    parsed = parse(text, dialect, mode="repair", **{"tools": TOOLS, **options})
    assert all(item.repairs for item in parsed.items if item.call is not None), "a repair is always noted"
    return parsed


def failures(parsed: Parsed) -> list[CallFailure | None]:
    return [item.failure for item in parsed.items]


WELL_FORMED = [
    (Dialect.STARTER, '<|call|>get {"id": "#W1", "n": 2}<|call|>ping {}'),
    (Dialect.STARTER, '<|call|>  get   {"id": "#W1", "n": 2} \n<|call|> ping {}'),
    (Dialect.HERMES, hermes(as_json("get", id="#W1", n=2)) + "\n" + hermes(as_json("ping"))),
    (
        Dialect.HERMES,
        '<tool_call>{"arguments": {"n": 2, "id": "#W1"}, "name": "get"}</tool_call>' + hermes(as_json("ping")),
    ),
    (Dialect.LLAMA, '{"name": "get", "parameters": {"id": "#W1", "n": 2}}; {"name": "ping", "parameters": {}}'),
    (Dialect.LLAMA, '{"name": "get", "arguments": {"id": "#W1", "n": 2}}\n{"name": "ping", "parameters": {}}'),
    (
        Dialect.LLAMA,
        '<|python_tag|>{"type": "function", "name": "get", "parameters": {"id": "#W1", "n": 2}};'
        '{"name": "ping", "parameters": {}}',
    ),
    (Dialect.PYTHONIC, '[get(id="#W1", n=2), ping()]'),
    (Dialect.PYTHONIC, "<|python_start|>[get(id='#W1',\n  n=2),\n ping()]<|python_end|>"),
    (Dialect.QWEN_XML, qwen("get", id="#W1", n="2") + "\n" + qwen("ping")),
    (
        Dialect.QWEN_XML,
        "<tool_call><function=get><parameter=id>#W1</parameter><parameter=n> 2 </parameter></function></tool_call>"
        "<tool_call><function=ping></function></tool_call>",
    ),
]


@pytest.mark.parametrize("mode", BOTH)
@pytest.mark.parametrize(("dialect", "text"), WELL_FORMED)
def test_well_formed_calls_are_the_same_to_both_modes(dialect: Dialect, text: str, mode: Mode) -> None:
    parsed = parse(text, dialect, mode=mode, tools=TOOLS)
    assert parsed.calls == (call("get", id="#W1", n=2), call("ping"))
    assert (parsed.text, parsed.reply, parsed.reasoning, parsed.failure) == ("", None, None, None)
    assert [item.repairs for item in parsed.items] == [(), ()]


@pytest.mark.parametrize("mode", BOTH)
@pytest.mark.parametrize("dialect", Dialect)
@pytest.mark.parametrize(
    "text",
    [
        " Done. \n", "Look at [1] and [the docs](http://x).", '{"answer": 42}', '{"name": "Bob", "age": 3}',
        "f(x) is a function", "Call me (maybe)", "```python\nplot(x=1)\n```", "[1, 2, 3]", "a < b, c > d",
        "[]", "{}", '"', "{", "(",
        "The tag </tool_call> ends a call.", "Use <function=x> for that.",
    ],
)  # fmt: skip
def test_what_is_no_call_is_a_reply(dialect: Dialect, text: str, mode: Mode) -> None:
    assert parse(text, dialect, mode=mode, tools=TOOLS) == Parsed(text=text.strip())
    assert parse(text, dialect, mode=mode).reply == text.strip()


@pytest.mark.parametrize("mode", BOTH)
@pytest.mark.parametrize("dialect", Dialect)
@pytest.mark.parametrize("text", ["", " \n\t", "<think>Hm.</think>", "<think>\n\n</think>\n\n"])
def test_an_empty_step_is_malformed(dialect: Dialect, text: str, mode: Mode) -> None:
    parsed = parse(text, dialect, mode=mode)
    assert (parsed.failure, parsed.reply, parsed.items) == (CallFailure.EMPTY, None, ())


# --- starter -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("texts", "failure", "detail"),
    [
        (["I will look it up. ", "get {}"], CallFailure.STRAY_TEXT, "text beside a call"),
        (["", "get"], CallFailure.ARGUMENTS, "call 'get' has no arguments object"),
        (["", ""], CallFailure.NO_NAME, "a call without a name"),
        (["", "   "], CallFailure.NO_NAME, "a call without a name"),
        (["", "get {id: 1}"], CallFailure.NOT_JSON, "arguments of 'get' are not JSON"),
        (["", 'get {"id": 1'], CallFailure.NOT_JSON, "arguments of 'get' are not JSON"),
        (["", 'get {"id": 1} and more'], CallFailure.NOT_JSON, "arguments of 'get' are not JSON"),
        (["", "get " + "[" * 5000], CallFailure.NOT_JSON, "arguments of 'get' are not JSON"),
        (["", "get " + "9" * 5000], CallFailure.NOT_JSON, "arguments of 'get' are not JSON"),
        (["", "get [1]"], CallFailure.ARGUMENTS, "arguments of 'get' are not an object"),
        (["", "get null"], CallFailure.ARGUMENTS, "arguments of 'get' are not an object"),
        (["", 'get "x"'], CallFailure.ARGUMENTS, "arguments of 'get' are not an object"),
        (["", "good {}", "bad"], CallFailure.ARGUMENTS, "call 'bad' has no arguments object"),
        ([""], CallFailure.EMPTY, "an empty step"),
        ([" \n "], CallFailure.EMPTY, "an empty step"),
        (["", *["get {}"] * (MAX_CALLS + 1)], CallFailure.FLOOD, "1 more than the 8 calls"),
        (["", "x" * 999 + " ["], CallFailure.NOT_JSON, "arguments of 'xxx"),
    ],
)
def test_malformed_starter_steps_say_what_is_wrong(texts: list[str], failure: CallFailure, detail: str) -> None:
    parsed = parse_starter(texts)
    assert parsed.failure is failure
    assert parsed.detail.startswith(detail)
    assert parsed.reply is None
    assert len(parsed.detail) <= 200


def test_as_many_calls_as_allowed_are_no_flood() -> None:
    assert len(parse_starter(["", *["get {}"] * MAX_CALLS]).calls) == MAX_CALLS


def test_the_starters_token_is_told_from_its_letters() -> None:
    # The same letters: once the token, once a text that the policy repeats, which is neither a call nor a failure.
    assert parse_starter(["", 'get {"id": "<|call|>"}']).calls == (call("get", id="<|call|>"),)
    assert parse_starter(["The letters <|call|>get {}"]).reply == "The letters <|call|>get {}"
    assert parse("The letters <|call|>get {}", Dialect.STARTER).failure is CallFailure.STRAY_TEXT


def test_positions_of_a_cut_step_are_those_of_the_joined_one() -> None:
    texts = ["", 'get {"id": "<|call|>"}', "ping {}"]
    whole = "<|call|>".join(texts)
    assert [whole[item.start : item.end] for item in parse_starter(texts).items] == [
        '<|call|>get {"id": "<|call|>"}',
        "<|call|>ping {}",
    ]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("Let me look. <|call|>get {}", call("get")),
        ("<|call|>ping", call("ping")),
        ('<|call|>get{"n": 1}', call("get", n=1)),
        ('<|call|>get\n{"n": 1}', call("get", n=1)),
        ("<|call|>get {'n': 1}", call("get", n=1)),
        ('<|call|>get {"n": 1} and then', call("get", n=1)),
    ],
)
def test_repair_reads_what_the_starter_meant(text: str, found: ToolCall) -> None:
    assert parse(text, Dialect.STARTER).failure is not None
    assert parse(text, Dialect.STARTER, mode="repair").calls == (found,)


# --- text beside calls, reasoning, positions -----------------------------------------------------------------------


@pytest.mark.parametrize("mode", BOTH)
@pytest.mark.parametrize(
    ("dialect", "written"), [(Dialect.HERMES, hermes(as_json("ping"))), (Dialect.QWEN_XML, qwen("ping"))]
)
def test_text_before_between_and_after_calls_is_kept(dialect: Dialect, written: str, mode: Mode) -> None:
    text = f"First. {written}\n then \n{written} Done."
    parsed = parse(text, dialect, mode=mode, tools=TOOLS)
    assert parsed.text == "First.\nthen\nDone."
    assert parsed.calls == (call("ping"), call("ping"))
    assert [text[item.start : item.end] for item in parsed.items] == [written, written]
    assert (parsed.failure, parsed.reply) == (None, None)


@pytest.mark.parametrize(
    ("dialect", "written"),
    [
        (Dialect.LLAMA, '{"name": "ping", "parameters": {}}'),
        (Dialect.LLAMA, '<|python_tag|>{"name": "ping", "parameters": {}}'),
        (Dialect.PYTHONIC, "[ping()]"),
    ],
)
@pytest.mark.parametrize(("before", "after"), [("Sure: ", ""), ("", " That is all."), ("Sure.\n", "\nDone.")])
def test_where_a_call_is_the_whole_step_text_beside_it_is_malformed_or_kept(
    dialect: Dialect, written: str, before: str, after: str
) -> None:
    text = before + written + after
    parsed = parse(text, dialect)
    assert (parsed.failure, parsed.calls) == (CallFailure.STRAY_TEXT, (call("ping"),))
    kept = parse(text, dialect, mode="repair")
    assert (kept.failure, kept.calls) == (None, (call("ping"),))
    assert kept.text == parsed.text == "\n".join(part.strip() for part in (before, after) if part.strip())


@pytest.mark.parametrize("mode", BOTH)
@pytest.mark.parametrize("opening", ["<think>\n", ""])  # without: the tag stood in the prompt
@pytest.mark.parametrize(("dialect", "text"), WELL_FORMED[1:])
def test_reasoning_is_set_apart_and_calls_in_it_are_none(dialect: Dialect, text: str, opening: str, mode: Mode) -> None:
    draft = {"hermes": hermes(as_json("write")), "qwen_xml": qwen("write"), "starter": "<|call|>write {}"}
    thought = f"I could {draft.get(dialect.value, 'write()')} but no."
    parsed = parse(f"{opening}{thought}\n</think>\n\n{text}", dialect, mode=mode, tools=TOOLS)
    assert parsed.reasoning == thought
    assert parsed.calls == (call("get", id="#W1", n=2), call("ping"))
    assert (parsed.text, parsed.failure) == ("", None)


@pytest.mark.parametrize("mode", BOTH)
def test_reasoning_before_a_reply(mode: Mode) -> None:
    parsed = parse("<think>a</think>\n<think>b</think>Hi <think>", Dialect.HERMES, mode=mode)
    assert (parsed.reasoning, parsed.reply) == ("a\nb", "Hi <think>")
    assert parse("<think>\n\n</think>\n\nHi", Dialect.HERMES, mode=mode) == Parsed(text="Hi", reasoning="")


@pytest.mark.parametrize("mode", BOTH)
@pytest.mark.parametrize("dialect", Dialect)
def test_reasoning_that_is_never_closed_is_no_reply_and_calls_nothing(dialect: Dialect, mode: Mode) -> None:
    text = '<think>Let me see <|call|>ping {} <tool_call>{"name": "ping", "arguments": {}}</tool_call>'
    parsed = parse(text, dialect, mode=mode, tools=TOOLS)
    assert parsed.failure is CallFailure.UNCLOSED_REASONING
    assert (parsed.items, parsed.text, parsed.reply) == ((), "", None)
    assert parsed.reasoning == text.removeprefix("<think>")


def test_the_tags_of_reasoning_are_the_callers() -> None:
    text = "<r>a</r><think>b</think>"
    assert parse(text, Dialect.HERMES, reasoning_tags=("<r>", "</r>")).reasoning == "a"
    assert parse(text, Dialect.HERMES, reasoning_tags=None) == Parsed(text=text)


@pytest.mark.parametrize("mode", BOTH)
@pytest.mark.parametrize(
    ("dialect", "text"),
    [
        (Dialect.HERMES, hermes(as_json("write", content="</think>"))),
        (Dialect.LLAMA, '{"name": "write", "parameters": {"content": "</think>"}}'),
        (Dialect.PYTHONIC, '[write(content="</think>")]'),
        (Dialect.QWEN_XML, qwen("write", content="</think>")),
        (Dialect.STARTER, '<|call|>write {"content": "</think>"}'),
    ],
)
def test_a_closing_tag_in_an_argument_ends_no_reasoning(dialect: Dialect, text: str, mode: Mode) -> None:
    parsed = parse(text, dialect, mode=mode, tools=TOOLS)
    assert (parsed.reasoning, parsed.calls) == (None, (call("write", content="</think>"),))
    thinking = parse(f"Hm.</think>{text}", dialect, mode=mode, tools=TOOLS)
    assert (thinking.reasoning, thinking.calls) == ("Hm.", (call("write", content="</think>"),))


# --- P1: tags inside arguments -------------------------------------------------------------------------------------

TRICKY = [
    "</tool_call>", "<tool_call>", 'a </tool_call> "b" <tool_call>{"name": "x"}</tool_call>', "</function>", "<|call|>",
    "</parameter> no", "{[(", ")]}", "```json", "</tool_call></tool_call></tool_call></tool_call>", "; {", "\\", '\\"',
    '{"name": "get", "parameters": {}}', "[get(n=1)]", "<function=x>", "'", '"', "'''", '"""', "#", "é\U0001f600",
]  # fmt: skip


@pytest.mark.parametrize("mode", BOTH)
@pytest.mark.parametrize("value", TRICKY)
@pytest.mark.parametrize("dialect", Dialect)
def test_P1_a_tag_inside_an_argument_is_text(dialect: Dialect, value: str, mode: Mode) -> None:
    body = json.dumps({"content": value}, ensure_ascii=False)
    written = {
        Dialect.STARTER: f"<|call|>write {body}",
        Dialect.HERMES: hermes(f'{{"name": "write", "arguments": {body}}}'),
        Dialect.LLAMA: f'{{"name": "write", "parameters": {body}}}',
        Dialect.PYTHONIC: f"[write(content={value!r})]",
        Dialect.QWEN_XML: qwen("write", content=value),
    }[dialect]
    if dialect is Dialect.STARTER:
        parsed = parse_starter(["", written.removeprefix("<|call|>")], mode=mode, tools=TOOLS)
    else:
        parsed = parse(written, dialect, mode=mode, tools=TOOLS)
    assert parsed.calls == (call("write", content=value),)
    assert (parsed.text, parsed.failure, parsed.items[0].repairs) == ("", None, ())


def test_P1_in_a_mended_call_too() -> None:
    assert repaired(hermes("{'name': 'write', 'arguments': {'content': \"a</tool_call>'b\"}}")).calls == (
        call("write", content="a</tool_call>'b"),
    )
    assert repaired('<tool_call>{"name": "write", "arguments": {"content": "a\n</tool_call>"}}</tool_call>').calls == (
        call("write", content="a\n</tool_call>"),
    )


# --- P2: Python literals -------------------------------------------------------------------------------------------

PYTHON = [
    ("{'query': \"what's the weather\"}", {"query": "what's the weather"}),
    ('{"query": "what\'s the weather", "n": None}', {"query": "what's the weather", "n": None}),
    ("{'a': True, 'b': None, 'c': False}", {"a": True, "b": None, "c": False}),
    ('{"a": True, "b": null, "c": false}', {"a": True, "b": None, "c": False}),
    ("{'a': 'say \"hi\"', 'b': [1, 2.5, -3]}", {"a": 'say "hi"', "b": [1, 2.5, -3]}),
    ("{'a': 'it\\'s', 'b': 'None'}", {"a": "it's", "b": "None"}),
    ("{'a': (1, 2)}", {"a": [1, 2]}),
    ("{'a': 'True and None'}", {"a": "True and None"}),
    ('{"a": "http:\\/\\/x", "b": True}', {"a": "http://x", "b": True}),
    ("{'a': '\\ud83d\\ude00'}", {"a": "\U0001f600"}),
    ('{"a": 1,}', {"a": 1}),
    ('{"a": [1, 2,], "b": "x\ny", }', {"a": [1, 2], "b": "x\ny"}),
    ('{"a": True, "b": "x\ny"}', {"a": True, "b": "x\ny"}),
]


@pytest.mark.parametrize(("written", "arguments"), PYTHON)
def test_P2_python_literals_are_read_without_replacing_quotes(written: str, arguments: dict[str, Any]) -> None:
    text = hermes(f'{{"name": "get", "arguments": {written}}}')
    assert strict(text, Dialect.HERMES).failure is CallFailure.NOT_JSON
    assert repaired(text).calls == (ToolCall(name="get", arguments=arguments),)
    llama = f'{{"name": "get", "parameters": {written}}}'
    assert strict(llama, Dialect.LLAMA).failure is CallFailure.NOT_JSON
    assert repaired(llama, Dialect.LLAMA).calls == (ToolCall(name="get", arguments=arguments),)
    assert parse_wire(wire(written), mode="repair").calls == (ToolCall(name="get", arguments=arguments),)


@pytest.mark.parametrize(
    "written",
    [
        '{"a": NaN}', '{"a": 1e999}', "{'a': {1}}", "{'a': 1j}", "{'a': b'x'}", "{1: 2}", "{'a': f()}", "{'a': x}",
        "{**a}", "{'a': __import__('os')}", '{"a": "b" "c": 1}', "{'a': ...}", '{"a": 1 "b": 2}', "{'a': ['b' 'c']}",
    ],
)  # fmt: skip
def test_P2_what_is_no_literal_stays_unread(written: str) -> None:
    parsed = repaired(hermes(f'{{"name": "get", "arguments": {written}}}'))
    assert failures(parsed) == [CallFailure.NOT_JSON]
    assert parsed.failure is None


# --- P3: raw line breaks, unescaped quotes -------------------------------------------------------------------------

ALMOST_JSON = [
    ('{"content": "line1\nline2"}', "line1\nline2"),
    ('{"content": "a\tb\r\nc"}', "a\tb\r\nc"),
    ('{"content": "He said "hello""}', 'He said "hello"'),
    ('{"content": "He said "hello", then left"}', 'He said "hello", then left'),
    ('{"content": "He said: "no", and "yes"."}', 'He said: "no", and "yes".'),
    ('{"content": ""quoted""}', '"quoted"'),
    ('{"content": "print("a")\nprint("b")"}', 'print("a")\nprint("b")'),
    ('{"content": "f({"x": 1, "y": "z"})"}', 'f({"x": 1, "y": "z"})'),
    ('{"content": "SELECT "name", "id" FROM t"}', 'SELECT "name", "id" FROM t'),
    ('{"content": "C:\\dir\nD:\\dir"}', "C:\\dir\nD:\\dir"),
    ('{"content": "it\\\'s\nok"}', "it's\nok"),
]


@pytest.mark.parametrize(("written", "content"), ALMOST_JSON)
def test_P3_raw_line_breaks_and_unescaped_quotes_are_mended_and_noted(written: str, content: str) -> None:
    text = hermes(f'{{"name": "write", "arguments": {written}}}')
    assert strict(text, Dialect.HERMES).failure is CallFailure.NOT_JSON
    assert repaired(text).calls == (call("write", content=content),)
    starter = f"<|call|>write {written}"
    assert strict(starter, Dialect.STARTER).failure is CallFailure.NOT_JSON
    assert repaired(starter, Dialect.STARTER).calls == (call("write", content=content),)


def test_P3_in_python_calls() -> None:
    text = "[write(content='one\ntwo')]"
    assert strict(text, Dialect.PYTHONIC).failure is CallFailure.ARGUMENTS
    assert repaired(text, Dialect.PYTHONIC).calls == (call("write", content="one\ntwo"),)


# --- malformed calls, one kind a line ------------------------------------------------------------------------------

BAD = CallFailure
MALFORMED = [
    (Dialect.HERMES, hermes(""), BAD.NOT_JSON, None),
    (Dialect.HERMES, hermes("get"), BAD.NOT_JSON, None),
    (Dialect.HERMES, hermes('"get"'), BAD.NOT_AN_OBJECT, None),
    (Dialect.HERMES, hermes("[]"), BAD.NOT_AN_OBJECT, None),
    (Dialect.HERMES, hermes("{}"), BAD.NO_NAME, None),
    (Dialect.HERMES, hermes('{"name": "", "arguments": {}}'), BAD.NO_NAME, None),
    (Dialect.HERMES, hermes('{"name": 1, "arguments": {}}'), BAD.NO_NAME, None),
    (Dialect.HERMES, hermes('{"name": "get", "arguments": [1]}'), BAD.ARGUMENTS, None),
    (Dialect.HERMES, hermes('{"name": "get", "arguments": 1}'), BAD.ARGUMENTS, None),
    (Dialect.HERMES, hermes('{"name": "get", "arguments": "x"}'), BAD.ARGUMENTS, None),
    (Dialect.HERMES, hermes('{"name": "get", "id": "#W1"}'), BAD.ARGUMENTS, None),
    (Dialect.HERMES, hermes('{"name": "get", "arguments": {}, "parameters": {"n": 1}}'), BAD.ARGUMENTS, None),
    (Dialect.HERMES, hermes('{"name": "get", "arguments": {"a": NaN}}'), BAD.NOT_JSON, None),
    (Dialect.HERMES, hermes('{"name": "get", "arguments": {"a": -Infinity}}'), BAD.NOT_JSON, None),
    (Dialect.HERMES, '<tool_call>{"name": "get", "arg', BAD.UNCLOSED_CALL, None),
    (Dialect.HERMES, '<tool_call>{"name": "get", "arguments": {"id": "#W', BAD.UNCLOSED_CALL, None),
    (Dialect.HERMES, "<tool_call>", BAD.UNCLOSED_CALL, None),
    (Dialect.HERMES, hermes('{"name": "write", "arguments": {"content": "cut'), BAD.NOT_JSON, None),
    (Dialect.HERMES, hermes('{"name": "get", "arguments": {"a": 1, "a": 2}}'), BAD.NOT_JSON, call("get", a=2)),
    (Dialect.HERMES, hermes('{"name": "get", "arguments": {}}}'), BAD.STRAY_TEXT, call("get")),
    (Dialect.HERMES, hermes('{"name": "get", "arguments": {"n": 1}'), BAD.NOT_JSON, call("get", n=1)),
    (Dialect.HERMES, '<tool_call>{"name": "get", "arguments": {}}', BAD.UNCLOSED_CALL, call("get")),
    (Dialect.HERMES, hermes('{"name": "get", "parameters": {"n": 1}}'), BAD.ARGUMENTS, call("get", n=1)),
    (Dialect.HERMES, hermes('{"name": "get", "args": {"n": 1}}'), BAD.ARGUMENTS, call("get", n=1)),
    (Dialect.HERMES, hermes('{"name": "get"}'), BAD.ARGUMENTS, call("get")),
    (Dialect.HERMES, hermes('{"name": "get", "arguments": null}'), BAD.ARGUMENTS, call("get")),
    (Dialect.HERMES, hermes('{"name": "get", "arguments": ""}'), BAD.ARGUMENTS, call("get")),
    (Dialect.HERMES, hermes('```json\n{"name": "get", "arguments": {}}\n```'), BAD.NOT_JSON, call("get")),
    (Dialect.HERMES, hermes(f'{{"function": {as_json("get", n=1)}}}'), BAD.NO_NAME, call("get", n=1)),
    (Dialect.LLAMA, '{"name": 5, "parameters": {}}', BAD.NO_NAME, None),
    (Dialect.LLAMA, '{"parameters": {}}', BAD.NO_NAME, None),
    (Dialect.LLAMA, '{"name": "get", "parameters": [1]}', BAD.ARGUMENTS, None),
    (Dialect.LLAMA, '{"name": "get", "parameters": {"id": "#W', BAD.NOT_JSON, None),
    (Dialect.LLAMA, "<|python_tag|>import os", BAD.NOT_JSON, None),
    (Dialect.LLAMA, '{"name": "get", "parameters": {"n": 1}', BAD.NOT_JSON, call("get", n=1)),
    (Dialect.LLAMA, '{"name": "get", "parameters": {}, "arguments": {}}', BAD.ARGUMENTS, call("get")),
    (Dialect.LLAMA, '{"name": "ping"}', BAD.ARGUMENTS, call("ping")),
    (Dialect.LLAMA, '```json\n{"name": "get", "parameters": {}}\n```', BAD.STRAY_TEXT, call("get")),
    (Dialect.LLAMA, hermes(as_json("get")), BAD.STRAY_TEXT, call("get")),
    (Dialect.PYTHONIC, "[get(n=f(1))]", BAD.ARGUMENTS, None),
    (Dialect.PYTHONIC, "[get(n=1 + 1)]", BAD.ARGUMENTS, None),
    (Dialect.PYTHONIC, "[get(n=x)]", BAD.ARGUMENTS, None),
    (Dialect.PYTHONIC, "[get(n=1, n=2)]", BAD.ARGUMENTS, None),
    (Dialect.PYTHONIC, "[get(**{'n': 1})]", BAD.ARGUMENTS, None),
    (Dialect.PYTHONIC, "[get(n={'a': 1, 'a': 2}, **x)]", BAD.ARGUMENTS, None),
    (Dialect.PYTHONIC, "[get(n=1e999)]", BAD.ARGUMENTS, None),
    (Dialect.PYTHONIC, "[get(n=b'x')]", BAD.ARGUMENTS, None),
    (Dialect.PYTHONIC, "[get(1, 2, 3)]", BAD.ARGUMENTS, None),
    (Dialect.PYTHONIC, "[get(n=", BAD.UNCLOSED_CALL, None),
    (Dialect.PYTHONIC, "[get(n=1)", BAD.UNCLOSED_CALL, call("get", n=1)),
    (Dialect.PYTHONIC, "[get(n=true)]", BAD.ARGUMENTS, call("get", n=True)),
    (Dialect.PYTHONIC, "[get(n=(1, null))]", BAD.ARGUMENTS, call("get", n=[1, None])),
    (Dialect.PYTHONIC, '[get("#W1", n=3)]', BAD.ARGUMENTS, call("get", id="#W1", n=3)),
    (Dialect.PYTHONIC, 'get("#W1", 3)', BAD.ARGUMENTS, call("get", id="#W1", n=3)),
    (Dialect.PYTHONIC, "```tool_code\nget(n=1)\n```", BAD.STRAY_TEXT, call("get", n=1)),
    (Dialect.PYTHONIC, "```python\n[get(n=1)]\n```", BAD.STRAY_TEXT, call("get", n=1)),
    (Dialect.QWEN_XML, "<tool_call></tool_call>", BAD.NO_NAME, None),
    (Dialect.QWEN_XML, qwen(""), BAD.NO_NAME, None),
    (Dialect.QWEN_XML, "<tool_call>\n<function=get>\nx</function>\n</tool_call>", BAD.STRAY_TEXT, None),
    (Dialect.QWEN_XML, "<tool_call>\n<function=get>\n<parameter=n>\n1", BAD.UNCLOSED_CALL, None),
    (Dialect.QWEN_XML, "<tool_call><function=get><parameter=n>1</parameter>", BAD.UNCLOSED_CALL, call("get", n=1)),
    (
        Dialect.QWEN_XML,
        "<tool_call><function=get>\n<parameter=n>\n1\n<parameter=id>\nx\n</parameter></function></tool_call>",
        BAD.UNCLOSED_CALL,
        call("get", n=1, id="x"),
    ),
    (Dialect.QWEN_XML, "<function=get>\n<parameter=n>1</parameter></function>", BAD.STRAY_TEXT, call("get", n=1)),
    (Dialect.QWEN_XML, "<function=get>\n</function>\n</tool_call>", BAD.STRAY_TEXT, call("get")),
    (Dialect.QWEN_XML, "<tool_call><function=get></tool_call>", BAD.UNCLOSED_CALL, call("get")),
    (
        Dialect.QWEN_XML,
        "<tool_call><function=get><parameter=n>1</parameter><parameter=n>2</parameter></function></tool_call>",
        BAD.ARGUMENTS,
        call("get", n=2),
    ),
]  # fmt: skip


@pytest.mark.parametrize(("dialect", "text", "failure", "mended"), MALFORMED)
def test_malformed_calls(dialect: Dialect, text: str, failure: CallFailure, mended: ToolCall | None) -> None:
    parsed = parse(text, dialect, tools=TOOLS)
    assert (parsed.failure, parsed.reply, len(parsed.items)) == (failure, None, 1)
    assert parsed.detail
    lenient = repaired(text, dialect)
    assert (lenient.failure, lenient.reply) == (None, None)
    assert [item.call for item in lenient.items] == [mended]
    assert (lenient.items[0].failure is None) == (mended is not None)


def test_one_malformed_call_makes_a_step_malformed_and_leaves_the_others_readable() -> None:
    text = "\n".join([hermes(as_json("ping")), hermes("{oops"), hermes("{}"), hermes(as_json("get", n=1))])
    parsed = strict(text, Dialect.HERMES)
    assert failures(parsed) == [None, CallFailure.NOT_JSON, CallFailure.NO_NAME, None]
    assert (parsed.failure, parsed.detail) == (CallFailure.NOT_JSON, parsed.items[1].detail)
    lenient = parse(text, Dialect.HERMES, mode="repair")
    assert (lenient.failure, lenient.calls, failures(lenient)) == (None, parsed.calls, failures(parsed))
    assert lenient.calls == (call("ping"), call("get", n=1))


# --- P6: invented names --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", BOTH)
@pytest.mark.parametrize("name", ["scgetall-tool", "functions.get", "GET", "get_", "läs"])
def test_P6_an_invented_name_is_for_the_environment_to_answer(name: str, mode: Mode) -> None:
    for dialect, text in [
        (Dialect.STARTER, f"<|call|>{name} {{}}"),
        (Dialect.HERMES, hermes(json.dumps({"name": name, "arguments": {}}, ensure_ascii=False))),
        (Dialect.LLAMA, json.dumps({"name": name, "parameters": {}})),
        (Dialect.PYTHONIC, f"[{name}()]"),
        (Dialect.QWEN_XML, qwen(name)),
    ]:
        parsed = parse(text, dialect, mode=mode, tools=TOOLS)
        assert (parsed.calls, parsed.failure) == ((call(name),), None), dialect


# --- P7: parallel calls --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", BOTH)
@pytest.mark.parametrize("number", [2, 5, MAX_CALLS])
def test_P7_all_parallel_calls_are_returned_in_order(number: int, mode: Mode) -> None:
    wanted = tuple(call("get", n=n) for n in range(number))
    for dialect, text in [
        (Dialect.STARTER, "".join(f'<|call|>get {{"n": {n}}}' for n in range(number))),
        (Dialect.HERMES, "\n".join(hermes(as_json("get", n=n)) for n in range(number))),
        (Dialect.LLAMA, "; ".join(f'{{"name": "get", "parameters": {{"n": {n}}}}}' for n in range(number))),
        (Dialect.PYTHONIC, f"[{', '.join(f'get(n={n})' for n in range(number))}]"),
        (Dialect.QWEN_XML, "\n".join(qwen("get", n=str(n)) for n in range(number))),
    ]:
        assert parse(text, dialect, mode=mode, tools=TOOLS).calls == wanted, dialect
    entries = [entry(json.dumps({"n": n}), id=f"c{n}") for n in range(number)]
    parsed = parse_wire({"content": None, "tool_calls": entries}, mode=mode)
    assert parsed.calls == wanted
    assert [found.id for found in parsed.calls] == [f"c{n}" for n in range(number)]


@pytest.mark.parametrize(
    ("dialect", "text"),
    [
        (Dialect.HERMES, hermes(as_json("ping") + "\n" + as_json("get"))),
        (Dialect.HERMES, hermes(f"[{as_json('ping')}, {as_json('get')}]")),
        (Dialect.HERMES, "<tool_call>" + as_json("ping") + "<tool_call>" + as_json("get") + "</tool_call>"),
        (Dialect.LLAMA, '[{"name": "ping", "parameters": {}}, {"name": "get", "parameters": {}}]'),
        (Dialect.PYTHONIC, "ping()\nget()"),
        (Dialect.PYTHONIC, "[ping()]\n[get()]"),
        (Dialect.PYTHONIC, "[ping() get()]"),
        (Dialect.QWEN_XML, "<tool_call><function=ping></function><function=get></function></tool_call>"),
    ],
)
def test_P7_parallel_calls_in_a_wrong_shape_are_no_less(dialect: Dialect, text: str) -> None:
    assert strict(text, dialect).failure is not None
    parsed = parse(text, dialect, mode="repair", tools=TOOLS)
    assert (parsed.calls, parsed.text) == ((call("ping"), call("get")), "")


@pytest.mark.parametrize(
    ("dialect", "text"),
    [
        (Dialect.STARTER, "<|call|>ping {}" * 11),
        (Dialect.HERMES, hermes(as_json("ping")) * 11),
        (Dialect.LLAMA, '{"name": "ping", "parameters": {}};' * 11),
        (Dialect.PYTHONIC, f"[{'ping(),' * 10}ping()]"),
        (Dialect.QWEN_XML, qwen("ping") * 11),
    ],
)
def test_a_flood_is_malformed_or_answered_as_one(dialect: Dialect, text: str) -> None:
    parsed = strict(text, dialect, max_calls=3)
    assert (parsed.failure, parsed.calls) == (CallFailure.FLOOD, (call("ping"),) * 3)
    assert parsed.detail == "8 more than the 3 calls that are allowed in one step"
    lenient = parse(text, dialect, mode="repair", max_calls=3)
    assert (lenient.failure, lenient.items) == (None, parsed.items)
    assert lenient.items[-1].end == len(text)
    assert failures(lenient) == [None, None, None, CallFailure.FLOOD]
    assert strict(text, dialect, max_calls=11).failure is None


# --- calls in another dialect --------------------------------------------------------------------------------------

ANOTHER = [
    (Dialect.HERMES, '{"name": "get", "arguments": {"n": 1}}'),
    (Dialect.HERMES, '```json\n{"name": "get", "arguments": {"n": 1}}\n```'),
    (Dialect.HERMES, "{'name': 'get', 'arguments': {'n': 1}}"),
    (Dialect.HERMES, "[get(n=1)]"),
    (Dialect.HERMES, qwen("get", n="1")),
    (Dialect.QWEN_XML, hermes(as_json("get", n=1))),
    (Dialect.LLAMA, qwen("get", n="1")),
    (Dialect.LLAMA, "<|python_tag|>get(n=1)"),
    (Dialect.LLAMA, "[get(n=1)]"),
    (Dialect.PYTHONIC, '{"name": "get", "parameters": {"n": 1}}'),
    (Dialect.PYTHONIC, hermes(as_json("get", n=1))),
    (Dialect.STARTER, hermes(as_json("get", n=1))),
]


@pytest.mark.parametrize(("dialect", "text"), ANOTHER)
def test_a_call_in_another_dialect_is_read_in_repair_if_the_tool_was_offered(dialect: Dialect, text: str) -> None:
    assert strict(text, dialect, tools=TOOLS).calls == ()
    assert repaired(text, dialect).calls == (call("get", n=1),)
    assert parse(text, dialect, mode="repair").calls == ()
    assert repaired(text, dialect, tools=[tool("other")]).calls == ()


@pytest.mark.parametrize(
    "text",
    [
        'You could send {"name": "get", "arguments": {"n": 1}}.',
        'For example:\n```json\n{"name": "get", "arguments": {"n": 1}}\n```\nThat gets it.',
        "Try [get(n=1)] there.",
        "get(n=1) is how to do it",
    ],
)
def test_text_that_explains_a_call_is_no_call(text: str) -> None:
    assert repaired(text).reply == text


# --- qwen's types --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", BOTH)
@pytest.mark.parametrize(
    ("schema", "written", "value"),
    [
        (TEXT, "5", "5"),
        (TEXT, "true", "true"),
        (TEXT, "null", "null"),
        (TEXT, '{"a": 1}', '{"a": 1}'),
        (TEXT, "\n two\n lines \n", "\n two\n lines \n"),
        ({"type": "integer"}, "5", 5),
        ({"type": "integer"}, "\t-7 ", -7),
        ({"type": "integer"}, "five", "five"),
        ({"type": "integer"}, "9" * 5000, "9" * 5000),
        ({"type": "integer"}, "1_000", "1_000"),
        ({"type": "number"}, "0.5", 0.5),
        ({"type": "number"}, "2", 2),
        ({"type": "number"}, "1e999", "1e999"),
        ({"type": "number"}, "nan", "nan"),
        ({"type": "boolean"}, "true", True),
        ({"type": "boolean"}, "False", False),
        ({"type": "boolean"}, "1", "1"),
        ({"type": ["string", "null"]}, "None", None),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": ["string", "null"]}, "nothing", "nothing"),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "3", 3),
        ({"oneOf": [{"type": "array"}, {"type": "string"}]}, "[1]", [1]),
        ({"oneOf": [{"type": "array"}, {"type": "string"}]}, "[1", "[1"),
        ({"type": "array"}, '[1, "a"]', [1, "a"]),
        ({"type": "object"}, '{"a": {"b": null}}', {"a": {"b": None}}),
        ({"enum": [1, 2]}, "2", 2),
        ({"enum": ["1", "2"]}, "2", "2"),
        ({"const": True}, "true", True),
        ({"$ref": "#/$defs/N"}, "3", 3),
        ({"$ref": "#/$defs/Loop"}, "3", "3"),
        ({"$ref": "other.json"}, "3", "3"),
        ({}, "3", "3"),
        (True, "3", "3"),
        ({"type": 7, "enum": 7, "anyOf": 7}, "3", "3"),
    ],
)
def test_qwens_values_are_typed_by_the_schema(schema: Any, written: str, value: Any, mode: Mode) -> None:
    parameters = {
        "properties": {"x": schema},
        "$defs": {"N": {"type": "integer"}, "Loop": {"$ref": "#/$defs/Loop"}},
    }
    spec = ToolSpec(name="f", description="", parameters=parameters)
    parsed = parse(qwen("f", x=written), Dialect.QWEN_XML, mode=mode, tools=[spec])
    assert (parsed.calls, parsed.failure) == ((call("f", x=value),), None)
    assert type(parsed.calls[0].arguments["x"]) is type(value)


def test_qwens_objects_are_json_or_mended() -> None:
    tools = [tool("f", x={"type": "object"})]
    for written, value in [("{'a': 1}", {"a": 1}), ('"{\\"a\\": 1}"', {"a": 1})]:
        assert repaired(qwen("f", x=written), Dialect.QWEN_XML, tools=tools).calls == (call("f", x=value),)
        assert strict(qwen("f", x=written), Dialect.QWEN_XML, tools=tools).failure is CallFailure.NOT_JSON
    assert failures(repaired(qwen("f", x="oops"), Dialect.QWEN_XML, tools=tools)) == [CallFailure.NOT_JSON]


def test_without_its_tool_every_value_of_qwen_is_a_text() -> None:
    assert strict(qwen("f", x="3", y="null"), Dialect.QWEN_XML).calls == (call("f", x="3", y="null"),)


def test_what_looks_like_a_parameter_in_a_value_is_text_unless_the_tool_has_it() -> None:
    text = qwen("write", content="a\n<parameter=other>\nb")
    assert strict(text, Dialect.QWEN_XML, tools=TOOLS).calls == (call("write", content="a\n<parameter=other>\nb"),)
    again = qwen("write", content="a\n<parameter=content>\nb")
    assert strict(again, Dialect.QWEN_XML, tools=TOOLS).calls == (call("write", content="a\n<parameter=content>\nb"),)


# --- the wire ------------------------------------------------------------------------------------------------------


def entry(arguments: Any, *, name: Any = "get", id: str = "call_1") -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def wire(arguments: Any, **options: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": [entry(arguments, **options)]}


@pytest.mark.parametrize("mode", BOTH)
@pytest.mark.parametrize("empty", [{}, {"tool_calls": []}, {"tool_calls": None}, {"function_call": None}])
@pytest.mark.parametrize("content", ["Done.", [{"type": "text", "text": "Done."}], ["Done."]])
def test_P10_an_empty_list_of_calls_is_no_call(content: Any, empty: dict[str, Any], mode: Mode) -> None:
    assert parse_wire({"role": "assistant", "content": content, **empty}, mode=mode) == Parsed(text="Done.")


@pytest.mark.parametrize("mode", BOTH)
@pytest.mark.parametrize("message", [{}, {"content": None}, {"content": ""}, {"content": [], "tool_calls": []}])
def test_P10_a_message_without_anything_is_an_empty_step(message: dict[str, Any], mode: Mode) -> None:
    assert parse_wire(message, mode=mode).failure is CallFailure.EMPTY


@pytest.mark.parametrize("mode", BOTH)
@pytest.mark.parametrize("arguments", ['{"id": "#W1", "n": [1, {"a": null}]}', {"id": "#W1", "n": [1, {"a": None}]}])
def test_S1_arguments_are_a_text_or_an_object(arguments: Any, mode: Mode) -> None:
    parsed = parse_wire(wire(arguments), mode=mode)
    assert parsed.calls == (call("get", id="#W1", n=[1, {"a": None}]),)
    assert (parsed.calls[0].id, parsed.failure, parsed.text) == ("call_1", None, "")
    assert (parsed.items[0].repairs, parsed.items[0].start, parsed.items[0].end) == ((), 0, 0)


@pytest.mark.parametrize("arguments", ["", " \n", None, "{}", {}])
def test_S1_no_arguments_are_an_empty_object(arguments: Any) -> None:
    strictly, leniently = (parse_wire(wire(arguments, name="ping"), mode=mode) for mode in BOTH)
    assert strictly.calls == leniently.calls == (call("ping"),)
    assert strictly.items[0].repairs == ()
    assert leniently.items[0].repairs == (() if arguments in ("{}", {}) else ("no arguments",))


@pytest.mark.parametrize(
    ("arguments", "failure", "mended"),
    [
        ('"{\\"n\\": 1}"', CallFailure.ARGUMENTS, {"n": 1}),
        ("{'n': 1}", CallFailure.NOT_JSON, {"n": 1}),
        ('{"n": {"m": 1}', CallFailure.NOT_JSON, {"n": {"m": 1}}),
        ('{"n": 1', CallFailure.NOT_JSON, None),  # it may have been 12
        ('{"n": "cut', CallFailure.NOT_JSON, None),
        ('{"n": 1} {"n": 2}', CallFailure.NOT_JSON, None),
        ("[1]", CallFailure.ARGUMENTS, None),
        ([1], CallFailure.ARGUMENTS, None),
        (5, CallFailure.ARGUMENTS, None),
        ("nope", CallFailure.NOT_JSON, None),
        ({"n": float("nan")}, CallFailure.NOT_JSON, None),
        ({"n": object()}, CallFailure.ARGUMENTS, None),
    ],
)
def test_S1_arguments_that_are_neither(arguments: Any, failure: CallFailure, mended: Any) -> None:
    parsed = parse_wire(wire(arguments))
    assert (parsed.failure, failures(parsed), parsed.calls) == (failure, [failure], ())
    lenient = parse_wire(wire(arguments), mode="repair")
    assert (lenient.failure, lenient.reply) == (None, None)
    assert [found.arguments for found in lenient.calls] == ([] if mended is None else [mended])
    assert all(item.repairs or item.failure for item in lenient.items)


@pytest.mark.parametrize(
    "broken", [None, "get", 5, [], {}, {"function": None}, {"function": {}}, entry("{}", name=None)]
)
def test_a_broken_entry_of_the_wire_is_a_failed_call_and_no_crash(broken: Any) -> None:
    for mode in BOTH:
        parsed = parse_wire({"content": "Hi", "tool_calls": [entry("{}"), broken]}, mode=mode)
        assert (parsed.calls, parsed.text, len(parsed.items)) == ((call("get"),), "Hi", 2)
        assert parsed.items[1].failure in (CallFailure.NOT_AN_OBJECT, CallFailure.NO_NAME)
        assert (parsed.failure is None) == (mode == "repair")


@pytest.mark.parametrize("mode", BOTH)
def test_older_and_odder_wires(mode: Mode) -> None:
    older = {"name": "get", "arguments": '{"n": 1}'}
    assert parse_wire({"content": "", "function_call": older}, mode=mode).calls == (call("get", n=1),)
    both = {"function_call": older, "tool_calls": [{"id": "a", "function": older}]}
    assert [found.id for found in parse_wire(both, mode=mode).calls] == ["a"]
    flat = parse_wire({"tool_calls": [{"id": 7, "name": "get", "arguments": '{"n": 1}'}]}, mode=mode)
    assert [(found.name, found.id) for found in flat.calls] == ([("get", "7")] if mode == "repair" else [])
    assert parse_wire({"tool_calls": entry("{}")}, mode=mode).calls == (call("get"),)


@pytest.mark.parametrize("mode", BOTH)
def test_reasoning_and_refusals_on_the_wire(mode: Mode) -> None:
    for message in [
        {"content": "Hi", "reasoning_content": "Hm."},
        {"content": "Hi", "reasoning": "Hm.", "reasoning_content": None},
        {"content": "<think>\nHm.\n</think>\n\nHi", "reasoning_content": ""},
        {"content": "Hm.</think>Hi"},
        {"content": [{"type": "thinking", "thinking": "Hm."}, {"type": "text", "text": "Hi"}]},
    ]:
        assert parse_wire(message, mode=mode) == Parsed(text="Hi", reasoning="Hm."), message
    assert parse_wire({"content": None, "refusal": "I can not."}, mode=mode).reply == "I can not."
    unclosed = parse_wire({"content": "<think>Hm."}, mode=mode)
    assert (unclosed.failure, unclosed.reasoning, unclosed.text) == (CallFailure.UNCLOSED_REASONING, "Hm.", "")
    called = parse_wire({**wire("{}"), "content": "<think>Hm."}, mode=mode)
    assert (called.failure, called.reasoning, called.calls) == (None, "Hm.", (call("get"),))


def test_nothing_of_an_odd_content_is_lost() -> None:
    parsed = parse_wire({"content": ["a", {"type": "image_url", "image_url": {"url": "data:x"}}, 5]})
    assert parsed.text == 'a\n{"type": "image_url", "image_url": {"url": "data:x"}}\n5'


def test_a_deep_message_is_no_crash() -> None:
    deep: Any = "x"
    for _ in range(100_000):
        deep = [deep]
    for mode in BOTH:
        parsed = parse_wire({"content": [deep], "function_call": deep, "tool_calls": [entry({"x": deep})]}, mode=mode)
        assert failures(parsed) == [CallFailure.ARGUMENTS, CallFailure.NO_NAME]
        assert parsed.text == "[a list that cannot be shown]"


def test_a_flood_on_the_wire() -> None:
    message = {"tool_calls": [entry("{}", id=str(n)) for n in range(11)]}
    parsed = parse_wire(message)
    assert (parsed.failure, len(parsed.items)) == (CallFailure.FLOOD, MAX_CALLS + 1)
    lenient = parse_wire(message, mode="repair")
    assert (lenient.failure, failures(lenient)[-1]) == (None, CallFailure.FLOOD)
    assert lenient.items[-1].detail.startswith("3 more than the 8")


# --- hostile texts -------------------------------------------------------------------------------------------------

HOSTILE = {
    "brackets": "[" * 200_000,
    "braces": "{" * 200_000,
    "pairs": "[" * 100_000 + "]" * 100_000,
    "objects": '{"a":' * 40_000,
    "digits": "9" * 200_000,
    "quotes": '"' * 200_000,
    "space": " " * 200_000,
    "tags": "<tool_call>" * 90_000,
    "closed tags": "<tool_call></tool_call>" * 10_000,
    "open calls": '<tool_call>{"name": "get", "arguments": {"id": "' * 5_000,
    "calls": '<tool_call>{"name": "ping", "arguments": {}}</tool_call>' * 17_000,
    "control tokens": "<|call|>" * 100_000,
    "objects with names": '{"name":' * 30_000,
    "objects with parameters": '{"name": "x", "parameters": {' * 8_000,
    "functions": "<tool_call><function=get><parameter=n>1</parameter>" * 5_000,
    "parameters": "<tool_call><function=f>" + "\n<parameter=k>" * 20_000,
    "python calls": "[f(a=1), " * 100_000,
    "python numbers": f"[f(a=[{'1,' * 100_000}])]",
    "python signs": f"[f(a={'-' * 200_000}1)]",
    "python sums": f"[f(a={'1+' * 100_000}1)]",
    "thoughts": "<think></think>" * 60_000,
    "fences": "```python\n" * 20_000,
    "surrogates": "\ud800" * 200_000,
}


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("dialect", Dialect)
def test_hostile_texts_take_no_time_and_raise_nothing(dialect: Dialect, name: str) -> None:
    around = "{}" if dialect is not Dialect.HERMES else '<tool_call>{{"name": "get", "arguments": {}}}</tool_call>'
    text = around.format(HOSTILE[name])
    assert len(text) <= MAX_CHARACTERS
    before = time.process_time()
    parsed = parse(text, dialect, mode="repair", tools=TOOLS)
    assert time.process_time() - before < 2  # a tenth of that on an idle machine
    assert all(len(item.detail) <= 200 for item in parsed.items)
    assert len(parsed.items) <= MAX_CALLS + 1


def test_a_text_that_is_too_long_is_kept_and_not_parsed() -> None:
    text = "x" * MAX_CHARACTERS + hermes(as_json("ping"))
    for mode in BOTH:
        parsed = parse(text, Dialect.HERMES, mode=mode)
        assert (parsed.failure, parsed.items, parsed.text) == (CallFailure.FLOOD, (), text)


@pytest.mark.parametrize("depth", [50, 150, 900, 100_000])
def test_deep_nesting_is_read_as_far_as_others_can_follow(depth: int) -> None:
    nested = "[" * depth + "]" * depth
    for dialect, text in [
        (Dialect.HERMES, hermes(f'{{"name": "get", "arguments": {{"id": {nested}}}}}')),
        (Dialect.PYTHONIC, f"[get(id={nested})]"),
    ]:
        for mode in BOTH:
            parsed = parse(text, dialect, mode=mode)
            assert len(parsed.items) == 1
            assert bool(parsed.calls) == (depth == 50)
            json.dumps([found.arguments for found in parsed.calls])


@pytest.mark.parametrize("digits", ["9" * 4300, "9" * 4301, "-" + "9" * 100_000])
def test_huge_integers_are_no_crash(digits: str) -> None:
    parsed = strict(hermes(f'{{"name": "get", "arguments": {{"n": {digits}}}}}'), Dialect.HERMES)
    assert bool(parsed.calls) == (len(digits) == 4300)
    for huge in (f"[get(n={digits}9)]", f"[get(n=0x{'f' * 100_000})]"):
        assert strict(huge, Dialect.PYTHONIC).failure is CallFailure.ARGUMENTS
    assert [found.key() for found in parsed.calls] == [f'get {{"n":{digits}}}'][: len(parsed.calls)]


def test_odd_escapes_in_python_warn_nobody() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert strict(r'[get(id="\d")]', Dialect.PYTHONIC).calls == (call("get", id=r"\d"),)


def test_a_step_is_parsed_the_same_twice() -> None:
    text = hermes(as_json("get", n=1)) + hermes("{oops")
    assert strict(text, Dialect.HERMES) == strict(text, Dialect.HERMES)
