"""The HTTP policy: any OpenAI-compatible endpoint (vLLM, SGLang, llama.cpp's server, hosted ones) samples the steps."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import os
import random
import socket
import ssl
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from types import TracebackType
from typing import Any, Literal, TypeVar

import httpx2
from pydantic import BaseModel, ConfigDict, Field
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, stop_after_attempt, stop_before_delay

from envace.errors import ConfigError, ContextOverflow, EndpointError, ModelError
from envace.models.formats import Format
from envace.models.parsing import Mode, parse_wire
from envace.models.transcripts import Transcript
from envace.models.wire import (
    CHAT,
    COMPLETIONS,
    Address,
    Answer,
    Passing,
    WireFormat,
    first_choice,
    read_answer,
    read_sampled,
    read_usage,
    reasoning_key,
    stopped,
    wire_messages,
)
from envace.scenarios.tools import to_openai
from envace.types import Role, Step, Usage

T = TypeVar("T")

KEYS = ("ENVACE_API_KEY", "OPENAI_API_KEY")
"""Environment variables that may hold the key, the first that is set counts."""
CONNECT_SECONDS = 10.0
"""Deadline of connecting; a server that is there but slow to answer has the request's own."""
LONGEST_PAUSE = 30.0
"""Seconds; pauses between retries double up to here, unless the server asks for more."""
WHY_NOT = {
    True: "it does not tell the sampled ids with a log-probability each",
    False: "temperature, filters or penalties make its log-probabilities those of another distribution than is sampled "
    "from (see HttpSettings.logprobs)",
}
"""Why a step in ids has no log-probabilities, by whether they were asked for."""
LISTED = 20
"""Models that an error names at most."""

SECRET_LENGTH = 6
"""Characters from which on a secret is cut out of quotations; shorter ones would cut up ordinary words."""
UNFILTERED = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
"""Sent with every request in ids, because vLLM otherwise takes them from the model's generation config."""
NEUTRAL = {
    "top_p": (1,), "top_k": (-1, 0), "min_p": (0,), "repetition_penalty": (1,),
    "presence_penalty": (0, None), "frequency_penalty": (0, None),
}  # fmt: skip
"""Values at which these change nothing; None is absent, which leaves it to the server."""
EXACT = {
    "return_token_ids": True,  # vLLM since August 2025, SGLang since July 2026
    "return_tokens_as_token_ids": True,  # vLLM before that
    "skip_special_tokens": False,
    "spaces_between_special_tokens": False,
    "include_stop_str_in_output": True,  # vLLM
    "no_stop_trim": True,  # SGLang
}
"""So that a step comes as it was sampled, up to and with its stop token."""

logger = logging.getLogger(__name__)


class HttpSettings(BaseModel):
    """How an endpoint is asked."""

    # Values are hidden in errors because headers are credentials more often than not.
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, hide_input_in_errors=True)

    concurrency: int = Field(16, ge=1)
    """Steps under way at once. One that waits for its next try counts: an overloaded endpoint gets fewer requests."""
    deadline: float = Field(120.0, gt=0)
    """Seconds for one request, from connecting to the last byte."""
    step_deadline: float = Field(300.0, gt=0)
    """Seconds for a step with its retries, from when its first request may go out."""
    max_retries: int = Field(4, ge=0)
    """Further requests for a step after failures that may pass."""
    backoff: float = Field(0.5, ge=0)
    """Seconds before the first retry, give or take half; doubled for each further one. A Retry-After goes before."""
    max_response_bytes: int = Field(32_000_000, ge=1)
    """A longer answer is refused while it arrives."""
    top_p: float | None = Field(None, gt=0, le=1)
    """Below 1 the logprobs are not those of what is sampled from, and no step can be trained on."""
    seed: bool = False
    """Send a seed, drawn from the transcript's own stream: one number for all would make a group's rollouts alike."""
    token_limit: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"
    """What the chat API calls the limit of a step; OpenAI's own reasoning models know only the second name."""
    tools_in_request: bool = True
    """Send the tools with a chat request; False where the messages describe them."""
    logprobs: Literal["raw", "processed"] = "raw"
    """What the server's log-probabilities are of. `raw`: the model's own distribution (vLLM unless told otherwise),
    which is the one sampled from at temperature 1 only. `processed`: after the temperature (SGLang unless told
    otherwise, vLLM with `--logprobs-mode processed_logprobs`)."""
    extra_body: dict[str, Any] = Field(default_factory=dict)
    """Further keys of every request. They go before our own; None takes a key out."""
    headers: dict[str, str] = Field(default_factory=dict, exclude=True, repr=False)
    """Further headers of every request. They may be credentials, so they are left out of dumps."""
    price_prompt: float | None = Field(None, ge=0)
    """US dollars per million prompt tokens."""
    price_sampled: float | None = Field(None, ge=0)
    """US dollars per million sampled tokens."""


@dataclass(kw_only=True)
class Counters:
    """What an endpoint was asked and what came of it."""

    requests: int = 0
    """Requests sent, retries and questions for models included."""
    retries: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    """Requests without a usable answer, by cause."""
    steps: int = 0
    prompt_tokens: int = 0
    """Of the steps whose usage is known."""
    sampled_tokens: int = 0
    cost: float = 0.0
    """US dollars, of the steps whose cost is known."""
    unknown_usage: int = 0
    """Steps without a count of prompt or sampled tokens."""
    unknown_cost: int = 0
    dropped_logprobs: int = 0
    """Steps that came with log-probabilities which do not belong to their ids one by one."""

    def add(self, usage: Usage) -> None:
        """Count a step."""
        self.steps += 1
        self.prompt_tokens += usage.prompt_tokens or 0
        self.sampled_tokens += usage.sampled_tokens or 0
        self.cost += usage.cost or 0.0
        self.unknown_usage += usage.prompt_tokens is None or usage.sampled_tokens is None
        self.unknown_cost += usage.cost is None

    def to_json(self) -> dict[str, Any]:
        """A JSON object."""
        return {**asdict(self), "failures": dict(self.failures)}


@dataclass(frozen=True, kw_only=True)
class _Live:
    """What lives in one event loop."""

    loop: asyncio.AbstractEventLoop
    client: httpx2.AsyncClient
    slots: asyncio.Semaphore


class Endpoint:
    """Asks an endpoint for JSON: so many requests at once, each within a deadline, retried where that can help."""

    def __init__(self, address: Address, settings: HttpSettings, counters: Counters) -> None:
        self.address, self.settings, self.counters = address, settings, counters
        self._headers, self._key, self._secrets = _credentials(address, settings)
        self._jitter = random.Random()  # Unseeded: processes that failed together should not come back together.
        self._live: _Live | None = None

    async def ask(self, path: str, body: Mapping[str, Any] | None, read: Callable[[dict[str, Any]], T]) -> T:
        """POST `body`, or GET where it is None, and read the answer.

        Args:
            path: E.g. `/models`.
            body: Sent as JSON.
            read: Makes something of the answer, or raises Passing where it is worth another request.

        Raises:
            ContextOverflow: The prompt is too long.
            EndpointError: No usable answer within the retries and deadlines.
        """
        live = self._here()
        async with live.slots:
            start = live.loop.time()
            retrying = AsyncRetrying(
                stop=stop_after_attempt(1 + self.settings.max_retries) | stop_before_delay(self.settings.step_deadline),
                wait=self._pause,
                retry=retry_if_exception_type(Passing),
                before_sleep=self._note_retry,
                reraise=True,
            )
            try:
                answer: T = await retrying(self._attempt, live, path, body, read, start)
                return answer
            except Passing as error:
                raise self._final(error, retrying, live.loop.time() - start) from error

    async def _attempt(
        self, live: _Live, path: str, body: Mapping[str, Any] | None, read: Callable[[dict[str, Any]], T], start: float
    ) -> T:
        """One request, and what is read from its answer."""
        url = self.address.at(path)
        where = f"The endpoint {url}"
        left = start + self.settings.step_deadline - live.loop.time()
        seconds = min(self.settings.deadline, max(left, 0.0))
        self.counters.requests += 1
        try:
            answer = await asyncio.wait_for(self._send(live.client, url, body), seconds)
            now = time.time()
            return read(read_answer(answer, where=where, key=self._key, hide=self._secrets, now=now))
        except asyncio.TimeoutError:
            self.counters.failures["deadline"] += 1
            raise Passing(f"{where} gave no complete answer within {seconds:.6g} s", "deadline") from None
        except httpx2.RequestError as error:
            self.counters.failures[_cause(error)] += 1
            raise _unreachable(error, where) from error
        except (EndpointError, ContextOverflow) as error:
            self.counters.failures[error.cause if isinstance(error, EndpointError) else "context_overflow"] += 1
            raise

    async def _send(self, client: httpx2.AsyncClient, url: str, body: Mapping[str, Any] | None) -> Answer:
        """Send a request and read the answer, up to its allowed size."""
        query = f"{url}?{self.address.query}" if self.address.query else url
        # Escaped to ASCII, so that what UTF-8 cannot write does not fail here.
        content = None if body is None else json.dumps(body).encode()
        async with client.stream("GET" if body is None else "POST", query, content=content) as response:
            chunks, size = [], 0
            async for chunk in response.aiter_bytes():
                chunks.append(chunk)
                size += len(chunk)
                if size > self.settings.max_response_bytes:
                    limit = self.settings.max_response_bytes
                    raise EndpointError(f"The endpoint {url} answered more than {limit} bytes.", "too_large")
            headers = response.headers
            return Answer(
                status=response.status_code,
                content_type=headers.get("content-type", ""),
                body=b"".join(chunks),
                retry_after=headers.get("retry-after"),
                location=headers.get("location"),
            )

    def _pause(self, state: RetryCallState) -> float:
        """Seconds before the next attempt."""
        error = state.outcome.exception() if state.outcome is not None else None
        if isinstance(error, Passing) and error.after is not None:
            return error.after
        doubled = self.settings.backoff * 2.0 ** (state.attempt_number - 1)
        return min(doubled, LONGEST_PAUSE) * self._jitter.uniform(0.5, 1.5)

    def _note_retry(self, state: RetryCallState) -> None:
        self.counters.retries += 1
        error = state.outcome.exception() if state.outcome is not None else None
        logger.info("Asking again in %.1f s: %s.", state.upcoming_sleep, error)

    def _final(self, error: Passing, retrying: AsyncRetrying, seconds: float) -> EndpointError:
        """The failure of the last attempt, with what was tried."""
        number = retrying.statistics.get("attempt_number", 1)
        tried = "1 request" if number == 1 else f"{number} requests"
        asked, limit = "", self.settings.step_deadline
        if error.after is not None and seconds + error.after >= limit:
            asked = f"; it asks to wait {error.after:.6g} s, past the step's deadline of {limit:.6g} s"
        return EndpointError(f"{error} ({tried} in {seconds:.1f} s{asked}).", error.cause)

    def _here(self) -> _Live:
        """Client and slots of the running loop; made anew in another loop, where the old ones are of no use."""
        loop = asyncio.get_running_loop()
        if self._live is None or self._live.loop is not loop:
            limits = httpx2.Limits(max_connections=None, max_keepalive_connections=self.settings.concurrency)
            timeout = httpx2.Timeout(None, connect=min(CONNECT_SECONDS, self.settings.deadline))
            client = httpx2.AsyncClient(headers=self._headers, limits=limits, timeout=timeout)
            self._live = _Live(loop=loop, client=client, slots=asyncio.Semaphore(self.settings.concurrency))
        return self._live

    async def aclose(self) -> None:
        """Close the connections. It may be asked again afterwards, over new ones."""
        live, self._live = self._live, None
        if live is not None and live.loop is asyncio.get_running_loop():
            await live.client.aclose()


class HttpPolicy:
    """A policy behind an OpenAI-compatible endpoint.

    Without a format it speaks in messages (`/chat/completions`): steps have no ids, and what they say comes parsed.
    With a format it speaks in token ids (`/completions`), and a step has exactly the ids that were sampled where the
    server tells them (vLLM, SGLang).
    """

    format: Format

    def __init__(
        self,
        address: Address,
        format: Format | None = None,
        *,
        settings: HttpSettings | None = None,
        mode: Mode = "strict",
    ) -> None:
        """Nothing is sent before the first step.

        Args:
            address: Of the endpoint, with the model's name or, where it serves a single model, without.
            format: Of the model behind it, for the API that speaks in ids; None for the one that speaks in messages.
            settings: How it is asked.
            mode: How calls in messages are read; a format reads its steps by itself.

        Raises:
            ConfigError: The address is one of the other API, or a header cannot be sent.
        """
        self.api: Literal["chat", "completions"] = "chat" if format is None else "completions"
        self.format = WireFormat(mode) if format is None else format
        self.settings = settings or HttpSettings()
        self.counters = Counters()
        self.trainable: bool | None = None
        """Whether every step that was sampled with a temperature came with its ids and their log-probabilities; None
        before the first."""
        self._path = CHAT if format is None else COMPLETIONS
        address.at(self._path)
        self.address = address
        self._endpoint = Endpoint(address, self.settings, self.counters)
        self._mode: Mode = mode
        self._model = address.model
        self._reasoning_key: str | None = None

    def begin(self, transcript: Transcript) -> None:
        """Nothing is kept."""

    async def sample(self, transcript: Transcript, role: Role, *, max_tokens: int, temperature: float) -> Step:
        """Ask for one step.

        Raises:
            ContextOverflow: The transcript has become too long for the model.
            EndpointError: The endpoint did not give a step.
            ModelError: A rehearsed step is asked for in messages, or a call in them has no answer.
        """
        body = self._sampling(transcript, max_tokens=max_tokens, temperature=temperature)
        if self.api == "chat":
            return await self._sample_message(transcript, role, body, max_tokens)
        return await self._sample_ids(transcript, role, body, max_tokens)

    async def hold(self, outside: Awaitable[T]) -> T:
        """Await it: requests do not wait for each other."""
        return await outside

    def end(self, transcript: Transcript) -> None:
        """Nothing was kept."""

    async def model(self) -> str:
        """What the endpoint calls the model.

        Raises:
            EndpointError: The address does not say, and the endpoint serves none or several.
        """
        if self._model is None:
            names = await self._endpoint.ask("/models", None, _names)
            if len(names) != 1:
                listed, where = ", ".join(names[:LISTED]) or "none", self.address
                message = f"The endpoint {where} serves {len(names)} models ({listed}); name one: {where}#NAME."
                raise EndpointError(message, "models")
            self._model = names[0]
        return self._model

    async def aclose(self) -> None:
        """Close the connections."""
        await self._endpoint.aclose()

    async def __aenter__(self) -> HttpPolicy:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def _sample_message(self, transcript: Transcript, role: Role, body: dict[str, Any], max_tokens: int) -> Step:
        if role is Role.REHEARSE:
            raise ModelError(
                "An endpoint that speaks in messages cannot continue inside a tool message; use the completions API "
                "with the model's tokenizer."
            )
        body["messages"] = wire_messages(transcript.messages, reasoning_key=self._reasoning_key)
        body[self.settings.token_limit] = body.pop("max_tokens")
        if transcript.tools and self.settings.tools_in_request:
            body["tools"] = [to_openai(tool) for tool in transcript.tools]

        def read(data: dict[str, Any]) -> Step:
            choice, usage = first_choice(data, where=self._where), self._usage(data)
            message = choice.get("message")
            if not isinstance(message, dict):
                raise EndpointError(f"{self._where} answered a choice without a message.", "no_message")
            parsed = parse_wire(message, mode=self._mode, tools=transcript.tools)
            if parsed.reasoning:
                self._reasoning_key = reasoning_key(message)
            done = stopped(choice, usage, max_tokens=max_tokens)
            return Step(ids=[], logprobs=None, stopped=done, parsed=parsed, usage=usage)

        return await self._ask(body, read)

    async def _sample_ids(self, transcript: Transcript, role: Role, body: dict[str, Any], max_tokens: int) -> Step:
        prompt, tag = list(transcript.ids), self.format.stop_text(role)
        body = {
            **UNFILTERED,
            **body,
            **EXACT,
            "prompt": prompt,
            "stop_token_ids": sorted(self.format.stop_ids()),
            **({} if tag is None else {"stop": [tag]}),
        }
        if _comparable({**body, **self.settings.extra_body}, self.settings.logprobs):
            body["logprobs"] = 1  # 0 would do for vLLM and SGLang, but other servers take it for "none"

        def read(data: dict[str, Any]) -> Step:
            choice, usage = first_choice(data, where=self._where), self._usage(data)
            if choice.get("prompt_token_ids") not in (None, prompt):
                raise EndpointError(f"{self._where} read other prompt tokens than were sent.", "prompt_changed")
            sampled = read_sampled(choice, usage, form=self.format, role=role, max_tokens=max_tokens, where=self._where)
            self.counters.dropped_logprobs += sampled.dropped
            return Step(ids=sampled.ids, logprobs=sampled.logprobs, stopped=sampled.stopped, usage=usage)

        return await self._ask(body, read)

    def _sampling(self, transcript: Transcript, *, max_tokens: int, temperature: float) -> dict[str, Any]:
        """What both APIs call alike. The seed is drawn once a step, so that a retry asks for the same."""
        body: dict[str, Any] = {"max_tokens": max_tokens, "temperature": temperature}
        if self.settings.top_p is not None:
            body["top_p"] = self.settings.top_p
        if self.settings.seed:
            body["seed"] = int(transcript.random.integers(2**31))
        return body

    async def _ask(self, body: dict[str, Any], read: Callable[[dict[str, Any]], Step]) -> Step:
        """One step, counted."""
        whole = {"model": await self.model(), **body, **self.settings.extra_body}
        sent = {key: value for key, value in whole.items() if value is not None}
        try:
            step = await self._endpoint.ask(self._path, sent, read)
        except EndpointError as error:
            if error.cause != "status_404":
                raise
            hint = await self._hint()
            raise EndpointError(f"{str(error).rstrip('.')}; {hint}", error.cause) from error
        self.counters.add(step.usage or Usage())
        if body["temperature"] > 0:
            self._judge(step, asked="logprobs" in sent)
        return step

    def _judge(self, step: Step, *, asked: bool) -> None:
        """Note whether a step can be trained on; say once why one that might have been cannot."""
        known = step.logprobs is not None
        if not known and self.trainable is not False and self.api == "completions":
            logger.warning("Steps of %s cannot be trained on: %s.", self.address, WHY_NOT[asked])
        self.trainable = known and self.trainable is not False

    async def _hint(self) -> str:
        """What may be wrong where an endpoint answers 404."""
        try:
            names = await self._endpoint.ask("/models", None, _names)
        except ModelError:
            return "is the URL missing /v1?"
        if self._model in names:
            return f"it serves {self._model!r}, so it is the path that it does not know."
        return f"asked for the model {self._model!r}, it serves {', '.join(names[:LISTED]) or 'none'}."

    def _usage(self, data: Mapping[str, Any]) -> Usage:
        return read_usage(data, price_prompt=self.settings.price_prompt, price_sampled=self.settings.price_sampled)

    @property
    def _where(self) -> str:
        return f"The endpoint {self.address.at(self._path)}"


def _comparable(body: Mapping[str, Any], logprobs: Literal["raw", "processed"]) -> bool:
    """Whether log-probabilities that the server gives are those of the distribution that it samples from.

    At temperature 0 nothing is sampled. Filters (top_p, top_k, min_p) and penalties are in no server's numbers.
    """
    filtered = any(body.get(key) not in neutral for key, neutral in NEUTRAL.items())
    temperature = body.get("temperature")
    return not filtered and (temperature == 1 or (logprobs == "processed" and bool(temperature)))


def _names(data: dict[str, Any]) -> list[str]:
    """The models that an endpoint lists."""
    listed = data.get("data")
    if not isinstance(listed, list):
        raise EndpointError("The endpoint lists no models; name one: URL#NAME.", "models")
    return [model["id"] for model in listed if isinstance(model, dict) and isinstance(model.get("id"), str)]


def _credentials(address: Address, settings: HttpSettings) -> tuple[dict[str, str], str, list[str]]:
    """Headers to send, which credentials they are in words, and what no error may quote."""
    variable = next((name for name in KEYS if os.environ.get(name, "").strip()), None)
    headers = {"Content-Type": "application/json"}
    secrets = [*settings.headers.values(), address.query]
    words = f"no key was sent, set {KEYS[0]}"
    if address.user is not None:
        token = base64.b64encode(":".join(address.user).encode()).decode()
        headers["Authorization"] = f"Basic {token}"
        words, secrets = "name and password of its URL were sent", [*secrets, token, address.user[1]]
    elif variable is not None:
        key = os.environ[variable].strip()
        headers["Authorization"] = f"Bearer {key}"
        words, secrets = f"{variable} was sent, set it to a key of this endpoint", [*secrets, key]
    if any(name.lower() == "authorization" for name in settings.headers):
        del headers["Authorization"]
        words = "the authorization of the settings' headers was sent"
    headers.update(settings.headers)
    for name, value in headers.items():
        if not (value.isascii() and value.isprintable()):
            source = variable if name == "Authorization" and name not in settings.headers else f"The header {name}"
            raise ConfigError(f"{source} holds characters that no HTTP header can carry, e.g. a line break.")
    return headers, words, [secret for secret in secrets if len(secret) >= SECRET_LENGTH]


def _chain(error: BaseException) -> Iterator[BaseException]:
    """An error and what caused it."""
    link: BaseException | None = error
    while link is not None:
        yield link
        link = link.__cause__ or link.__context__


def _cause(error: httpx2.RequestError) -> str:
    """A connection's failure as one word."""
    links = list(_chain(error))
    for kind, word in ((socket.gaierror, "dns"), (ConnectionRefusedError, "refused"), (ssl.SSLError, "tls")):
        if any(isinstance(link, kind) for link in links):
            return word
    if isinstance(error, httpx2.ConnectError | httpx2.ConnectTimeout):
        return "connect"
    if isinstance(error, httpx2.RemoteProtocolError) and "complete" in str(error):
        return "cut_off"
    if isinstance(error, httpx2.NetworkError | httpx2.RemoteProtocolError):
        return "reset"
    return "transport"


WORDS = {
    "dns": "has a host name that cannot be resolved",
    "refused": "refused the connection; is the server running?",
    "tls": "cannot be reached by TLS: it speaks plain http, or its certificate is not trusted",
    "connect": "could not be reached",
    "cut_off": "broke off in the middle of its answer",
    "reset": "closed the connection without an answer",
}


def _unreachable(error: httpx2.RequestError, where: str) -> EndpointError:
    """The error of a request that got no whole answer."""
    cause = _cause(error)
    message = f"{where} {WORDS.get(cause, f'could not be asked ({type(error).__name__})')}"
    return EndpointError(f"{message}.", cause) if cause == "tls" else Passing(message, cause)
