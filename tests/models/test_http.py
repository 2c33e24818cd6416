"""The HTTP policy against a server on 127.0.0.1: what is asked, what is made of answers, and every way to fail."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import time
from collections.abc import AsyncIterator, Callable, Sequence
from email.utils import formatdate
from typing import Any

import pytest
from support.loopback import Loopback, Reply

from envace.errors import ConfigError, ContextOverflow, EndpointError, ModelError
from envace.models.formats import StarterFormat
from envace.models.http import HttpPolicy, HttpSettings
from envace.models.transcripts import Transcript, random_stream
from envace.models.wire import Address, WireFormat, parse_address, retry_after, wire_messages
from envace.types import Author, Message, Role, Step, ToolCall, ToolSpec

KEY = "sk-very-secret-0123456789"
ASK = Message(author=Author.USER, content="cancel order #W123456, please.")
TOOL = ToolSpec(name="get_order", description="Look up.", parameters={"type": "object", "properties": {"id": {}}})
QUICK = {"backoff": 0.01, "max_retries": 2, "step_deadline": 5.0}


@pytest.fixture(autouse=True)
def no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ENVACE_API_KEY", "OPENAI_API_KEY", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
async def server() -> AsyncIterator[Any]:
    loopback = Loopback()
    await loopback.start()
    yield loopback
    await loopback.stop()


Make = Callable[..., HttpPolicy]


@pytest.fixture
async def policy(server: Any) -> AsyncIterator[Make]:
    """Makes a policy on the server: `policy(form=None, **settings)`."""
    made: list[HttpPolicy] = []

    def build(form: StarterFormat | None = None, *, name: str = "#tiny", **settings: Any) -> HttpPolicy:
        address = parse_address(server.url + name)
        made.append(HttpPolicy(address, form, settings=HttpSettings(**{**QUICK, **settings})))
        return made[-1]

    yield build
    for one in made:
        await one.aclose()


def chat(content: str | None = "Done.", *, usage: Any = None, finish: str | None = "stop", **message: Any) -> Any:
    choice = {"index": 0, "message": {"role": "assistant", "content": content, **message}, "finish_reason": finish}
    return Reply({"choices": [choice], "usage": usage})


def ids(token_ids: Sequence[int] | None, logprobs: Sequence[Any] | None, *, usage: Any = None, **choice: Any) -> Any:
    """An answer of `/completions` in vLLM's words."""
    given = None if logprobs is None else {"token_logprobs": list(logprobs), "tokens": [""] * len(logprobs)}
    whole = {"text": "", "finish_reason": "stop", "token_ids": token_ids, "logprobs": given, **choice}
    return Reply({"choices": [whole], "usage": usage})


def error(status: int, message: str = "no", **headers: str) -> Any:
    return Reply({"error": {"message": message}}, status=status, headers=headers)


def talk(*messages: Message, tools: Sequence[ToolSpec] = ()) -> Transcript:
    return Transcript([], random=random_stream(0), messages=[ASK, *messages], tools=tools)


async def step(policy: HttpPolicy, transcript: Transcript | None = None, **how: Any) -> Step:
    how = {"role": Role.ACT, "max_tokens": 16, "temperature": 1.0, **how}
    return await policy.sample(talk() if transcript is None else transcript, how.pop("role"), **how)


# --- addresses ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "asked"),
    [
        ("http://h:8000/v1#m", "http://h:8000/v1/chat/completions"),
        ("http://h:8000/v1/#m", "http://h:8000/v1/chat/completions"),
        ("https://h/x/chat/completions#m", "https://h/x/chat/completions"),
        ("http://[::1]:80/v1#m", "http://[::1]:80/v1/chat/completions"),
    ],
)
def test_an_address_is_a_base_url_or_a_full_one(text: str, asked: str) -> None:
    assert parse_address(text).at("/chat/completions") == asked


def test_a_model_name_may_hold_slashes_and_colons() -> None:
    assert parse_address("http://h/v1#org/model:free").model == "org/model:free"


def test_a_full_url_of_the_other_api_is_refused(form: StarterFormat) -> None:
    with pytest.raises(ConfigError, match="/completions"):
        HttpPolicy(parse_address("http://h/v1/chat/completions#m"), form)


@pytest.mark.parametrize("text", ["localhost:8000/v1#m", "ftp://h/v1", "http://", "http://h:port/v1", "http://h/a b"])
def test_what_is_no_address_is_said_without_repeating_it(text: str) -> None:
    with pytest.raises(ConfigError, match="http://localhost:8000/v1#NAME") as caught:
        parse_address(text.replace("//", f"//me:{KEY}@"))
    assert KEY not in str(caught.value)


def test_credentials_of_an_address_are_not_shown() -> None:
    address = parse_address(f"http://me:{KEY}@h:1/v1?key={KEY}#m")
    assert str(address) == "http://h:1/v1#m"
    assert KEY not in repr(address)
    assert address.user == ("me", KEY)


async def test_the_only_model_is_taken(server: Any, policy: Make) -> None:
    server.answers(chat())
    await step(policy(name=""))
    assert server.posts[0].json["model"] == "tiny"


async def test_several_models_are_named(server: Any, policy: Make) -> None:
    server.models = ["one", "two"]
    with pytest.raises(EndpointError, match=r"2 models \(one, two\); name one: .*#NAME"):
        await step(policy(name=""))


# --- messages ----------------------------------------------------------------------------------------------------


async def test_a_chat_step_has_no_ids_and_comes_parsed(server: Any, policy: Make) -> None:
    server.answers(chat("Done, refund 120."))
    made = policy()
    result = await step(made)
    assert (result.ids, result.logprobs, result.stopped) == ([], None, True)
    assert result.parsed is not None
    assert result.parsed.reply == "Done, refund 120."
    assert made.trainable is False
    assert server.posts[0].path == "/v1/chat/completions"
    assert server.posts[0].json == {
        "model": "tiny",
        "messages": [{"role": "user", "content": ASK.content}],
        "max_tokens": 16,
        "temperature": 1.0,
    }


async def test_P10_no_tools_and_no_calls_are_no_keys(server: Any, policy: Make) -> None:
    server.answers(chat("Hello.", tool_calls=[]))
    result = await step(policy(), talk(Message(author=Author.ASSISTANT, content="Hm."), ASK))
    assert "tools" not in server.posts[0].json
    assert not any("tool_calls" in message for message in server.posts[0].json["messages"])
    assert result.parsed is not None
    assert result.parsed.reply == "Hello."


async def test_tools_are_sent_unless_the_messages_describe_them(server: Any, policy: Make) -> None:
    server.answers(chat())
    await step(policy(), talk(tools=[TOOL]))
    await step(policy(tools_in_request=False), talk(tools=[TOOL]))
    assert server.posts[0].json["tools"][0]["function"]["name"] == "get_order"
    assert "tools" not in server.posts[1].json


def call(name: str = "get_order", id: str = "", **arguments: Any) -> ToolCall:
    return ToolCall(name=name, arguments=arguments, id=id)


def said(*calls: ToolCall, text: str = "") -> Message:
    return Message(author=Author.ASSISTANT, content=text, calls=calls)


def told(text: str, *, id: str = "", name: str = "") -> Message:
    return Message(author=Author.TOOL, content=text, call_id=id, name=name)


def test_S1_arguments_are_a_string_on_the_wire_only() -> None:
    wire = wire_messages([ASK, said(call(order="#1", note="ä")), told("{}")])
    assert wire[1]["tool_calls"][0]["function"] == {"name": "get_order", "arguments": '{"order":"#1","note":"ä"}'}
    assert wire[1]["content"] is None


async def test_S1_arguments_arrive_as_an_object(server: Any, policy: Make) -> None:
    wire = {"id": "c1", "type": "function", "function": {"name": "get_order", "arguments": '{"id": "#1"}'}}
    server.answers(chat(None, tool_calls=[wire], finish="tool_calls"))
    result = await step(policy(), talk(tools=[TOOL]))
    assert result.parsed is not None
    assert [(made.name, made.arguments, made.id) for made in result.parsed.calls] == [("get_order", {"id": "#1"}, "c1")]


def test_P7_every_call_has_its_answer_under_its_own_id() -> None:
    calls = said(call("a", "x"), call("b", ""), call("a", "x"))
    answers = [told("third", name="a"), told("second", name="b"), told("first", id="x", name="a")]
    wire = wire_messages([ASK, calls, *answers])
    named = [made["id"] for made in wire[1]["tool_calls"]]
    assert named[0] == "x"
    assert len(set(named)) == 3
    assert [message["tool_call_id"] for message in wire[2:]] == named


def test_P7_made_up_ids_stay_the_same_as_the_conversation_grows() -> None:
    start = [ASK, said(call("a"), call("b")), told("1"), told("2")]
    longer = wire_messages([*start, said(call("a")), told("3")])
    assert longer[:4] == wire_messages(start)
    assert [message["content"] for message in longer if message["role"] == "tool"] == ["1", "2", "3"]
    assert all(len(made["id"]) == 9 and made["id"].isalnum() for made in longer[1]["tool_calls"])


def test_P7_an_id_that_was_used_before_is_not_used_again() -> None:
    wire = wire_messages([ASK, said(call("a", "call_0")), told("1", id="call_0"), said(call("a", "call_0")), told("2")])
    assert wire[1]["tool_calls"][0]["id"] == wire[2]["tool_call_id"] == "call_0"
    assert wire[3]["tool_calls"][0]["id"] == wire[4]["tool_call_id"] != "call_0"


def test_P7_what_answers_no_readable_call_is_said_after_the_answers() -> None:
    wire = wire_messages([ASK, said(call("a")), told('{"error":"not_json"}'), told("fine", name="a")])
    assert [message["role"] for message in wire] == ["user", "assistant", "tool", "user"]
    assert [message["content"] for message in wire[2:]] == ["fine", '{"error":"not_json"}']


def test_P7_a_call_without_an_answer_is_an_error() -> None:
    with pytest.raises(ModelError, match="'b' has no answer"):
        wire_messages([ASK, said(call("a"), call("b")), told("1", name="a")])


def test_text_that_utf_8_cannot_write_is_replaced() -> None:
    assert wire_messages([Message(author=Author.USER, content="a\ud800b")])[0]["content"] == "a?b"


@pytest.mark.parametrize(
    ("message", "key", "sent"),
    [
        ({"reasoning": "I think."}, "reasoning", "I think."),
        ({"reasoning_content": "I think."}, "reasoning_content", "I think."),
        ({"content": "<think>I think.</think>Hm."}, "content", "<think>\nI think.\n</think>\n\nHm."),
    ],
)
async def test_reasoning_goes_back_to_where_it_came_from(
    server: Any, policy: Make, message: dict[str, str], key: str, sent: str
) -> None:
    server.answers(chat(**{"content": "Hm.", **message}), chat())
    made = policy()
    parsed = (await step(made)).parsed
    assert parsed is not None
    assert (parsed.reply, parsed.reasoning) == ("Hm.", "I think.")
    kept = Message(author=Author.ASSISTANT, content="Hm.", reasoning="I think.")
    await step(made, talk(kept, ASK))
    assert server.posts[1].json["messages"][1][key] == sent


async def test_a_rehearsed_step_cannot_be_asked_for_in_messages(policy: Make) -> None:
    with pytest.raises(ModelError, match="cannot continue inside a tool message"):
        await step(policy(), role=Role.REHEARSE)


def test_the_format_of_messages_knows_no_token() -> None:
    form = WireFormat()
    assert form.open([TOOL], [ASK]) == form.encode(["text"]) == form.written(ASK) == []
    assert form.stop_ids() == frozenset()
    with pytest.raises(ModelError, match="no token ids"):
        form.parse([])


async def test_settings_shape_the_request(server: Any, policy: Make) -> None:
    server.answers(chat())
    extra = {"chat_template_kwargs": {"enable_thinking": False}, "temperature": None}
    made = policy(top_p=0.9, token_limit="max_completion_tokens", extra_body=extra, headers={"X-Team": "blue"})
    await step(made)
    asked = server.posts[0]
    assert {key: value for key, value in asked.json.items() if key not in ("model", "messages")} == {
        "max_completion_tokens": 16,
        "top_p": 0.9,
        "chat_template_kwargs": {"enable_thinking": False},
    }
    assert asked.headers["x-team"] == "blue"


async def test_seeds_come_from_the_transcript_and_differ_within_a_group(server: Any, policy: Make) -> None:
    server.answers(chat())
    made = policy(seed=True)
    for number in (1, 2, 1):
        await step(made, Transcript([], random=random_stream(number), messages=[ASK]))
    first, second, again = (asked.json["seed"] for asked in server.posts)
    assert first == again != second


# --- limits and usage --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("finish", "whole"), [("length", False), ("stop", True), ("tool_calls", True)])
async def test_R1_a_step_that_a_limit_cut_did_not_stop(server: Any, policy: Make, finish: str, whole: bool) -> None:
    server.answers(chat("Half a", finish=finish))
    assert (await step(policy())).stopped is whole


@pytest.mark.parametrize(("sampled", "whole"), [(16, False), (15, True)])
async def test_R1_without_a_finish_reason_the_count_tells(server: Any, policy: Make, sampled: int, whole: bool) -> None:
    server.answers(chat(finish=None, usage={"prompt_tokens": 1, "completion_tokens": sampled}))
    assert (await step(policy(), max_tokens=16)).stopped is whole


async def test_usage_and_cost_are_added_up(server: Any, policy: Make) -> None:
    server.answers(chat(usage={"prompt_tokens": 1000, "completion_tokens": 200}))
    made = policy(price_prompt=2.0, price_sampled=10.0)
    usage = (await step(made)).usage
    assert usage is not None
    # 1000 * 2 / 1e6 + 200 * 10 / 1e6
    assert usage.cost == pytest.approx(0.004)
    await step(made)
    assert (made.counters.steps, made.counters.prompt_tokens, made.counters.sampled_tokens) == (2, 2000, 400)
    assert made.counters.cost == pytest.approx(0.008)
    assert (made.counters.unknown_usage, made.counters.unknown_cost) == (0, 0)


async def test_usage_that_is_not_given_is_none_and_never_0(server: Any, policy: Make) -> None:
    server.answers(chat())
    made = policy(price_prompt=2.0, price_sampled=10.0)
    usage = (await step(made)).usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.sampled_tokens, usage.cost) == (None, None, None)
    assert (made.counters.unknown_usage, made.counters.unknown_cost) == (1, 1)


# --- token ids ---------------------------------------------------------------------------------------------------


@pytest.fixture
def prompt(form: StarterFormat) -> Transcript:
    return Transcript(form.open([TOOL], [ASK]), random=random_stream(0))


@pytest.fixture
def reply(form: StarterFormat) -> list[int]:
    return form.written(Message(author=Author.ASSISTANT, content="Done, refund 120."))


async def test_ids_go_out_and_come_back_as_they_are(
    server: Any, policy: Make, form: StarterFormat, prompt: Transcript, reply: list[int]
) -> None:
    logprobs = [-0.5] * len(reply)
    server.answers(ids(reply, logprobs, prompt_token_ids=prompt.ids))
    made = policy(form)
    result = await step(made, prompt)
    assert (result.ids, result.logprobs, result.stopped) == (reply, logprobs, True)
    assert form.parse(result.ids).reply == "Done, refund 120."
    assert made.trainable is True
    asked = server.posts[0]
    assert asked.path == "/v1/completions"
    assert asked.json["prompt"] == prompt.ids
    assert asked.json["stop_token_ids"] == sorted(form.stop_ids())
    assert asked.json["return_token_ids"] is True
    assert asked.json["skip_special_tokens"] is False


async def test_T10_the_models_own_filters_are_switched_off(
    server: Any, policy: Make, form: StarterFormat, prompt: Transcript, reply: list[int]
) -> None:
    # vLLM takes these from the model's generation config where a request is silent.
    server.answers(ids(reply, [-0.5] * len(reply)))
    await step(policy(form), prompt)
    asked = server.posts[0].json
    assert (asked["top_p"], asked["top_k"], asked["min_p"], asked["repetition_penalty"]) == (1.0, -1, 0.0, 1.0)


@pytest.mark.parametrize(
    ("temperature", "settings", "kept"),
    [
        (1.0, {}, True),
        (0.6, {}, False),
        (0.6, {"logprobs": "processed"}, True),
        (1.0, {"top_p": 0.9, "logprobs": "processed"}, False),
        (1.0, {"extra_body": {"top_k": 20}}, False),
        (1.0, {"extra_body": {"top_k": None}}, False),
        (1.0, {"extra_body": {"top_k": 0}}, True),
    ],
)
async def test_T10_logprobs_of_another_distribution_are_not_taken(
    server: Any,
    policy: Make,
    form: StarterFormat,
    prompt: Transcript,
    reply: list[int],
    temperature: float,
    settings: dict[str, Any],
    kept: bool,
) -> None:
    server.answers(lambda asked: ids(reply, [-0.5] * len(reply) if "logprobs" in asked.json else None))
    made = policy(form, **settings)
    result = await step(made, prompt, temperature=temperature)
    assert (result.logprobs is not None) is kept
    assert made.trainable is kept


async def test_greedy_steps_say_nothing_about_training(
    server: Any, policy: Make, form: StarterFormat, prompt: Transcript, reply: list[int]
) -> None:
    server.answers(ids(reply, None))
    made = policy(form)
    await step(made, prompt, temperature=0.0)
    assert made.trainable is None


@pytest.mark.parametrize("logprobs", [[], [-0.5], [-0.5] * 99, "none", "nan"])
async def test_T3_logprobs_that_do_not_fit_the_ids_are_dropped_and_counted(
    server: Any, policy: Make, form: StarterFormat, prompt: Transcript, reply: list[int], logprobs: Any
) -> None:
    bad = {"none": [None] * len(reply), "nan": [float("nan")] * len(reply)}
    server.answers(ids(reply, bad.get(str(logprobs), logprobs)))
    made = policy(form)
    result = await step(made, prompt)
    assert (result.ids, result.logprobs) == (reply, None)
    assert made.counters.dropped_logprobs == 1
    assert made.trainable is False


async def test_T3_text_alone_is_encoded_and_never_trained_on(
    server: Any,
    policy: Make,
    form: StarterFormat,
    prompt: Transcript,
    reply: list[int],
    caplog: pytest.LogCaptureFixture,
) -> None:
    server.answers(ids(None, [-0.5] * len(reply), text="Done, refund 120."))
    made = policy(form)
    with caplog.at_level(logging.WARNING):
        result = await step(made, prompt)
        await step(made, prompt)
    # The stop token, which the text does not show, is appended, so that the step parses.
    assert (result.ids, result.logprobs) == (reply, None)
    assert form.parse(result.ids).reply == "Done, refund 120."
    assert made.trainable is False
    assert sum("cannot be trained on" in record.message for record in caplog.records) == 1


async def test_text_may_show_the_stop_token(
    server: Any, policy: Make, form: StarterFormat, prompt: Transcript, reply: list[int]
) -> None:
    server.answers(ids(None, None, text="Done, refund 120.<|end|>"))
    assert (await step(policy(form), prompt)).ids == reply


async def test_R1_a_cut_step_gets_no_stop_token(
    server: Any, policy: Make, form: StarterFormat, prompt: Transcript, reply: list[int]
) -> None:
    server.answers(
        ids(None, None, text="Done, refund", finish_reason="length"),
        ids(reply[:-1], [-0.5] * (len(reply) - 1), finish_reason="length"),
    )
    made = policy(form)
    as_text, as_ids = await step(made, prompt), await step(made, prompt)
    assert not as_text.stopped
    assert not as_ids.stopped
    assert as_text.ids[-1] not in form.stop_ids()
    assert as_ids.ids == reply[:-1]
    assert as_ids.logprobs == [-0.5] * (len(reply) - 1)


async def test_a_stop_token_that_the_server_kept_back_is_appended_without_logprobs(
    server: Any, policy: Make, form: StarterFormat, prompt: Transcript, reply: list[int]
) -> None:
    shown = reply[:-1]
    usage = {"prompt_tokens": 9, "completion_tokens": len(reply)}
    server.answers(ids(shown, [-0.5] * len(shown), usage=usage, stop_reason=reply[-1]))
    made = policy(form)
    result = await step(made, prompt)
    assert (result.ids, result.logprobs) == (reply, None)
    assert made.counters.dropped_logprobs == 1


async def test_a_step_that_ended_at_a_foreign_token_stays_as_it_was_sampled(
    server: Any, policy: Make, form: StarterFormat, prompt: Transcript, reply: list[int]
) -> None:
    shown = reply[:-1]
    server.answers(ids(shown, [-0.5] * len(shown), usage={"prompt_tokens": 9, "completion_tokens": len(shown)}))
    assert (await step(policy(form), prompt)).ids == shown


async def test_older_vllm_writes_ids_as_tokens(
    server: Any, policy: Make, form: StarterFormat, prompt: Transcript, reply: list[int]
) -> None:
    logprobs = {"tokens": [f"token_id:{token}" for token in reply], "token_logprobs": [-0.5] * len(reply)}
    server.answers(Reply({"choices": [{"text": "", "finish_reason": "stop", "logprobs": logprobs}]}))
    result = await step(policy(form), prompt)
    assert (result.ids, result.logprobs) == (reply, [-0.5] * len(reply))


async def test_a_prompt_that_the_server_changed_is_an_error(
    server: Any, policy: Make, form: StarterFormat, prompt: Transcript, reply: list[int]
) -> None:
    server.answers(ids(reply, [-0.5] * len(reply), prompt_token_ids=[0, *prompt.ids]))
    with pytest.raises(EndpointError, match="other prompt tokens"):
        await step(policy(form), prompt)


class Tagged(StarterFormat):
    """A format whose rehearsed responses end at a text."""

    def stop_text(self, role: Role) -> str | None:
        return "120." if role is Role.REHEARSE else None


async def test_a_rehearsed_step_may_end_at_a_text(
    server: Any, policy: Make, form: StarterFormat, prompt: Transcript
) -> None:
    tagged = Tagged(form.tokenizer)
    server.answers(ids(None, None, text="refund ", stop_reason="120."))
    result = await step(policy(tagged), prompt, role=Role.REHEARSE)
    assert server.posts[0].json["stop"] == ["120."]
    assert form.decode(result.ids) == "refund 120."
    assert result.stopped


# --- failures ----------------------------------------------------------------------------------------------------


async def test_a_refused_connection_is_retried_and_named(policy: Make) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    made = HttpPolicy(parse_address(f"http://127.0.0.1:{port}/v1#m"), settings=HttpSettings(**QUICK))
    with pytest.raises(EndpointError, match=rf":{port}/v1/chat/completions refused the connection.*3 requests"):
        await step(made)
    assert made.counters.failures == {"refused": 3}
    assert (made.counters.requests, made.counters.retries) == (3, 2)
    await made.aclose()


async def test_a_host_that_cannot_be_resolved_is_named() -> None:
    address = parse_address("http://nowhere.invalid/v1#m")
    async with HttpPolicy(address, settings=HttpSettings(max_retries=0, deadline=5)) as made:
        with pytest.raises(EndpointError, match="cannot be resolved") as caught:
            await step(made)
    assert caught.value.cause == "dns"


@pytest.mark.parametrize(
    ("bad", "cause"),
    [
        (Reply(reset=True), "reset"),
        (Reply({"choices": []}, cut=5), "cut_off"),
        (Reply(b'{"choices": [{"mess'), "cut_off"),
        (Reply(b""), "cut_off"),
        (Reply({"choices": []}), "no_choice"),
        (Reply({"usage": None}), "no_choice"),
        (error(429), "status_429"),
        (error(500), "status_500"),
        (Reply(b"<html>busy</html>", status=503, kind="text/html"), "status_503"),
        (Reply({"error": {"message": "upstream", "code": 502}}), "status_502"),
        (chat(finish="abort"), "aborted"),
    ],
)
async def test_what_may_pass_is_asked_again(server: Any, policy: Make, bad: Any, cause: str) -> None:
    server.answers(bad, bad, chat("Done."))
    made = policy()
    assert (await step(made)).stopped
    assert made.counters.failures == {cause: 2}
    assert (made.counters.requests, made.counters.retries, made.counters.steps) == (3, 2, 1)


async def test_what_does_not_pass_ends_with_the_last_failure(server: Any, policy: Make) -> None:
    server.answers(error(503, "overloaded"))
    with pytest.raises(EndpointError, match=r"answered 503: 'overloaded' \(3 requests in 0\.\d s\)\.") as caught:
        await step(policy())
    assert caught.value.cause == "status_503"
    assert len(server.posts) == 3


@pytest.mark.parametrize(
    ("bad", "cause", "words"),
    [
        (Reply(b"<!DOCTYPE html><html>Hi", kind="text/html; charset=utf-8"), "no_json", "text/html.*DOCTYPE.*/v1"),
        (Reply(b"<html>", kind="text/html", status=404), "status_404", "404"),
        (error(400, "bad temperature"), "status_400", "bad temperature"),
        (error(422), "status_422", "422"),
        (error(429, "insufficient_quota: pay"), "quota", "no quota left"),
        (Reply([1]), "no_json", "JSON object"),
        (Reply(status=308, headers={"Location": "https://a:b@h/v1?x=1"}), "redirect", r"https://h/v1\."),
        (chat(finish="content_filter"), "content_filter", "content filter"),
        (Reply({"choices": [{"finish_reason": "stop"}]}), "no_message", "without a message"),
    ],
)
async def test_what_cannot_pass_is_asked_once(server: Any, policy: Make, bad: Any, cause: str, words: str) -> None:
    server.answers(bad)
    made = policy()
    with pytest.raises(EndpointError, match=words) as caught:
        await step(made)
    assert caught.value.cause == cause
    assert len(server.posts) == 1
    assert made.counters.failures == {cause: 1}


async def test_404_names_the_models_there_are(server: Any, policy: Make) -> None:
    server.answers(error(404, "The model `huge` does not exist."))
    with pytest.raises(EndpointError, match=r"does not exist\.'; asked for the model 'huge', it serves tiny\."):
        await step(policy(name="#huge"))
    with pytest.raises(EndpointError, match=r"it serves 'tiny', so it is the path"):
        await step(policy())


@pytest.mark.parametrize(
    "body",
    [
        {"error": {"message": "This model's maximum context length is 8 tokens.", "code": 400}},  # vLLM, older
        {"error": {"message": "However, the model's context length is only 8 tokens"}},  # vLLM 2026
        {"error": {"message": "too long", "code": "context_length_exceeded"}},  # OpenAI
        {"error": {"message": "request (9 tokens)", "type": "exceed_context_size_error"}},  # llama.cpp
        {"object": "error", "message": "The input (9 tokens) is longer than the model's context length (8 tokens)."},
        {"detail": [{"msg": "prompt is too long"}]},
    ],
)
async def test_R4_a_prompt_that_is_too_long_is_asked_once(server: Any, policy: Make, body: Any) -> None:
    server.answers(Reply(body, status=400))
    made = policy()
    with pytest.raises(ContextOverflow, match="longer than the model's context"):
        await step(made)
    assert (len(server.posts), made.counters.retries) == (1, 0)
    assert made.counters.failures == {"context_overflow": 1}


async def test_R4_a_prompt_that_talks_of_context_length_is_no_overflow(server: Any, policy: Make) -> None:
    detail = [{"msg": "Input should be a number", "input": {"messages": "what is a context length?"}}]
    server.answers(Reply({"detail": detail}, status=422))
    with pytest.raises(EndpointError, match="should be a number"):
        await step(policy())


@pytest.mark.parametrize("status", [401, 403])
async def test_refused_credentials_name_the_variable_and_never_the_key(
    server: Any, policy: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, status: int
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    server.answers(error(status, f"Incorrect API key provided: {KEY}"))
    made = policy()
    with caplog.at_level(logging.DEBUG), pytest.raises(EndpointError, match="OPENAI_API_KEY was sent") as caught:
        await step(made)
    assert server.posts[0].headers["authorization"] == f"Bearer {KEY}"
    assert len(server.posts) == 1
    assert KEY not in str(caught.value) + caplog.text + repr(made.counters) + repr(made.settings)


@pytest.mark.parametrize("status", [400, 404, 429, 500])
async def test_no_error_quotes_the_key(server: Any, policy: Make, monkeypatch: pytest.MonkeyPatch, status: int) -> None:
    monkeypatch.setenv("ENVACE_API_KEY", KEY)
    monkeypatch.setenv("OPENAI_API_KEY", "another")
    server.answers(error(status, f"bad key {KEY}, team {KEY[::-1]}"))
    with pytest.raises(EndpointError, match=r"bad key \*\*\*, team \*\*\*") as caught:
        await step(policy(headers={"X-Secret": KEY[::-1]}))
    assert KEY not in str(caught.value)
    assert server.posts[0].headers["authorization"] == f"Bearer {KEY}"


async def test_without_a_key_its_variable_is_named(server: Any, policy: Make) -> None:
    server.answers(error(401))
    with pytest.raises(EndpointError, match="no key was sent, set ENVACE_API_KEY"):
        await step(policy())
    assert "authorization" not in server.posts[0].headers


async def test_credentials_of_the_url_are_sent_and_not_shown(server: Any) -> None:
    server.answers(error(500, f"query key={KEY}"))
    address = parse_address(server.url.replace("//", f"//me:{KEY}@") + f"?key={KEY}#tiny")
    async with HttpPolicy(address, settings=HttpSettings(max_retries=0)) as made:
        with pytest.raises(EndpointError) as caught:
            await step(made)
    assert server.posts[0].headers["authorization"].startswith("Basic ")
    assert server.posts[0].path == f"/v1/chat/completions?key={KEY}"
    assert KEY not in str(caught.value)


def test_a_key_that_no_header_can_carry_is_refused_unseen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENVACE_API_KEY", f"{KEY}\nX-Evil: 1")
    with pytest.raises(ConfigError, match="ENVACE_API_KEY holds characters") as caught:
        HttpPolicy(Address(url="http://h/v1"))
    assert KEY not in str(caught.value)


def test_headers_are_left_out_of_dumps() -> None:
    settings = HttpSettings(headers={"X-Secret": KEY})
    assert KEY not in settings.model_dump_json() + repr(settings)


async def test_an_answer_that_is_too_large_is_refused_on_the_way(server: Any, policy: Make) -> None:
    server.answers(chat("x" * 200_000))
    with pytest.raises(EndpointError, match="more than 1000 bytes") as caught:
        await step(policy(max_response_bytes=1000))
    assert caught.value.cause == "too_large"
    assert len(server.posts) == 1


# --- time --------------------------------------------------------------------------------------------------------


async def test_R5_a_server_that_drips_meets_the_requests_own_deadline(server: Any, policy: Make) -> None:
    # Each byte would reset a read timeout; whole, this answer takes more than 100 times 0.02 s.
    server.answers(Reply({"choices": ["x" * 100]}, drip=0.02))
    start = time.monotonic()
    with pytest.raises(EndpointError, match=r"no complete answer within 0\.1 s") as caught:
        await step(policy(deadline=0.1, max_retries=1))
    assert caught.value.cause == "deadline"
    assert time.monotonic() - start < 1.0
    assert len(server.posts) == 2


async def test_R5_a_step_ends_at_its_own_deadline_whatever_retries_are_left(server: Any, policy: Make) -> None:
    server.answers(Reply(delay=10.0))
    start = time.monotonic()
    with pytest.raises(EndpointError, match="no complete answer"):
        await step(policy(deadline=0.15, step_deadline=0.4, max_retries=99))
    assert 0.3 < time.monotonic() - start < 0.8


async def test_retry_after_in_seconds_is_honoured(server: Any, policy: Make) -> None:
    server.answers(error(429, **{"Retry-After": "0.3"}), chat())
    await step(policy())
    first, second = server.posts
    assert 0.28 < second.at - first.at < 0.6


async def test_retry_after_past_the_deadline_is_not_waited_for(server: Any, policy: Make) -> None:
    server.answers(error(429, **{"Retry-After": "3600"}))
    with pytest.raises(EndpointError, match="asks to wait 3600 s, past the step's deadline of 5 s"):
        await step(policy())
    assert len(server.posts) == 1


@pytest.mark.parametrize(
    ("value", "seconds"),
    [("7", 7.0), ("0.5", 0.5), ("-3", 0.0), (None, None), ("soon", None), ("inf", None), (formatdate(1030), 30.0)],
)
def test_retry_after_is_seconds_or_a_date(value: str | None, seconds: float | None) -> None:
    assert retry_after(value, 1000.0) == seconds


async def test_no_more_steps_than_allowed_are_under_way(server: Any, policy: Make) -> None:
    server.answers(lambda asked: Reply(json.loads(chat().body), delay=0.02))
    made = policy(concurrency=3)
    await asyncio.gather(*(step(made) for _ in range(12)))
    assert server.most == 3
    assert made.counters.steps == 12


async def test_a_cancelled_step_frees_its_place_and_its_connection(server: Any, policy: Make) -> None:
    server.answers(Reply(delay=10.0), chat())
    made = policy(concurrency=1)
    task = asyncio.create_task(step(made))
    await server.first.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (await asyncio.wait_for(step(made), 1.0)).stopped
    assert made.counters.retries == 0


async def test_a_closed_policy_may_be_asked_again(server: Any, policy: Make) -> None:
    server.answers(chat())
    made = policy()
    for _ in range(2):
        assert (await step(made)).stopped
        await made.aclose()


async def test_hold_only_awaits(policy: Make) -> None:
    made, transcript = policy(), talk()
    made.begin(transcript)
    assert await made.hold(asyncio.sleep(0, "done")) == "done"
    made.end(transcript)
    assert made.counters.to_json()["requests"] == 0
