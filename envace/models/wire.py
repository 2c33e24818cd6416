"""What goes over the wire to an OpenAI-compatible endpoint and what comes back. Pure: no network, no clock.

Facts that this module rests on, as read in the servers' sources: vLLM and SGLang take token ids as `prompt` and, asked
by `return_token_ids`, answer with `token_ids` that include the stop token, beside one log-probability each; older vLLM
writes tokens as `token_id:123`. Their errors all say "context length" where a prompt is too long; llama.cpp says
`exceed_context_size_error`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from email.utils import parsedate_to_datetime
from typing import Any, NoReturn
from urllib.parse import unquote, urlsplit

from envace.errors import ConfigError, ContextOverflow, EndpointError, ModelError
from envace.models.formats import Format, Glue
from envace.models.parsing import Mode
from envace.scenarios.packages import dump_line
from envace.types import Author, Json, Message, Parsed, Role, ToolSpec, Usage

CHAT, COMPLETIONS = "/chat/completions", "/completions"
LIMITED = frozenset({"length", "max_tokens", "model_length"})
"""Finish reasons of a step that a limit cut."""
ABORTED = frozenset({"abort", "error", "cancelled"})
"""Finish reasons of a step that the server gave up."""
OVERFLOW = re.compile(
    r"context[ _](length|size|window)|exceed_context_size|prompt is too long|maximum (prompt|input) length",
    re.IGNORECASE,
)
IN_CONTENT = "content"
ERROR_KEYS = ("message", "msg", "code", "type")
NOTHING_KNOWN = (
    "an endpoint that speaks in messages shows no token ids; use the completions API with the model's tokenizer"
)


# --- addresses -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Address:
    """Where an endpoint is. `str(address)` is fit for people and run folders: credentials and query are not in it."""

    url: str
    """Without credentials, query and `#NAME`, e.g. `http://host:8000/v1`."""
    model: str | None = None
    """What the endpoint calls the model; None asks it."""
    query: str = field(default="", repr=False)
    """Sent with every request. httpx2's own log shows it at INFO, so a key had better be in the environment."""
    user: tuple[str, str] | None = field(default=None, repr=False)
    """Name and password that stood in the URL."""

    def __str__(self) -> str:
        return self.url if self.model is None else f"{self.url}#{self.model}"

    def at(self, path: str) -> str:
        """The URL of a path such as `/models`, without the query. A full URL is used as it is for its own path.

        Raises:
            ConfigError: It is a full URL of the other API.
        """
        base, own = self.url, ""
        for known in (CHAT, COMPLETIONS):
            if self.url.endswith(known):
                base, own = self.url.removesuffix(known), known
                break
        if own and path in (CHAT, COMPLETIONS) and path != own:
            raise ConfigError(f"{self.url} is not the address of {path}; end it before {own}, or use that API.")
        return base + path


def parse_address(text: str) -> Address:
    """Read `URL#NAME`, e.g. `http://localhost:8000/v1#Qwen/Qwen3-4B`.

    Args:
        text: A base URL or a full one that ends in `/chat/completions` or `/completions`, and the model's name.

    Raises:
        ConfigError: It is no http(s) URL. The text is not repeated, because credentials may stand in it.
    """
    where, _, name = text.strip().partition("#")
    try:
        parts = urlsplit(where)
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port, parts = None, None, urlsplit("")
    if parts.scheme not in ("http", "https") or not host or not where.isprintable() or " " in where:
        raise ConfigError("This is no address of an endpoint; write it like http://localhost:8000/v1#NAME.")
    shown = f"[{host}]" if ":" in host else host
    user = (unquote(parts.username or ""), unquote(parts.password or ""))
    return Address(
        url=f"{parts.scheme}://{shown}{'' if port is None else f':{port}'}{parts.path.rstrip('/')}",
        model=name or None,
        query=parts.query,
        user=user if any(user) else None,
    )


# --- the format of an endpoint that speaks in messages -----------------------------------------------------------


class WireFormat:
    """The format where no token is known: every list of ids is empty, and what a step says comes with the step."""

    pad_id = 0

    def __init__(self, mode: Mode = "strict") -> None:
        self.mode: Mode = mode

    def open(self, tools: Sequence[ToolSpec], messages: Sequence[Message]) -> list[int]:
        """None: the endpoint renders the conversation."""
        return []

    def tool_header(self, *, first: bool = True) -> Glue:
        """Empty."""
        return Glue("")

    def answer(self, text: str) -> tuple[str, ...]:
        """Empty; the transcript's messages hold the response."""
        return ()

    def act_header(self) -> Glue:
        """Empty."""
        return Glue("")

    def user_turn(self, text: str) -> tuple[str, ...]:
        """Empty; the transcript's messages hold what was said."""
        return ()

    def written(self, message: Message) -> list[int]:
        """None."""
        return []

    def encode(self, pieces: Sequence[str]) -> list[int]:
        """None."""
        return []

    def stop_ids(self) -> frozenset[int]:
        """None."""
        return frozenset()

    def stop_text(self, role: Role) -> str | None:
        """None."""
        return None

    def parse(self, ids: Sequence[int], tools: Sequence[ToolSpec] = ()) -> Parsed:
        """Never needed, and never possible."""
        raise ModelError(f"A step cannot be parsed from ids: {NOTHING_KNOWN}.")

    def response_text(self, ids: Sequence[int]) -> str | None:
        """Never needed, and never possible."""
        raise ModelError(f"A response cannot be read from ids: {NOTHING_KNOWN}.")

    def decode(self, ids: Sequence[int]) -> str:
        """Empty."""
        return ""


# --- messages ----------------------------------------------------------------------------------------------------


def wire_messages(messages: Sequence[Message], *, reasoning_key: str | None = None) -> list[dict[str, Any]]:
    """Messages as `/chat/completions` takes them.

    A call without an id, or with one that was used before, gets one made up from its position. Each call's answer names
    the id of its call, whatever order the answers came in. What answers no readable call is said as a user's message
    after them, since endpoints refuse a tool's message without a call.

    Args:
        messages: The conversation so far.
        reasoning_key: Where the endpoint itself writes reasoning, as `reasoning_key` tells; None leaves reasoning out.

    Raises:
        ModelError: A call has no answer although the conversation goes on.
    """
    wire: list[dict[str, Any]] = []
    used: set[str] = set()
    position = 0
    while position < len(messages):
        message, position = messages[position], position + 1
        if message.author is not Author.ASSISTANT:
            wire.append({"role": _role(message), "content": _writable(message.content)})
            continue
        ids = [_fresh(call.id, used, len(wire), number) for number, call in enumerate(message.calls)]
        wire.append(_assistant(message, ids, reasoning_key))
        start = position
        while position < len(messages) and messages[position].author is Author.TOOL:
            position += 1
        wire += _answers(message, ids, messages[start:position])
    return wire


def _role(message: Message) -> str:
    """A tool's message that follows no assistant's message can only be said by a user."""
    return "user" if message.author is Author.TOOL else message.author.value


def _fresh(given: str, used: set[str], position: int, number: int) -> str:
    """An id of its own; nine letters and digits, which is what the strictest templates (Mistral) ask for."""
    name, made = given, position * 100 + number
    while not name or name in used:
        name, made = f"call{made:05d}", made + 1
    used.add(name)
    return name


def _assistant(message: Message, names: Sequence[str], reasoning_key: str | None) -> dict[str, Any]:
    wire: dict[str, Any] = {"role": "assistant", "content": _writable(message.content)}
    if message.calls:
        wire["content"] = wire["content"] or None
        wire["tool_calls"] = [
            {"id": name, "type": "function", "function": {"name": call.name, "arguments": dump_line(call.arguments)}}
            for name, call in zip(names, message.calls, strict=True)
        ]
    if message.reasoning and reasoning_key == IN_CONTENT:
        wire["content"] = _writable(f"<think>\n{message.reasoning}\n</think>\n\n{message.content}")
    elif message.reasoning and reasoning_key:
        wire[reasoning_key] = _writable(message.reasoning)
    return wire


def _answers(message: Message, ids: Sequence[str], answers: Sequence[Message]) -> list[dict[str, Any]]:
    """Answers in the order of the calls, then what answers no call."""
    open_calls = list(range(len(ids)))
    found: dict[int, Message] = {}
    stray: list[Message] = []
    for answer in [*filter(_named, answers), *(answer for answer in answers if not _named(answer))]:
        number = next((n for n in open_calls if _answered_by(message, n, answer)), None)
        if number is None:
            stray.append(answer)
        else:
            open_calls.remove(number)
            found[number] = answer
    if open_calls:
        raise ModelError(f"The call {message.calls[open_calls[0]].name!r} has no answer; every call needs one.")
    wire = [{"role": "tool", "tool_call_id": ids[n], "content": _writable(found[n].content)} for n in sorted(found)]
    return wire + [{"role": "user", "content": _writable(answer.content)} for answer in stray]


def _writable(text: str) -> str:
    """What UTF-8 cannot write (lone surrogates) is replaced, as formats do."""
    return text.encode("utf-8", "replace").decode()


def _named(answer: Message) -> bool:
    return bool(answer.call_id or answer.name)


def _answered_by(message: Message, number: int, answer: Message) -> bool:
    """By id where both have one, else by the tool's name, else by order."""
    call = message.calls[number]
    if answer.call_id and call.id:
        return answer.call_id == call.id
    return not answer.name or answer.name == call.name


# --- answers -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Sampled:
    """The step in an answer of `/completions`."""

    ids: list[int]
    logprobs: list[float] | None
    stopped: bool
    dropped: bool
    """Whether there were log-probabilities that do not belong to these ids one by one."""


def first_choice(data: Mapping[str, Any], *, where: str) -> dict[str, Any]:
    """The first choice of an answer that was not given up.

    Raises:
        Passing: There is none, or the server aborted it.
        EndpointError: A content filter cut it.
    """
    choices = data.get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        raise Passing(f"{where} answered without any choice", "no_choice")
    reason = choices[0].get("finish_reason")
    if reason in ABORTED:
        raise Passing(f"{where} gave the step up ({reason})", "aborted")
    if reason == "content_filter":
        raise EndpointError(f"{where} cut the step by its content filter.", "content_filter")
    return choices[0]


def stopped(choice: Mapping[str, Any], usage: Usage, *, max_tokens: int) -> bool:
    """Whether the step ended by itself; without a finish reason, whether it is shorter than it might have been."""
    reason = choice.get("finish_reason")
    if reason is None:
        return usage.sampled_tokens is None or usage.sampled_tokens < max_tokens
    return reason not in LIMITED


def reasoning_key(message: Mapping[str, Any]) -> str:
    """Where an endpoint writes reasoning, and so reads it: vLLM under `reasoning`, SGLang under `reasoning_content`,
    one that was started without a parser for it in the content.
    """
    return next((key for key in ("reasoning", "reasoning_content") if message.get(key)), IN_CONTENT)


def read_usage(data: Mapping[str, Any], *, price_prompt: float | None, price_sampled: float | None) -> Usage:
    """Counts where they are given; the cost where all of counts and prices (per million tokens) are known."""
    given = data.get("usage")
    usage = given if isinstance(given, dict) else {}
    prompt, sampled = _count(usage.get("prompt_tokens")), _count(usage.get("completion_tokens"))
    cost = None
    if prompt is not None and sampled is not None and price_prompt is not None and price_sampled is not None:
        cost = (prompt * price_prompt + sampled * price_sampled) / 1e6
    return Usage(prompt_tokens=prompt, sampled_tokens=sampled, cost=cost)


def read_sampled(
    choice: Mapping[str, Any], usage: Usage, *, form: Format, role: Role, max_tokens: int, where: str
) -> Sampled:
    """Ids and log-probabilities of a step.

    Where the server tells the sampled ids they are taken as they are; a log-probability each is kept, any other number
    of them is dropped, never padded. Where it tells only text, the ids are what the format makes of it, and there are
    no log-probabilities.

    The loop finds a step's end by its stop token. A server that says the step stopped, but leaves the stop token out,
    gets it appended: the one it names (`stop_reason`, `matched_stop`), else the format's own. Nothing tells its
    log-probability, so the step then has none. To told ids it is appended only where the server counts more sampled
    tokens than it shows; otherwise the step ended at a token that is no stop token of the format, and stays as it is.
    """
    done = stopped(choice, usage, max_tokens=max_tokens)
    told = _told_ids(choice)
    ids = _encoded(choice, form, role, done=done, where=where) if told is None else told
    given = _given_logprobs(choice)
    ended = _ended(ids, form, role)
    if done and not ended and (told is None or (usage.sampled_tokens or 0) > len(ids)):
        ids = [*ids, _stop_id(choice, form)]
    logprobs = _numbers(given) if told is not None and given is not None and len(given) == len(ids) else None
    return Sampled(ids=ids, logprobs=logprobs, stopped=done, dropped=given is not None and logprobs is None)


def _told_ids(choice: Mapping[str, Any]) -> list[int] | None:
    ids = choice.get("token_ids")
    if isinstance(ids, list) and all(_count(token) is not None for token in ids):
        return list(ids)
    tokens = _logprobs(choice).get("tokens")
    if isinstance(tokens, list) and tokens and all(re.fullmatch(r"token_id:\d+", str(token)) for token in tokens):
        return [int(str(token).removeprefix("token_id:")) for token in tokens]
    return None


def _encoded(choice: Mapping[str, Any], form: Format, role: Role, *, done: bool, where: str) -> list[int]:
    text, tag = choice.get("text"), form.stop_text(role)
    if not isinstance(text, str):
        raise EndpointError(f"{where} answered neither token ids nor text.", "no_text")
    if done and tag is not None and _stop_reason(choice) == tag and not text.endswith(tag):
        text += tag
    return form.encode([Glue(text)])


def _ended(ids: Sequence[int], form: Format, role: Role) -> bool:
    if ids and ids[-1] in form.stop_ids():
        return True
    tag = form.stop_text(role)
    return tag is not None and form.decode(ids).rstrip().endswith(tag)


def _stop_id(choice: Mapping[str, Any], form: Format) -> int:
    reason = _stop_reason(choice)
    if isinstance(reason, int) and reason in form.stop_ids():
        return reason
    return form.written(Message(author=Author.ASSISTANT, content="Done."))[-1]


def _stop_reason(choice: Mapping[str, Any]) -> Json:
    """What ended the step: a token's id or a text. vLLM and SGLang name it differently; others are silent."""
    return choice.get("stop_reason", choice.get("matched_stop"))


def _logprobs(choice: Mapping[str, Any]) -> dict[str, Any]:
    given = choice.get("logprobs")
    return given if isinstance(given, dict) else {}


def _given_logprobs(choice: Mapping[str, Any]) -> list[Json] | None:
    given = _logprobs(choice).get("token_logprobs")
    return given if isinstance(given, list) else None


def _numbers(values: Iterable[Json]) -> list[float] | None:
    """The values, if all of them are finite numbers."""
    numbers = [float(value) for value in values if isinstance(value, int | float) and not isinstance(value, bool)]
    return numbers if len(numbers) == len(list(values)) and all(map(math.isfinite, numbers)) else None


def _count(value: Json) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


# --- failures ------------------------------------------------------------------------------------------------------


class Passing(EndpointError):
    """A failure that may pass by itself, so the same may be asked again."""

    def __init__(self, message: str, cause: str = "unknown", *, after: float | None = None) -> None:
        super().__init__(message, cause)
        self.after = after
        """Seconds that the server asks to wait."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """An HTTP answer, read to its end."""

    status: int
    content_type: str
    body: bytes
    retry_after: str | None = None
    location: str | None = None


def read_answer(answer: Answer, *, where: str, key: str, hide: Iterable[str] = (), now: float) -> dict[str, Any]:
    """The JSON object of an answer.

    Args:
        answer: Of any status.
        where: The URL, for errors.
        key: Which credentials were sent, in words.
        hide: Secrets, cut out of what errors quote from the server.
        now: Seconds since the epoch, for a Retry-After that is a date.

    Raises:
        Passing: 408, 409, 425, 429, 5xx, or a body that was cut off.
        ContextOverflow: The prompt, with the tokens asked for, is longer than the model's context.
        EndpointError: Everything else that is no answer.
    """
    data = _json(answer.body)
    secrets = list(hide)
    if answer.status >= 300:
        _refuse(answer, _words(data, answer.body, secrets), where=where, key=key, now=now)
    if not isinstance(data, dict):
        raise _no_json(answer, data, _hidden(answer.body.decode("utf-8", "replace"), secrets), where)
    if data.get("error") and not data.get("choices"):
        # Gateways report the failure of the server behind them with status 200.
        code = data["error"].get("code") if isinstance(data["error"], dict) else None
        status = code if isinstance(code, int) and 400 <= code < 600 else 502
        failed = replace(answer, status=status)
        _refuse(failed, _words(data, answer.body, secrets), where=where, key=key, now=now)
    return data


def _refuse(answer: Answer, words: str, *, where: str, key: str, now: float) -> NoReturn:
    """Raise what a status that is no success means."""
    status, said = answer.status, _quoted(words)
    if status < 400:
        raise EndpointError(
            f"{where} redirects ({status}); use the address that it redirects to, {_bare(answer.location)}.", "redirect"
        )
    if status in (401, 403):
        # What was said is not quoted: it tends to repeat (parts of) the key.
        raise EndpointError(f"{where} refused the credentials ({status}): {key}.", f"status_{status}")
    if status == 404:
        raise EndpointError(f"{where} is not there (404){said}.", "status_404")
    if status != 429 and OVERFLOW.search(words):
        raise ContextOverflow(f"The transcript and the step asked for are longer than the model's context{said}.")
    if status == 429 and "insufficient_quota" in words:
        raise EndpointError(f"{where} has no quota left (429){said}.", "quota")
    if status in (408, 409, 425, 429) or (status >= 500 and status != 501):
        after = retry_after(answer.retry_after, now)
        raise Passing(f"{where} answered {status}{said}", f"status_{status}", after=after)
    raise EndpointError(f"{where} refused the request ({status}){said}.", f"status_{status}")


def _no_json(answer: Answer, data: Json, text: str, where: str) -> EndpointError:
    kind = answer.content_type.split(";")[0].strip() or "no content type"
    if data is None and ("json" in kind or not text.strip()):
        return Passing(f"{where} answered JSON that breaks off after {len(answer.body)} bytes", "cut_off")
    start = " ".join(text[:80].split())
    return EndpointError(
        f"{where} answered {kind} instead of a JSON object, beginning with {start!r}; is the URL missing /v1?",
        "no_json",
    )


def retry_after(value: str | None, now: float) -> float | None:
    """Seconds to wait, from a Retry-After header in seconds or as a date; None where it says neither."""
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(value).timestamp() - now
        except (ValueError, OverflowError):
            return None
    return max(0.0, seconds) if math.isfinite(seconds) else None


def _json(body: bytes) -> Json:
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        return None


def _words(data: Json, body: bytes, hide: Iterable[str]) -> str:
    """What an error says, with its code and type: OpenAI's and vLLM's `error`, SGLang's `message`, FastAPI's `detail`.

    Not the whole body, which may repeat the prompt, and so words that look like another failure.
    """
    said: list[Json] = [body.decode("utf-8", "replace")]
    if isinstance(data, dict):
        error = data.get("error", data.get("detail", data))
        parts = error if isinstance(error, list) else [error]
        said = [part.get(key) if isinstance(part, dict) else part for part in parts for key in ERROR_KEYS]
    return _hidden(" ".join(dict.fromkeys(part for part in said if isinstance(part, str))), hide)


def _quoted(text: str) -> str:
    short = " ".join(text.split())[:200]
    return f": {short!r}" if short else ""


def _hidden(text: str, hide: Iterable[str]) -> str:
    for secret in hide:
        text = text.replace(secret, "***")
    return text


def _bare(url: str | None) -> str:
    """A URL without credentials and query."""
    return "which it does not name" if url is None else re.sub(r"[?#].*$|(?<=//)[^/@]*@", "", url)
