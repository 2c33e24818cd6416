"""Endpoints as models of a verb: `URL#NAME`, and what `envace doctor` asks of one."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from transformers import AutoTokenizer

from envace.errors import EnvaceError, ModelError
from envace.models.formats import Format
from envace.models.http import HttpPolicy, HttpSettings
from envace.models.transcripts import Transcript, random_stream
from envace.models.wire import parse_address
from envace.training.checkpoints import format_of
from envace.types import Author, Message, Role, Step, ToolCall, ToolSpec

STEP_TOKENS = 64


def is_endpoint(name: str) -> bool:
    """Whether a model is named by an address."""
    return name.startswith(("http://", "https://"))


def open_endpoint(name: str, *, tokenizer: str | None = None, settings: HttpSettings | None = None) -> HttpPolicy:
    """The policy behind an address: in messages, or with the model's tokenizer in token ids.

    Raises:
        ConfigError: The address cannot be read.
        ModelError: The tokenizer cannot be loaded, or its template not be used.
    """
    form = None if tokenizer is None else tokenizer_format(tokenizer)
    return HttpPolicy(parse_address(name), form, settings=settings)


def tokenizer_format(name: str) -> Format:
    """The format of a tokenizer, by folder or hub name."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, local_files_only=Path(name).is_dir())
    except Exception as error:  # transformers raises many kinds for a folder it cannot read; the boundary is here
        raise ModelError(f"cannot load a tokenizer from {name}: {type(error).__name__}: {error}"[:500]) from error
    return format_of(tokenizer, ends=tokenizer.eos_token_id)


@dataclass(frozen=True, kw_only=True)
class Check:
    """One promise, and whether it holds."""

    name: str
    ok: bool
    detail: str


async def probe_endpoint(name: str, tokenizer: str | None, tool: ToolSpec, asked: Sequence[Message]) -> list[Check]:
    """Checks of an endpoint; without an answer to the first, the others are not made."""
    settings = HttpSettings(deadline=60.0, step_deadline=120.0, max_retries=1)
    async with open_endpoint(name, settings=settings) as chat:
        found = [await _tried("endpoint", lambda: _named(chat))]
        if found[0].ok:
            found += [
                await _tried("a step samples", lambda: _said(chat, (), asked)),
                await _tried("a tool is called", lambda: _called(chat, tool, asked)),
                await _tried("a call's answer is read", lambda: _answered(chat, tool, asked)),
                await _tried("usage is told", lambda: _usage(chat)),
            ]
    if found[0].ok and tokenizer is not None:
        async with open_endpoint(name, tokenizer=tokenizer, settings=settings) as exact:
            found.append(await _tried("token ids and logprobs are told", lambda: _exact(exact, tool, asked)))
            found.append(await _tried("it rehearses in a tool message", lambda: _rehearsed(exact, tool, asked)))
    return found


async def _tried(name: str, check: Callable[[], Awaitable[str]]) -> Check:
    try:
        return Check(name=name, ok=True, detail=await check())
    except EnvaceError as error:
        return Check(name=name, ok=False, detail=str(error))


def _transcript(policy: HttpPolicy, tools: Sequence[ToolSpec], messages: Sequence[Message]) -> Transcript:
    ids = policy.format.open(tools, messages)
    return Transcript(ids, random=random_stream(0), tools=tools, messages=messages)


async def _named(policy: HttpPolicy) -> str:
    return f"{policy.address} serves {await policy.model()}"


async def _ask(policy: HttpPolicy, transcript: Transcript, role: Role = Role.ACT) -> Step:
    return await policy.sample(transcript, role, max_tokens=STEP_TOKENS, temperature=1.0)


async def _said(policy: HttpPolicy, tools: Sequence[ToolSpec], asked: Sequence[Message]) -> str:
    step = await _ask(policy, _transcript(policy, tools, asked))
    return repr(step.parsed.text[:100]) if step.parsed else ""


async def _called(policy: HttpPolicy, tool: ToolSpec, asked: Sequence[Message]) -> str:
    """Whether tools are accepted; whether the model then calls one is its own affair, and told."""
    step = await _ask(policy, _transcript(policy, [tool], asked))
    assert step.parsed is not None
    if step.parsed.calls:
        return ", ".join(call.key() for call in step.parsed.calls)[:200]
    return f"tools are accepted; the model called none and said {step.parsed.text[:80]!r}"


async def _answered(policy: HttpPolicy, tool: ToolSpec, asked: Sequence[Message]) -> str:
    call = ToolCall(name=tool.name, arguments={"order_id": "#W111111"}, id="call00000")
    said = [
        *asked,
        Message(author=Author.ASSISTANT, calls=(call,)),
        Message(author=Author.TOOL, content='{"status": "pending"}', call_id=call.id, name=tool.name),
    ]
    step = await _ask(policy, _transcript(policy, [tool], said))
    assert step.parsed is not None
    return repr(step.parsed.text[:100])


async def _usage(policy: HttpPolicy) -> str:
    counters = policy.counters
    if counters.unknown_usage:
        raise ModelError(f"{counters.unknown_usage} of {counters.steps} steps came without a count of tokens")
    return f"{counters.prompt_tokens} prompt and {counters.sampled_tokens} sampled tokens in {counters.steps} steps"


async def _exact(policy: HttpPolicy, tool: ToolSpec, asked: Sequence[Message]) -> str:
    step = await _ask(policy, _transcript(policy, [tool], asked))
    if step.logprobs is None:
        raise ModelError("not for every id: its steps can be evaluated, and not be trained on")
    return f"{len(step.ids)} ids, each with its log-probability"


async def _rehearsed(policy: HttpPolicy, tool: ToolSpec, asked: Sequence[Message]) -> str:
    form = policy.format
    transcript = _transcript(policy, [tool], asked)
    call = ToolCall(name=tool.name, arguments={"order_id": "#W111111"})
    transcript.give(form.written(Message(author=Author.ASSISTANT, calls=(call,))), Author.ASSISTANT)
    transcript.say(form.tool_header())
    transcript.settle(form)
    step = await _ask(policy, transcript, Role.REHEARSE)
    return repr(form.decode(step.ids)[:100])
