"""The local policy: any transformers causal model on one device, batching whatever steps are asked for."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from envace.errors import ContextOverflow, ModelError
from envace.models.formats import Format
from envace.models.ragged import ATTENTION, RaggedCache, buckets
from envace.models.transcripts import Transcript
from envace.types import Role, Step

T = TypeVar("T")

PREFILL_TOKENS = 8192
"""Padded prompt tokens that are read in one pass."""
CHUNK_BYTES = 16e6
"""Models of more bytes than this read given tokens in passes of their own: each token of a smaller one costs so little
that it rides along with what the other rollouts sample."""

SETTLE_ROUNDS = 4
"""Turns of the event loop that let every rollout which can go on reach its next request before a tick."""


@dataclass(kw_only=True)
class Request:
    """One step being sampled."""

    transcript: Transcript
    max_tokens: int
    temperature: float
    stop_text: str | None
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
        size = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
        self._positions = int(getattr(model.config.get_text_config(), "max_position_embeddings", None) or 2**31)
        self._chunk = 2 if size > CHUNK_BYTES else 64
        self._rows: list[Transcript] = []
        """Row of the cache -> transcript; rows are kept dense."""
        self._read: dict[Transcript, int] = {}
        """How many ids of a transcript are in the cache; absent before its prefill."""
        self._row_numbers: dict[Transcript, int] = {}
        """Which of its rows of training a begun transcript was begun in."""
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
        self._row_numbers[transcript] = transcript.row

    async def sample(self, transcript: Transcript, role: Role, *, max_tokens: int, temperature: float) -> Step:
        """Sample until a stop token or the limit. The role changes only what ends it and who is credited.

        Raises:
            ContextOverflow: The transcript has no room left in the model's positions.
            ModelError: The model gave logits that are not finite, or the transcript was not begun.
        """
        self._check(transcript)
        room = self._positions - len(transcript)
        if room <= 0:
            raise ContextOverflow(f"The transcript has {len(transcript)} tokens; the model reads {self._positions}.")
        future: asyncio.Future[Step] = asyncio.get_running_loop().create_future()
        request = self._requests[transcript] = Request(
            transcript=transcript,
            max_tokens=min(max_tokens, room),
            temperature=temperature,
            stop_text=self.format.stop_text(role),
            future=future,
        )
        if self._driver is None or self._driver.done():
            self._driver = asyncio.create_task(self._drive())
        try:
            return await future
        finally:
            if self._requests.get(transcript) is request:  # whoever asked was cancelled
                del self._requests[transcript]

    def _check(self, transcript: Transcript) -> None:
        """A transcript whose prompt was rewritten begins again; one that was never begun is an error."""
        begun = self._row_numbers.get(transcript)
        if begun is None:
            raise ModelError("A transcript asks for a step before it was begun: call policy.begin first.")
        if begun != transcript.row:
            self.end(transcript)
            self.begin(transcript)

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
        self._row_numbers.pop(transcript, None)
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
                self._catch_up()
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
        for row, transcript in enumerate(self._waiting, len(self._rows)):
            groups.setdefault(tuple(transcript.prompt[:-1]), []).append(row)
        prompts = {prompt: rows for prompt, rows in groups.items() if prompt}
        for batch in _batches(list(prompts)):
            self._cache.extend([prompts[p][0] for p in batch], batch, [0] * len(batch), pad=self.format.pad_id)
        copies = [(row, first, len(prompt)) for prompt, (first, *others) in prompts.items() for row in others]
        for row, first, length in sorted(copies, reverse=True):  # from the last row on, so that the cache grows once
            self._cache.move(first, row, length)
        # Only now: had a pass failed, these rows would stand for prompts that nobody has read.
        for transcript in self._waiting:
            self._read[transcript] = len(transcript.prompt) - 1
            self._rows.append(transcript)
        self._waiting.clear()

    def _catch_up(self) -> None:
        """Read what was given since a step, all but its last token, where it is long enough to be worth a pass."""
        behind: list[tuple[int, list[int]]] = []
        for row, transcript in enumerate(self._rows):
            unread = transcript.ids[self._read[transcript] : -1]
            if transcript in self._requests and len(unread) >= self._chunk:
                behind.append((row, unread))
        if not behind:
            return
        starts = [self._read[self._rows[row]] for row, _ in behind]
        self._cache.extend([row for row, _ in behind], [ids for _, ids in behind], starts, pad=self.format.pad_id)
        for row, ids in behind:
            self._read[self._rows[row]] += len(ids)

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
        logits = self._cache.tick(tokens, positions)
        if ready:
            self._sample(logits[[row for row, _ in ready]].cpu(), [request for _, request in ready])

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
        stopped = token in self._stop or self._at_stop_text(request)
        if stopped or len(request.ids) >= request.max_tokens:
            del self._requests[request.transcript]
            if request.future.done():  # cancelled since this tick began
                return
            request.future.set_result(Step(ids=request.ids, logprobs=request.logprobs, stopped=stopped))

    def _at_stop_text(self, request: Request) -> bool:
        """Whether the step now holds the text that ends it; the last tokens tell, as each holds a character or more."""
        text = request.stop_text
        return text is not None and text in self.format.decode(request.ids[-len(text.encode()) :])


def _batches(prompts: Sequence[tuple[int, ...]]) -> Iterator[list[tuple[int, ...]]]:
    """Prompts of like length, at most so many tokens at once that their activations stay small."""
    for batch in buckets([len(prompt) for prompt in prompts], max_tokens=PREFILL_TOKENS):
        yield [prompts[i] for i in batch]
