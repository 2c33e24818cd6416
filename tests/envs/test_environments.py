"""Who answers a call: the executable environment, or the policy itself in one imagined world per group."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from envace.envs import Continued, ExecutableEnvironment, GroupWorld, RehearsedEnvironment, invalid_call
from envace.errors import DataError
from envace.models.policy import ScriptedPolicy
from envace.models.transcripts import Transcript, open_transcript, random_stream
from envace.rollout import Limits, rollout
from envace.rollout.groups import Collector, Setting
from envace.sandbox import Worker
from envace.scenarios import EnvironmentSpec, Scenario
from envace.types import Author, Consistency, Exchange, Group, Learn, Role, Segment, StopReason, ToolCall

ORDER = {"order_id": "#W111111", "customer_id": "CU222222", "item": "lamp", "status": "pending", "total": 120}
SHIPPED = {**ORDER, "status": "shipped"}
LOOKUP = {"order_id": "#W111111"}


class Rehearser:
    """Builds rehearsed environments that share a group's world, and counts the responses asked of the policy."""

    def __init__(self, form: Any, spec: EnvironmentSpec, worker: Worker, responses: Iterable[list[int]]) -> None:
        self.queue = list(responses)
        self.form, self.spec, self.worker = form, spec, worker
        self.policy = ScriptedPolicy(form, lambda text, role: self.queue.pop(0))
        self.world = GroupWorld()

    async def environment(self, **changes: Any) -> RehearsedEnvironment:
        limits = {key: changes.pop(key) for key in ("max_tokens", "max_length") if key in changes}
        voice = Continued(**{"policy": self.policy, "temperature": 1.0, "max_tokens": 64, "max_length": 500, **limits})
        return RehearsedEnvironment(
            self.spec,
            policy=self.policy,
            voice=voice,
            observer=await self.worker.imagine(self.spec.id),
            world=self.world,
            **{"share": True, "anchors": True, **changes},
        )


@pytest.fixture
def rehearser(form: Any, retail: EnvironmentSpec, worker: Worker) -> Callable[..., Rehearser]:
    return lambda *responses: Rehearser(form, retail, worker, responses)


def new_transcript() -> Transcript:
    return Transcript([1, 2, 3], random=random_stream(0))


def call(name: str = "get_order", **arguments: Any) -> ToolCall:
    return ToolCall(name=name, arguments=arguments or LOOKUP)


async def ask(environment: RehearsedEnvironment, asked: ToolCall) -> tuple[Exchange, Segment]:
    """The exchange and the segment it left."""
    transcript = new_transcript()
    # Who waits for a key that nobody frees would wait for ever.
    exchange = await asyncio.wait_for(environment.respond(asked, transcript), 5)
    assert exchange is not None
    return exchange, transcript.segments[-1]


# One imagined world per group


async def test_the_second_rollout_is_given_what_the_first_imagined(
    rehearser: Callable[..., Rehearser], say: Any
) -> None:
    rehearsing = rehearser(say.response(ORDER))
    first, second = await rehearsing.environment(), await rehearsing.environment()
    sampled, own = await ask(first, call())
    given, handed = await ask(second, call())
    assert own.ids == handed.ids == say.response(ORDER)
    assert (own.role, own.learn) == (Role.REHEARSE, Learn.ANCHOR)
    assert own.logprobs is not None
    assert (handed.role, handed.learn, handed.author, handed.logprobs) == (None, Learn.ANCHOR, Author.TOOL, None)
    assert sampled.response == given.response == ORDER
    assert (sampled.shared, given.shared) == (False, True)
    assert given.consistency is Consistency.CONSISTENT  # its own imagined world knows the record now
    assert rehearsing.world.shared_tokens == len(handed.ids)
    assert rehearsing.queue == []


async def test_a_rollout_that_asks_twice_gets_the_same_answer(rehearser: Callable[..., Rehearser], say: Any) -> None:
    rehearsing = rehearser(say.response(ORDER))
    environment = await rehearsing.environment()
    await ask(environment, call())
    again, segment = await ask(environment, call())
    assert again.response == ORDER
    assert segment.learn is Learn.ANCHOR


async def test_different_lookups_are_imagined_each_for_itself(rehearser: Callable[..., Rehearser], say: Any) -> None:
    other = {**SHIPPED, "order_id": "#W333333"}
    rehearsing = rehearser(say.response(ORDER), say.response(other))
    environment = await rehearsing.environment()
    await ask(environment, call())
    exchange, _ = await ask(environment, call(order_id="#W333333"))
    assert exchange.response == other
    assert not exchange.shared


async def test_who_asks_while_another_imagines_waits_and_is_given_the_same(
    form: Any, retail: EnvironmentSpec, worker: Worker, say: Any
) -> None:
    gate, samples = asyncio.Event(), 0

    class Slow(ScriptedPolicy):
        async def sample(self, transcript: Transcript, role: Role, **limits: Any) -> Any:
            nonlocal samples
            samples += 1
            await gate.wait()
            return await super().sample(transcript, role, **limits)

    rehearsing = Rehearser(form, retail, worker, [])
    rehearsing.policy = Slow(form, lambda text, role: say.response(ORDER))
    asking = [asyncio.ensure_future(ask(await rehearsing.environment(), call())) for _ in range(4)]
    await asyncio.sleep(0.01)
    gate.set()
    answers = await asyncio.gather(*asking)
    assert samples == 1
    assert [exchange.shared for exchange, _ in answers] == [False, True, True, True]


@pytest.mark.parametrize(
    ("broken", "why"),
    [
        ({**ORDER, "status": "lost"}, "a record of a wrong schema"),
        ({**ORDER, "order_id": "#W999999"}, "another record than was asked for"),
        ("pending", "no record"),
    ],
)
async def test_an_ill_formed_response_is_not_stored_and_the_next_samples_anew(
    rehearser: Callable[..., Rehearser], say: Any, broken: Any, why: str
) -> None:
    rehearsing = rehearser(say.response(broken), say.response(ORDER))
    bad, own = await ask(await rehearsing.environment(), call())
    good, next_own = await ask(await rehearsing.environment(), call())
    assert bad.consistency is Consistency.INCONSISTENT, why
    assert own.learn is Learn.POLICY  # the rehearser learns from it
    assert good.response == ORDER
    assert not good.shared
    assert next_own.learn is Learn.ANCHOR
    assert rehearsing.queue == []


@pytest.mark.parametrize("text", ["{not json", "", "[" * 5000])
async def test_a_response_that_is_not_json_is_inconsistent_and_not_stored(
    rehearser: Callable[..., Rehearser], say: Any, form: Any, text: str
) -> None:
    rehearsing = rehearser(form.encode(form.answer(text)), say.response(ORDER))
    environment = await rehearsing.environment(max_tokens=10_000, max_length=20_000)
    bad, _ = await ask(environment, call())
    assert (bad.consistency, bad.response, bad.text) == (Consistency.INCONSISTENT, None, text)
    good, _ = await ask(environment, call())
    assert good.response == ORDER


async def test_a_contradicting_response_is_not_stored(rehearser: Callable[..., Rehearser], say: Any) -> None:
    # All three cancel the order and look again. The first then imagines it as still pending, which contradicts what it
    # has imagined before; the second must not be told so, but the third is told what the second imagines.
    done, after = say.response({"status": "cancelled"}), {**ORDER, "status": "cancelled"}
    rehearsing = rehearser(say.response(ORDER), done, say.response(ORDER), done, say.response(after), done)
    found = []
    for _ in range(3):
        environment = await rehearsing.environment()
        for name in ("get_order", "cancel_order"):
            await ask(environment, call(name))
        found.append(await ask(environment, call()))
    (bad, segment), (good, _), (told, _) = found
    assert bad.consistency is Consistency.INCONSISTENT
    assert segment.learn is Learn.POLICY
    assert (good.response, good.shared, good.consistency) == (after, False, Consistency.CONSISTENT)
    assert (told.response, told.shared, told.consistency) == (after, True, Consistency.CONSISTENT)
    assert rehearsing.queue == []


async def test_what_does_not_exist_is_dice_but_what_the_rules_say_is_learned(
    rehearser: Callable[..., Rehearser], say: Any
) -> None:
    # Whether there is an order is the world's to say, as its status is; that an id needs its mark is a rule.
    rehearsing = rehearser(say.response({"error": "not_found"}), say.response({"error": "invalid_id"}))
    _, missing = await ask(await rehearsing.environment(), call())
    given, handed = await ask(await rehearsing.environment(), call())
    _, malformed = await ask(await rehearsing.environment(), call(order_id="W111111"))
    assert missing.learn is Learn.ANCHOR
    assert (given.shared, handed.learn) == (True, Learn.ANCHOR)
    assert malformed.learn is Learn.POLICY


async def test_after_a_write_on_the_same_order_the_lookup_is_not_shared(
    rehearser: Callable[..., Rehearser], say: Any
) -> None:
    cancelled = {**ORDER, "status": "cancelled"}
    rehearsing = rehearser(say.response(ORDER), say.response({"status": "cancelled"}), say.response(cancelled))
    first, second = await rehearsing.environment(), await rehearsing.environment()
    await ask(first, call())
    await ask(second, call())
    write, own = await ask(second, call("cancel_order"))
    assert own.learn is Learn.POLICY
    assert not write.shared
    after, _ = await ask(second, call())
    assert after.response == cancelled
    assert not after.shared
    assert after.consistency is Consistency.CONSISTENT
    still, _ = await ask(first, call())  # the first has written nothing
    assert still.response == ORDER
    assert still.shared


async def test_a_write_on_another_order_does_not_part_the_rollouts(
    rehearser: Callable[..., Rehearser], say: Any
) -> None:
    rehearsing = rehearser(say.response({"error": "already_shipped"}), say.response(ORDER))
    first, second = await rehearsing.environment(), await rehearsing.environment()
    await ask(first, call("cancel_order", order_id="#W333333"))
    await ask(first, call())
    given, _ = await ask(second, call())
    assert given.shared


async def test_writes_are_never_shared(rehearser: Callable[..., Rehearser], say: Any) -> None:
    rehearsing = rehearser(say.response({"status": "cancelled"}), say.response({"error": "already_shipped"}))
    one, _ = await ask(await rehearsing.environment(), call("cancel_order"))
    two, _ = await ask(await rehearsing.environment(), call("cancel_order"))
    assert one.response != two.response


async def test_without_sharing_every_rollout_imagines_its_own(rehearser: Callable[..., Rehearser], say: Any) -> None:
    rehearsing = rehearser(say.response(ORDER), say.response(SHIPPED))
    one, own = await ask(await rehearsing.environment(share=False, anchors=False), call())
    two, _ = await ask(await rehearsing.environment(share=False, anchors=False), call())
    assert (one.response, two.response) == (ORDER, SHIPPED)
    assert own.learn is Learn.POLICY  # as published, look-up values are trained
    assert rehearsing.world.shared_tokens == 0


async def test_a_known_value_seen_again_is_trained_not_anchored(rehearser: Callable[..., Rehearser], say: Any) -> None:
    # Unshared, the second look-up follows from the first: to repeat it rightly is a skill, not a throw of dice.
    rehearsing = rehearser(say.response(ORDER), say.response(ORDER))
    environment = await rehearsing.environment(share=False)
    _, first = await ask(environment, call())
    _, second = await ask(environment, call())
    assert (first.learn, second.learn) == (Learn.ANCHOR, Learn.POLICY)


async def test_a_response_that_is_cut_is_no_answer_and_frees_the_key(
    rehearser: Callable[..., Rehearser], say: Any
) -> None:
    rehearsing = rehearser(say.response(ORDER), say.response(ORDER))
    for limit in ({"max_tokens": 3}, {"max_length": 3}):
        cut = await rehearsing.environment(**limit)
        assert await asyncio.wait_for(cut.respond(call(), new_transcript()), 5) is None
    exchange, _ = await ask(await rehearsing.environment(), call())
    assert exchange.response == ORDER


async def test_a_sampler_that_fails_frees_the_key(rehearser: Callable[..., Rehearser], say: Any) -> None:
    rehearsing = rehearser(say.response(ORDER))

    def fail(text: str, role: Role) -> list[int]:
        raise RuntimeError("no model")

    working, rehearsing.policy = rehearsing.policy, ScriptedPolicy(rehearsing.form, fail)
    with pytest.raises(RuntimeError):
        await ask(await rehearsing.environment(), call())
    rehearsing.policy = working
    exchange, _ = await ask(await rehearsing.environment(), call())
    assert exchange.response == ORDER


# Groups, from end to end


async def collect(
    script: Any, acts: Any, responses: Any, worker: Worker, spec: EnvironmentSpec, scenario: Scenario, **setting: Any
) -> tuple[Group, Collector]:
    collector = Collector(script(acts, responses), worker, {"retail": spec}, Setting(**setting))
    [group] = await collector.groups([scenario], size=3, seed=(0,))
    return group, collector


async def test_a_group_lives_in_one_world_and_touches_nothing_real(
    worker: Worker, retail: EnvironmentSpec, cancel_task: Callable[..., Scenario], script: Any, say: Any
) -> None:
    acts = [say.call("get_order", **LOOKUP), say.call("cancel_order", **LOOKUP), say.reply("Done, refund 120.")]
    responses = [say.response(ORDER), *[say.response({"status": "cancelled"})] * 3]
    group, collector = await collect(script, acts, responses, worker, retail, cancel_task("shipped").public())
    assert [t.reward for t in group.trajectories] == [pytest.approx(1.0)] * 3
    assert sorted(t.exchanges[0].shared for t in group.trajectories) == [False, True, True]
    assert not any(t.exchanges[1].shared for t in group.trajectories)
    assert collector.shared_tokens == 2 * len(say.response(ORDER))
    assert worker.real_calls == 0


async def test_executing_a_public_scenario_is_refused(
    worker: Worker, retail: EnvironmentSpec, cancel_task: Callable[..., Scenario], script: Any, say: Any
) -> None:
    with pytest.raises(DataError, match="'cancel-pending' is public: its opening state is withheld"):
        await collect(
            script,
            [say.reply("Done.")],
            [],
            worker,
            retail,
            cancel_task().public(),
            answers="executable",
            reward="real",
        )
    assert worker.real_calls == 0


async def test_the_executable_environment_answers_from_the_real_state(
    worker: Worker, retail: EnvironmentSpec, cancel_task: Callable[..., Scenario], script: Any, say: Any
) -> None:
    acts = [say.call("get_order", **LOOKUP), say.call("cancel_order", **LOOKUP), say.reply("Done, refund 120.")]
    group, _ = await collect(
        script, acts, [], worker, retail, cancel_task("pending"), answers="executable", reward="real"
    )
    for made in group.trajectories:
        assert [e.response for e in made.exchanges] == [ORDER, {"status": "cancelled"}]
        assert (made.reward, made.feasible) == (1.0, True)
        # Real responses are given tokens: neither role sampled them, and nothing is learned from them.
        tools = [s for s in made.segments if s.author is Author.TOOL]
        assert all((s.role, s.learn, s.logprobs) == (None, Learn.NOTHING, None) for s in tools)
        assert "consistent" not in made.parts
    assert worker.real_calls == 6


# Invalid calls


@pytest.mark.parametrize(
    ("asked", "error"),
    [
        (call("get_orders"), "unknown_tool"),
        (call("get_order", order="#W111111"), "invalid_arguments"),
        (call("get_order", order_id="#W111111", please=True), "invalid_arguments"),
        (call("get_order", order_id=111111), "invalid_arguments"),
        (ToolCall(name="get_order", arguments={}), "invalid_arguments"),
    ],
)
async def test_an_invalid_call_is_answered_before_either_environment(
    worker: Worker,
    retail: EnvironmentSpec,
    cancel_task: Callable[..., Scenario],
    script: Any,
    say: Any,
    asked: ToolCall,
    error: str,
) -> None:
    # No rehearsed response is scripted, so asking for one would fail; and no real call may be made.
    acts = [say.call(asked.name, **asked.arguments), say.reply("Sorry.")]
    scenario = cancel_task()
    policy = script(acts)
    executable = ExecutableEnvironment(retail, scenario, worker=worker, policy=policy)
    rehearsed = await Rehearser(policy.format, retail, worker, []).environment()
    for environment in (executable, rehearsed):
        made = await rollout(
            policy, environment, scenario, new_prompt(policy, retail, scenario), limits=Limits(), temperature=1.0
        )
        assert made.stop is StopReason.REPLIED  # the episode went on
        [exchange] = made.exchanges
        assert exchange.response["error"] == error
        assert exchange.consistency is None  # it says nothing of the rehearser
        [answer] = [s for s in made.segments if s.author is Author.TOOL]
        assert (answer.role, answer.learn) == (None, Learn.NOTHING)
    assert worker.real_calls == 0


def new_prompt(policy: ScriptedPolicy, spec: EnvironmentSpec, scenario: Scenario) -> Transcript:
    return open_transcript(policy.format, spec, scenario, random=random_stream(0))


def test_a_valid_call_is_left_to_the_environment(retail: EnvironmentSpec) -> None:
    assert invalid_call(retail, call()) is None
    assert invalid_call(retail, call("get_order", order_id="nonsense")) is None  # that is the tool's to say
