"""The local policy: any transformers causal model on one device, batching whatever steps are asked for."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from envace.errors import ModelError
from envace.models.formats import Format
from envace.models.ragged import ATTENTION, RaggedCache
from envace.models.transcripts import Transcript
from envace.types import Role, Step

T = TypeVar("T")

SETTLE_ROUNDS = 4
"""Turns of the event loop that let every rollout which can go on reach its next request before a tick."""


@dataclass(kw_only=True)
class Request:
    """One step being sampled."""

    transcript: Transcript
    max_tokens: int
    temperature: float
    future: asyncio.Future[Step]
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


class LocalPolicy:
    """Samples steps for many transcripts at once, each keeping its key/value cache between its steps.

    A tick appends one token to every open transcript that has one to append: a given token it has not read yet, or the
    token it just sampled. A tick waits until every rollout has either asked for a step or waits for another's, so that
    batches, and with them the last bits of the logits, do not depend on how fast a tool answered.
    """

    def __init__(self, model: PreTrainedModel, format: Format) -> None:
        model.set_attn_implementation(ATTENTION)
        self.model, self.format = model, format
        self._stop = format.stop_ids()
        self._rows: list[Transcript] = []
        """Row of the cache -> transcript; rows are kept dense."""
        self._read: dict[Transcript, int] = {}
        """How many ids of a transcript are in the cache; absent before its prefill."""
        self._waiting: list[Transcript] = []
        """Begun, not prefilled yet."""
        self._requests: dict[Transcript, Request] = {}
        self._cache = RaggedCache(model)
        self._driver: asyncio.Task[None] | None = None
        self._held = 0
        self._released = asyncio.Event()
        self.sampled_tokens = 0

    @property
    def forward_tokens(self) -> int:
        """Tokens that went through the model while sampling, padding included."""
        return self._cache.forward_tokens

    def begin(self, transcript: Transcript) -> None:
        """Its prompt is prefilled, once for all transcripts with the same prompt, at the next tick."""
        self._waiting.append(transcript)

    async def sample(self, transcript: Transcript, role: Role, *, max_tokens: int, temperature: float) -> Step:
        """Sample until a stop token or the limit. The role changes nothing but who is credited.

        Raises:
            ModelError: The model gave logits that are not finite.
        """
        future: asyncio.Future[Step] = asyncio.get_running_loop().create_future()
        self._requests[transcript] = Request(
            transcript=transcript, max_tokens=max_tokens, temperature=temperature, future=future
        )
        if self._driver is None or self._driver.done():
            self._driver = asyncio.create_task(self._drive())
        return await future

    async def hold(self, outside: Awaitable[T]) -> T:
        """Await a tool or a grader; no tick happens meanwhile."""
        self._held += 1
        self._released.clear()
        try:
            return await outside
        finally:
            self._held -= 1
            if not self._held:
                self._released.set()

    def end(self, transcript: Transcript) -> None:
        """Free its row; the last row takes its place."""
        if transcript in self._waiting:
            self._waiting.remove(transcript)
        if self._read.pop(transcript, None) is None:
            return
        row, last = self._rows.index(transcript), self._rows[-1]
        if last is not transcript:
            self._cache.move(len(self._rows) - 1, row, self._read[last])
            self._rows[row] = last
        self._rows.pop()

    async def _drive(self) -> None:
        """Tick while anybody waits for a step."""
        try:
            while self._requests:
                await self._settle()
                self._prefill()
                self._tick()
        except Exception as error:  # noqa: BLE001 - whoever waits must learn of it; nobody else would
            failure = (
                error if isinstance(error, ModelError) else ModelError(f"sampling: {type(error).__name__}: {error}")
            )
            for request in list(self._requests.values()):
                if not request.future.done():
                    request.future.set_exception(failure)
            self._requests.clear()

    async def _settle(self) -> None:
        """Let every rollout that can go on do so."""
        rounds = 0
        while rounds < SETTLE_ROUNDS:
            await asyncio.sleep(0)
            rounds += 1
            if self._held:
                await self._released.wait()
                rounds = 0

    def _prefill(self) -> None:
        """Read the prompts of new transcripts, all but their last token, each distinct prompt once."""
        if not self._waiting:
            return
        groups: dict[tuple[int, ...], list[int]] = {}
        for transcript in self._waiting:
            groups.setdefault(tuple(transcript.segments[0].ids[:-1]), []).append(len(self._rows))
            self._read[transcript] = len(transcript.segments[0].ids) - 1
            self._rows.append(transcript)
        self._waiting.clear()
        self._cache.prefill(list(groups), list(groups.values()), self.format.pad_id)

    def _tick(self) -> None:
        """Append one token to each row that has one, and sample where a request has read everything."""
        tokens, positions = [], []
        ready: list[tuple[int, Request]] = []
        for row, transcript in enumerate(self._rows):
            read, request, given = self._read[transcript], self._requests.get(transcript), len(transcript.ids)
            positions.append(read)
            if request is None:
                tokens.append(self.format.pad_id)  # idle: the slot is written again when it goes on
                continue
            tokens.append(transcript.ids[read] if read < given else request.ids[read - given])
            self._read[transcript] = read + 1
            if read + 1 == given + len(request.ids):
                ready.append((row, request))
        logits = self._cache.tick(torch.tensor(tokens), torch.tensor(positions))
        if ready:
            self._sample(logits[torch.tensor([row for row, _ in ready])], [request for _, request in ready])

    def _sample(self, logits: Tensor, requests: list[Request]) -> None:
        """Draw a token for each request: its cumulative distribution, inverted at the transcript's own uniform."""
        temperatures = torch.tensor([request.temperature for request in requests])
        logprobs = torch.log_softmax(
            logits / temperatures.clamp(min=1e-6)[:, None].where(temperatures[:, None] > 0, 1.0), -1
        )
        if not torch.isfinite(logprobs.max(-1).values).all():
            raise ModelError("The model gave logits that are not finite, so nothing can be sampled from it.")
        draws = torch.from_numpy(np.array([request.transcript.random.random() for request in requests]))
        cumulative = logprobs.double().exp().cumsum(-1)
        drawn = torch.searchsorted(cumulative, (draws * cumulative[:, -1])[:, None], right=True)[:, 0]
        tokens = torch.where(temperatures > 0, drawn.clamp(max=logits.shape[1] - 1), logits.argmax(-1))
        chosen = logprobs.gather(1, tokens[:, None])[:, 0]
        for request, token, logprob in zip(requests, tokens.tolist(), chosen.tolist(), strict=True):
            self._append(request, token, logprob)

    def _append(self, request: Request, token: int, logprob: float) -> None:
        request.ids.append(token)
        request.logprobs.append(logprob)
        self.sampled_tokens += 1
        stopped = token in self._stop
        if stopped or len(request.ids) >= request.max_tokens:
            del self._requests[request.transcript]
            request.future.set_result(Step(ids=request.ids, logprobs=request.logprobs, stopped=stopped))
