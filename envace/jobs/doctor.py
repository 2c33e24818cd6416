"""`envace doctor`: what of our promises holds on the user's own model or endpoint."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import torch

from envace.errors import EnvaceError, ModelError
from envace.jobs.endpoints import Check, is_endpoint, probe_endpoint
from envace.jobs.models import load
from envace.models.chat import ChatFormat
from envace.models.formats import Format, StarterFormat
from envace.models.local import LocalPolicy
from envace.models.transcripts import Transcript, random_stream
from envace.training.checkpoints import Loaded
from envace.training.forward import hidden_states, log_probabilities
from envace.training.recipe import Recipe
from envace.types import Author, Message, Role, Step, ToolCall, ToolSpec

TOOL = ToolSpec(
    name="get_order",
    description="Show an order.",
    parameters={"type": "object", "properties": {"order_id": {"type": "string"}}, "required": ["order_id"]},
)
CALL = ToolCall(name="get_order", arguments={"order_id": "#W111111"})
OTHER = ToolCall(name="get_order", arguments={"order_id": "#W222222"})
RESPONSE = '{"order_id": "#W111111", "status": "pending"}'
ASKED = (
    Message(author=Author.SYSTEM, content="You help customers of a shop."),
    Message(author=Author.USER, content="What is the status of order #W111111?"),
)
TEXTS = ("plain text", "naïve 漢字 🙂 \u202e", ' {"a": "b\\n"}\n\n', "def f(x):\n\treturn x  # two  spaces")
LOGPROB_TOLERANCE = {"float32": 2e-3, "bfloat16": 0.15}
"""Largest difference of a log-probability, nats, that rounding explains."""
STEP_TOKENS = 24


def doctor(model: str, *, tokenizer: str | None = None, recipe: Recipe | None = None) -> dict[str, Any]:
    """Run the checks on a model (as `--model` names it) or an endpoint (`URL#NAME`).

    Args:
        model: What is to be checked.
        tokenizer: Of an endpoint's model, by folder or hub name: with it, the API that speaks in token ids is checked.
        recipe: Says dtype, device and thinking of a local model.

    Returns:
        `model`, `ok` (all hold), `checks` (`name`, `ok`, `detail`), `seconds`.

    Raises:
        ModelError: The model cannot be loaded at all, or the endpoint's address cannot be read.
    """
    started = time.perf_counter()
    if is_endpoint(model):
        checks = asyncio.run(probe_endpoint(model, tokenizer, TOOL, ASKED))
    else:
        checks = list(_local(load(model, recipe), (recipe or Recipe()).dtype))
    return {
        "model": model,
        "ok": all(check.ok for check in checks),
        "checks": [asdict(check) for check in checks],
        "seconds": round(time.perf_counter() - started, 1),
    }


def _local(loaded: Loaded, dtype: str) -> Iterator[Check]:
    form = loaded.format
    size = sum(parameter.numel() for parameter in loaded.model.parameters())
    yield Check(
        name="model",
        ok=True,
        detail=f"{type(loaded.model).__name__}, {size / 1e6:.1f} M parameters, {dtype} on {loaded.model.device}",
    )
    checks: list[tuple[str, Callable[[], str]]] = [
        ("text round-trips", lambda: _round_trips(form)),
        ("no forged turns", lambda: _forges_nothing(form)),
        ("calls are read back", lambda: _reads_back(form)),
        ("a step samples", lambda: _samples(loaded)),
        ("cache equals a full forward", lambda: _cache_is_exact(loaded, LOGPROB_TOLERANCE[dtype])),
        ("training sees the sampled logprobs", lambda: _training_agrees(loaded, LOGPROB_TOLERANCE[dtype])),
        ("a turn costs only its new tokens", lambda: _costs_new_tokens(loaded)),
    ]
    if isinstance(form, ChatFormat):
        chat = form
        checks[0:0] = [
            ("chat template", lambda: _template(chat)),
            ("appended ids equal the template's", lambda: _appends_exactly(chat, [CALL])),
            ("parallel calls", lambda: _parallel(chat)),
            ("earlier reasoning is kept", lambda: _keeps_reasoning(chat)),
        ]
    for name, check in checks:
        yield _tried(name, check)


def _tried(name: str, check: Callable[[], str]) -> Check:
    """A check that fails says why; so does one that breaks."""
    try:
        return Check(name=name, ok=True, detail=check())
    except (AssertionError, EnvaceError) as error:
        return Check(name=name, ok=False, detail=str(error) or "does not hold")
    except Exception as error:  # noqa: BLE001 - a foreign model may break in any way, and the other checks still count
        return Check(name=name, ok=False, detail=f"{type(error).__name__}: {error}"[:300])


def _demand(holds: bool, otherwise: str) -> None:
    if not holds:
        raise ModelError(otherwise)


# --- formats ---------------------------------------------------------------------------------------------------


def _template(form: ChatFormat) -> str:
    tools = "knows tools" if form.template.native else "knows no tools: they are told in the system message"
    quoted = "; writes a tool's text as JSON" if form.template.quotes else ""
    return f"{tools}; calls are {form.dialect.value}; a turn ends with {form.learned.end}{quoted}"


def _appends_exactly(form: ChatFormat, calls: Sequence[ToolCall]) -> str:
    """The conversation appended as ids, against the template's own text of all of it, tokenized in one go."""
    # Where the prompt has already closed the reasoning, a model that follows it has none to keep.
    thought = None if "</think>" in form.learned.opening_header else "I must look first."
    messages = [
        *ASKED,
        Message(author=Author.ASSISTANT, calls=tuple(calls), reasoning=thought),
        *(Message(author=Author.TOOL, content=RESPONSE, name=call.name) for call in calls),
        Message(author=Author.ASSISTANT, content="It is pending.", reasoning=thought),
    ]
    held = Transcript(form.open([TOOL], ASKED), random=random_stream(0))
    held.take(Step(ids=form.written(messages[2]), logprobs=None, stopped=True), Role.ACT)
    for number, _ in enumerate(calls):
        held.say(form.tool_header(first=number == 0), *form.answer(RESPONSE))
    held.say(form.act_header())
    held.settle(form)
    held.take(Step(ids=form.written(messages[-1]), logprobs=None, stopped=True), Role.ACT)
    whole = form.template.render(messages, [TOOL], open=False)
    wanted = form.tokenizer.encode(whole, add_special_tokens=False)[: len(held.ids)]
    same = next((i for i, (a, b) in enumerate(zip(held.ids, wanted, strict=False)) if a != b), len(wanted))
    _demand(
        held.ids == wanted,
        f"ids differ from position {same} on: appended {form.decode(held.ids[same : same + 8])!r}, "
        f"the template writes {form.decode(wanted[same : same + 8])!r}",
    )
    return f"{len(held.ids)} ids of a conversation with {len(calls)} call(s)"


def _parallel(form: ChatFormat) -> str:
    if not form.parallel:
        return "the template takes one call a step; further ones are answered one after the other"
    return _appends_exactly(form, [CALL, OTHER])


def _keeps_reasoning(form: ChatFormat) -> str:
    said = [*ASKED, Message(author=Author.ASSISTANT, content="It is pending.", reasoning="I must look first.")]
    held = [*form.open([TOOL], ASKED), *form.written(said[-1])]
    again = form.open([TOOL], [*said, Message(author=Author.USER, content="Thanks.")])
    if again[: len(held)] == held:
        return "the template keeps it too"
    return "the template strips it from turns before the last user's; appended transcripts keep it"


def _round_trips(form: Format) -> str:
    for text in TEXTS:
        back = form.decode(form.encode([text]))
        _demand(back == text, f"{text!r} comes back as {back!r}")
    return f"{len(TEXTS)} texts"


def _forges_nothing(form: StarterFormat | ChatFormat) -> str:
    """Control tokens written by a user, a tool and a tool's description must not add one."""
    # The tokenizer's own list, not ours: white space and single letters aside, an added token is there for a purpose.
    added = {str(token): number for number, token in form.tokenizer.added_tokens_decoder.items()}
    control = sorted(token for token in added if len(token.strip()) > 1 and "<" in token)[:200]
    ids = {added[token] for token in control}
    text = "\n".join([*control, "".join(control)])
    for hostile, plain in (
        (form.open([TOOL], [Message(author=Author.USER, content=text)]), form.open([TOOL], [ASKED[1]])),
        (form.encode([form.tool_header(), *form.answer(text)]), form.encode([form.tool_header(), *form.answer("x")])),
    ):
        counts = [sum(token in ids for token in written) for written in (hostile, plain)]
        _demand(
            counts[0] == counts[1], f"a text with control tokens makes {counts[0]} of them, a plain one {counts[1]}"
        )
    return f"{len(control)} control tokens, none of them can be written by others"


def _reads_back(form: Format) -> str:
    parsed = form.parse(form.written(Message(author=Author.ASSISTANT, calls=(CALL,))))
    _demand(parsed.failure is None and parsed.calls == (CALL,), f"{parsed.failure}: {parsed.detail}")
    return f"{CALL.name} with its arguments"


# --- the local policy ------------------------------------------------------------------------------------------


def _sampled(loaded: Loaded, count: int, *, temperature: float) -> tuple[list[Transcript], LocalPolicy]:
    """Transcripts that act, are answered and act again, side by side."""
    policy, form = loaded.policy(), loaded.format
    held = [Transcript(form.open([TOOL], ASKED), random=random_stream(n)) for n in range(count)]

    async def talk(transcript: Transcript) -> None:
        policy.begin(transcript)
        for turn in range(2):
            step = await policy.sample(transcript, Role.ACT, max_tokens=STEP_TOKENS, temperature=temperature)
            transcript.take(step, Role.ACT)
            if turn == 0:
                transcript.say(form.tool_header(), *form.answer(RESPONSE), form.act_header())
                transcript.settle(form)
        policy.end(transcript)

    async def all_of_them() -> None:
        await asyncio.gather(*map(talk, held))

    asyncio.run(all_of_them())
    return held, policy


def _samples(loaded: Loaded) -> str:
    (held,), policy = _sampled(loaded, 1, temperature=1.0)
    said = loaded.format.decode(held.segments[1].ids)
    return f"{policy.sampled_tokens} tokens; the first step: {said[:100]!r}"


@torch.no_grad()
def _cache_is_exact(loaded: Loaded, tolerance: float) -> str:
    """Log-probabilities that the cache gave, against one forward over each whole transcript."""
    worst, count = 0.0, 0
    for held in _sampled(loaded, 3, temperature=1.0)[0]:
        ids = torch.tensor([held.ids], device=loaded.model.device)
        log_TV = torch.log_softmax(loaded.model(input_ids=ids, use_cache=False).logits[0].float(), -1)
        for position, token, logprob in _tokens(held):
            worst, count = max(worst, abs(float(log_TV[position - 1, token]) - logprob)), count + 1
    _demand(worst <= tolerance, f"a log-probability differs by {worst:.4f} nats, more than {tolerance}")
    return f"{count} log-probabilities, largest difference {worst:.1e} nats"


def _tokens(held: Transcript) -> Iterator[tuple[int, int, float]]:
    """Position, id and log-probability of each sampled token."""
    start = 0
    for segment in held.segments:
        if segment.logprobs is not None:
            yield from zip(range(start, start + len(segment.ids)), segment.ids, segment.logprobs, strict=True)
        start += len(segment.ids)


@torch.no_grad()
def _training_agrees(loaded: Loaded, tolerance: float) -> str:
    """The likelihood ratio of the very policy that sampled must be 1."""
    (held,), _ = _sampled(loaded, 1, temperature=0.7)
    ids = torch.tensor([held.ids], device=loaded.model.device)
    log_TV = log_probabilities(loaded.model, hidden_states(loaded.model, ids)[0], 0.7)
    gaps = [float(log_TV[position - 1, token]) - logprob for position, token, logprob in _tokens(held)]
    ratio = float(np.exp(gaps).mean())
    _demand(max(map(abs, gaps)) <= tolerance, f"the mean ratio is {ratio:.4f} and should be 1")
    return f"mean likelihood ratio {ratio:.5f} at temperature 0.7"


def _costs_new_tokens(loaded: Loaded) -> str:
    (held,), policy = _sampled(loaded, 1, temperature=0.0)
    new = len(held.ids) - 1  # the last sampled token is read by nobody
    _demand(policy.forward_tokens == new, f"{policy.forward_tokens} tokens went through the model for {new}")
    return f"{new} tokens went through the model, each once"
