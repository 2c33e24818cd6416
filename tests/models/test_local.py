"""Transcripts, the local policy and its ragged cache, against the plain model as oracle."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from envace.errors import ContextOverflow, ModelError
from envace.models.formats import StarterFormat
from envace.models.local import LocalPolicy
from envace.models.ragged import RaggedCache
from envace.models.transcripts import Transcript, random_stream
from envace.types import Author, Learn, Role, Segment, Step

New = Callable[..., LlamaForCausalLM]

PROMPT = list(range(20, 31))


class NeverStops(StarterFormat):
    """The starter format without stop tokens, so that a test decides how long a step is."""

    def __init__(self, form: StarterFormat) -> None:
        super().__init__(form.tokenizer)

    def stop_ids(self) -> frozenset[int]:
        return frozenset()


def transcript(ids: Sequence[int], *path: int) -> Transcript:
    return Transcript(ids, random=random_stream(*(path or (0,))))


def policy_of(model: LlamaForCausalLM, form: StarterFormat, *, stops: bool = False) -> LocalPolicy:
    return LocalPolicy(model, form if stops else NeverStops(form))


async def take(
    policy: LocalPolicy, held: Transcript, tokens: int, *, role: Role = Role.ACT, temperature: float = 0.0
) -> Segment:
    """Sample a step of so many tokens and append it."""
    step = await policy.sample(held, role, max_tokens=tokens, temperature=temperature)
    return held.take(step, role)


@torch.no_grad()
def full_logprobs(model: LlamaForCausalLM, ids: Sequence[int], temperature: float = 1.0) -> torch.Tensor:
    """The oracle: log-softmax of one forward over all ids; row t speaks of the token after t. Shape (T, V)."""
    return torch.log_softmax(model(torch.tensor([list(ids)])).logits[0].float() / temperature, -1)


def assert_sampled_greedily(model: LlamaForCausalLM, held: Transcript) -> int:
    """Every sampled token is the argmax of a full forward over what stood before it, with that log-probability."""
    log_TV = full_logprobs(model, held.ids)
    start = checked = 0
    for segment in held.segments:
        if segment.role is not None:
            assert segment.logprobs is not None
            for offset, (token, logprob) in enumerate(zip(segment.ids, segment.logprobs, strict=True)):
                row = log_TV[start + offset - 1]
                assert token == int(row.argmax())
                assert logprob == pytest.approx(float(row[token]), abs=1e-4)
                checked += 1
        start += len(segment.ids)
    return checked


async def conversation(policy: LocalPolicy, prompt: Sequence[int], number: int) -> Transcript:
    """Act, rehearse and act again, with given tokens between; lengths differ by number."""
    held = transcript(prompt, number)
    policy.begin(held)
    await take(policy, held, 3 + number % 4)
    held.give(range(40 + number, 43 + 2 * number), Author.TOOL)
    await take(policy, held, 2 + number % 3, role=Role.REHEARSE)
    if number % 2:
        held.give([7 + number], Author.ASSISTANT)
        await take(policy, held, 5)
    policy.end(held)
    return held


def prompts(count: int) -> list[list[int]]:
    """Unequal lengths, 2 to 2 + 5 (count - 1); some shared."""
    rng = np.random.default_rng(3)
    own = [rng.integers(10, 300, 2 + 5 * number).tolist() for number in range(count)]
    return [*own, own[1], own[1], own[-1]]


async def test_many_unequal_conversations_equal_the_plain_model_token_by_token(
    new_tiny: New, form: StarterFormat
) -> None:
    # Nine conversations of prompts from 2 to 27 ids, with ids handed over between steps; they end at different times,
    # so rows of the cache move while others go on.
    model = new_tiny()
    policy = policy_of(model, form)
    held = await asyncio.gather(*(conversation(policy, p, n) for n, p in enumerate(prompts(6))))
    checked = sum(assert_sampled_greedily(new_tiny(), one) for one in held)
    assert checked == policy.sampled_tokens
    assert len({tuple(one.ids) for one in held}) == len(held)


async def test_greedy_step_equals_generate(new_tiny: New, form: StarterFormat) -> None:
    model, plain = new_tiny(), new_tiny()
    policy = policy_of(model, form)
    held = transcript(PROMPT)
    policy.begin(held)
    step = await policy.sample(held, Role.ACT, max_tokens=20, temperature=0.0)
    ids = torch.tensor([PROMPT])
    generated = plain.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=20,
        min_new_tokens=20,
        do_sample=False,
        eos_token_id=None,
    )
    assert step.ids == generated[0, len(PROMPT) :].tolist()


async def test_sampled_logprobs_are_those_of_the_sampling_temperature(new_tiny: New, form: StarterFormat) -> None:
    policy = policy_of(new_tiny(), form)
    held = transcript(PROMPT, 5)
    policy.begin(held)
    segment = await take(policy, held, 12, temperature=0.7)
    log_TV = full_logprobs(new_tiny(), held.ids, 0.7)
    expected = [float(log_TV[len(PROMPT) - 1 + i, token]) for i, token in enumerate(segment.ids)]
    assert segment.logprobs == pytest.approx(expected, abs=1e-4)


async def test_a_transcript_does_not_depend_on_which_others_share_its_batch(new_tiny: New, form: StarterFormat) -> None:
    async def sampled(company: int) -> list[int]:
        policy = policy_of(new_tiny(), form)
        me = transcript(PROMPT, 7, 1)
        others = [transcript(range(60, 64 + 3 * i), 8, i) for i in range(company)]
        for one in (*others[: company // 2], me, *others[company // 2 :]):
            policy.begin(one)

        async def talk(held: Transcript, first: int) -> None:
            await take(policy, held, first, temperature=1.0)
            held.give([50, 51], Author.TOOL)
            await take(policy, held, 6, temperature=1.0)
            policy.end(held)

        await asyncio.gather(talk(me, 4), *(talk(one, 1 + i) for i, one in enumerate(others)))
        return me.ids

    alone = await sampled(0)
    assert await sampled(5) == alone
    assert await sampled(2) == alone


async def test_shared_prompts_are_prefilled_once(new_tiny: New, form: StarterFormat) -> None:
    # 8 transcripts with one prompt of 11 ids: 10 prefilled once, then 8 rows in each of 5 ticks (the first reads the
    # last id of the prompt): 10 + 40. One prefill each would be 80 + 40.
    policy = policy_of(new_tiny(), form)
    group = [transcript(PROMPT, i) for i in range(8)]
    for one in group:
        policy.begin(one)
    await asyncio.gather(*(take(policy, one, 5) for one in group))
    assert policy.forward_tokens == 10 + 8 * 5
    assert policy.sampled_tokens == 8 * 5
    assert len({tuple(one.ids) for one in group}) == 1


async def test_a_turn_costs_only_its_new_tokens(new_tiny: New, form: StarterFormat) -> None:
    policy = policy_of(new_tiny(), form)
    held = transcript(PROMPT)
    policy.begin(held)
    await take(policy, held, 4)
    before = policy.forward_tokens
    held.give([40, 41, 42, 43, 44, 45], Author.TOOL)
    await take(policy, held, 3, role=Role.REHEARSE)
    # The last sampled id and 6 given ones are read, then 2 of the 3 sampled ones: 1 + 6 + 2, however long the rest is.
    assert policy.forward_tokens - before == 9
    assert_sampled_greedily(new_tiny(), held)


async def test_idle_rows_are_not_disturbed_by_the_ticks_of_others(new_tiny: New, form: StarterFormat) -> None:
    policy = policy_of(new_tiny(), form)
    idle, busy = transcript(PROMPT), transcript([5, 6, 7])
    policy.begin(idle)
    policy.begin(busy)
    await asyncio.gather(take(policy, idle, 2), take(policy, busy, 2))
    await take(policy, busy, 90)  # beyond the first chunk of the cache, too
    await take(policy, idle, 5)
    assert_sampled_greedily(new_tiny(), idle)
    assert_sampled_greedily(new_tiny(), busy)


async def test_ended_transcripts_free_their_rows(new_tiny: New, form: StarterFormat) -> None:
    # Three rows for 4 tokens, then one row alone: each further token costs one forward token, not three.
    policy = policy_of(new_tiny(), form)
    first, middle, last = (transcript(PROMPT, i) for i in range(3))
    for one in (first, middle, last):
        policy.begin(one)
    await asyncio.gather(*(take(policy, one, 4) for one in (first, middle, last)))
    policy.end(first)
    policy.end(middle)
    policy.end(middle)  # ending twice is harmless
    before = policy.forward_tokens
    await take(policy, last, 7)
    assert policy.forward_tokens - before == 7
    assert_sampled_greedily(new_tiny(), last)
    newcomer = transcript(PROMPT[:6], 9)
    policy.begin(newcomer)
    await take(policy, newcomer, 3)
    assert_sampled_greedily(new_tiny(), newcomer)


async def test_transcript_that_ends_before_it_ever_sampled_leaves_no_trace(new_tiny: New, form: StarterFormat) -> None:
    policy = policy_of(new_tiny(), form)
    gone, held = transcript(PROMPT), transcript([5, 6, 7])
    policy.begin(gone)
    policy.begin(held)
    policy.end(gone)
    await take(policy, held, 4)
    assert policy.forward_tokens == 2 + 4


async def test_temperature_zero_needs_no_dice_and_one_follows_them(new_tiny: New, form: StarterFormat) -> None:
    async def sampled(seed: int, temperature: float) -> list[int]:
        policy = policy_of(new_tiny(), form)
        held = transcript(PROMPT, seed)
        policy.begin(held)
        return (await take(policy, held, 12, temperature=temperature)).ids

    assert await sampled(1, 0.0) == await sampled(2, 0.0)
    assert await sampled(1, 1.0) == await sampled(1, 1.0)
    assert await sampled(1, 1.0) != await sampled(2, 1.0)


async def test_temperature_one_samples_the_models_own_distribution(new_tiny: New, form: StarterFormat) -> None:
    # 600 draws of the token after the prompt: the share of the most likely one lies within 4 standard errors of its
    # probability (an honest sampler misses this once in 15,000 runs, and the draws are seeded).
    policy = policy_of(new_tiny(), form)
    group = [transcript(PROMPT, 1, i) for i in range(600)]
    for one in group:
        policy.begin(one)
    drawn = [s.ids[0] for s in await asyncio.gather(*(take(policy, one, 1, temperature=1.0) for one in group))]
    likely = full_logprobs(new_tiny(), PROMPT)[-1].exp()
    token, share = int(likely.argmax()), float(likely.max())
    assert 0.02 < share < 0.98
    assert abs(drawn.count(token) / 600 - share) < 4 * (share * (1 - share) / 600) ** 0.5


async def test_limit_cuts_a_step_and_says_so(new_tiny: New, form: StarterFormat) -> None:
    model = new_tiny()
    policy = policy_of(model, form)
    held = transcript(PROMPT)
    policy.begin(held)
    step = await policy.sample(held, Role.ACT, max_tokens=3, temperature=0.0)
    assert (len(step.ids), len(step.logprobs), step.stopped) == (3, 3, False)
    # With the second of these as a stop token, the step ends there and keeps it.
    policy = policy_of(new_tiny(), form)
    policy._stop = frozenset({step.ids[1]})
    held = transcript(PROMPT)
    policy.begin(held)
    stopped = await policy.sample(held, Role.ACT, max_tokens=3, temperature=0.0)
    first = step.ids.index(step.ids[1])
    assert stopped.stopped
    assert stopped.ids == step.ids[: first + 1]


async def test_logits_that_are_not_finite_are_an_error_for_everybody_who_waits(
    new_tiny: New, form: StarterFormat
) -> None:
    model = new_tiny()
    with torch.no_grad():
        model.get_input_embeddings().weight[25] = float("nan")  # tied: every logit of id 25 too
    policy = policy_of(model, form)
    group = [transcript(PROMPT, i) for i in range(2)]
    for one in group:
        policy.begin(one)
    results = await asyncio.gather(*(take(policy, one, 3) for one in group), return_exceptions=True)
    assert [type(result) for result in results] == [ModelError, ModelError]


async def test_cancelled_step_leaves_the_others_alone(new_tiny: New, form: StarterFormat) -> None:
    policy = policy_of(new_tiny(), form)
    gone, held = transcript(PROMPT), transcript([5, 6, 7])
    policy.begin(gone)
    policy.begin(held)
    doomed = asyncio.ensure_future(take(policy, gone, 200))
    going = asyncio.ensure_future(take(policy, held, 30))
    await asyncio.sleep(0.01)
    doomed.cancel()
    await asyncio.gather(doomed, return_exceptions=True)
    policy.end(gone)
    await asyncio.wait_for(going, 10)
    assert_sampled_greedily(new_tiny(), held)
    await asyncio.wait_for(take(policy, held, 3), 10)
    assert_sampled_greedily(new_tiny(), held)


async def test_no_tick_happens_while_a_rollout_awaits_a_tool(new_tiny: New, form: StarterFormat) -> None:
    # Else a slow tool would change who shares a batch with whom.
    policy = policy_of(new_tiny(), form)
    held, calling = transcript(PROMPT), transcript([5, 6, 7])
    policy.begin(held)
    policy.begin(calling)
    gate = asyncio.Event()
    tool = asyncio.ensure_future(policy.hold(gate.wait()))
    await asyncio.sleep(0)
    sampling = asyncio.ensure_future(take(policy, held, 3))
    await asyncio.sleep(0.05)
    assert policy.sampled_tokens == 0
    gate.set()
    await asyncio.gather(tool, sampling)
    assert policy.sampled_tokens == 3


def test_transcript_is_its_segments_in_order() -> None:
    held = transcript([1, 2])
    given = held.give([3], Author.TOOL, learn=Learn.ANCHOR)
    taken = held.take(Step(ids=[4, 5], logprobs=[-0.1, -0.2], stopped=True), Role.REHEARSE)
    assert held.ids == [1, 2, 3, 4, 5]
    assert len(held) == 5
    assert (given.role, given.learn, given.logprobs) == (None, Learn.ANCHOR, None)
    assert (taken.role, taken.author, taken.learn) == (Role.REHEARSE, Author.TOOL, Learn.POLICY)
    assert taken.logprobs == [-0.1, -0.2]
    assert held.segments[0].learn is Learn.NOTHING


def test_random_streams_depend_on_their_path_alone() -> None:
    assert random_stream(0, 1, 2).random() == random_stream(0, 1, 2).random()
    draws = [random_stream(*path).random() for path in ((0, 1, 2), (0, 2, 1), (0, 1), (1, 1, 2))]
    assert len(set(draws)) == 4


async def test_a_step_that_timed_out_ends_no_other_and_leaves_nothing_behind(
    new_tiny: New, form: StarterFormat
) -> None:
    policy = policy_of(new_tiny(), form)
    slow, other = transcript(PROMPT, 1), transcript(PROMPT, 2)
    for one in (slow, other):
        policy.begin(one)
    limited = asyncio.wait_for(policy.sample(slow, Role.ACT, max_tokens=480, temperature=1.0), 0.05)
    results = await asyncio.gather(
        limited, policy.sample(other, Role.ACT, max_tokens=150, temperature=1.0), return_exceptions=True
    )
    assert isinstance(results[0], asyncio.TimeoutError)
    assert isinstance(results[1], Step)
    policy.end(slow)
    policy.end(other)
    before = policy.forward_tokens
    await asyncio.sleep(0.05)
    assert policy.forward_tokens == before  # nobody samples for nobody


async def test_a_transcript_that_was_not_begun_is_an_error(new_tiny: New, form: StarterFormat) -> None:
    with pytest.raises(ModelError, match="before it was begun"):
        await policy_of(new_tiny(), form).sample(transcript(PROMPT), Role.ACT, max_tokens=3, temperature=1.0)


async def test_a_transcript_ends_where_the_models_positions_do(new_tiny: New, form: StarterFormat) -> None:
    policy = policy_of(new_tiny(), form)  # it has 512
    held = transcript([7] * 509)
    policy.begin(held)
    assert len((await take(policy, held, 10)).ids) == 3
    with pytest.raises(ContextOverflow, match="512"):
        await policy.sample(held, Role.ACT, max_tokens=1, temperature=1.0)


async def test_a_pass_that_fails_fails_those_who_ask_and_nobody_else(
    new_tiny: New, form: StarterFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = policy_of(new_tiny(), form)
    extend = RaggedCache.extend

    def fail(*arguments: object, **options: object) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(RaggedCache, "extend", fail)
    first, second = transcript(PROMPT, 1), transcript(PROMPT, 2)
    policy.begin(first)
    policy.begin(second)
    with pytest.raises(ModelError, match="no room"):
        await policy.sample(first, Role.ACT, max_tokens=3, temperature=0.0)
    policy.end(first)
    monkeypatch.setattr(RaggedCache, "extend", extend)
    await take(policy, second, 6)
    assert_sampled_greedily(new_tiny(), second)
