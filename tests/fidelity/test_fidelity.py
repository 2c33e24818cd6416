"""Fidelity: scores by hand, probes from recorded episodes, and rehearsals after the true history."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from envace.envs import ExecutableEnvironment
from envace.fidelity import Comparison, Probe, fidelity_scores, measure, record_probes, replay
from envace.fidelity.compare import error_class, shape
from envace.models.policy import ScriptedPolicy
from envace.models.transcripts import open_transcript, random_stream
from envace.rollout import Limits, rollout
from envace.sandbox import Worker
from envace.scenarios import EnvironmentSpec, Scenario
from envace.types import Role, ToolCall

ORDER = {"order_id": "#W111111", "customer_id": "CU222222", "item": "lamp", "status": "pending", "total": 120}
LOOKUP = {"order_id": "#W111111"}
CANCELLED = {"status": "cancelled"}
SHIPPED = {"error": "already_shipped"}


def comparison(
    real: Any, rehearsed: Any, *, determined: bool = True, after_change: bool = False, readable: bool = True
) -> Comparison:
    probe = Probe(
        call=ToolCall(name="get_order", arguments=LOOKUP), real=real, determined=determined, after_change=after_change
    )
    return Comparison(probe=probe, rehearsed=rehearsed, readable=readable)


def test_scores_by_hand() -> None:
    found = fidelity_scores(
        [
            comparison(SHIPPED, SHIPPED),  # a real error, rehearsed as the same
            comparison(SHIPPED, CANCELLED),  # a real error, rehearsed as a success
            comparison(SHIPPED, {"error": "not_found"}, after_change=True),  # as another error
            comparison(CANCELLED, CANCELLED, after_change=True),
            comparison(CANCELLED, SHIPPED),  # a false alarm
            comparison(ORDER, {**ORDER, "total": 7}, determined=False),  # values that cannot be known
            comparison(ORDER, {"total": 7}, determined=False),
            comparison(CANCELLED, None, readable=False),
        ]
    )
    assert found["n"] == 8
    assert found["n_determined"] == 6
    # Determined: 1 and 4 have the right class; of 2, 3, 5 and the unreadable one none has.
    assert found["error_class"] == pytest.approx(2 / 6)
    assert found["error_recall"] == pytest.approx(1 / 3)
    # Three determined successes, one of them rehearsed as an error.
    assert found["false_alarms"] == pytest.approx(1 / 3)
    # Successes in both: 4, 6, 7 and the unreadable one; the keys agree in 4 and 6.
    assert found["keys"] == pytest.approx(2 / 4)
    assert found["values"] == pytest.approx(2 / 6)
    # After a change: 3 and 4.
    assert found["state"] == pytest.approx(1 / 2)


def test_scores_of_nothing_are_none_and_never_zero() -> None:
    found = fidelity_scores([])
    assert (found.pop("n"), found.pop("n_determined")) == (0, 0)
    assert set(found.values()) == {None}
    undetermined = fidelity_scores([comparison(ORDER, ORDER, determined=False)])
    assert undetermined["values"] is None
    assert undetermined["keys"] == 1.0


def test_the_truth_scores_perfectly() -> None:
    found = fidelity_scores(
        [comparison(real, real, after_change=True) for real in (SHIPPED, CANCELLED, ORDER, [ORDER])]
    )
    assert found["false_alarms"] == 0.0
    assert all(found[name] == 1.0 for name in ("error_class", "error_recall", "keys", "values", "state"))


@pytest.mark.parametrize(
    ("response", "found"),
    [
        ({"error": "x"}, "x"),
        ({"error": 3, "more": 1}, "3"),
        ({"success": False}, "unsuccessful"),
        ({"success": True}, None),
        ({}, None),
        ([], None),
        ("error", None),
        (None, None),
    ],
)
def test_error_class(response: Any, found: str | None) -> None:
    assert error_class(response) == found


def test_shape_is_keys_and_kind_not_values() -> None:
    assert shape({"b": 1, "a": 2}) == shape({"a": "x", "b": None}) == ["a", "b"]
    assert shape([{"a": 1}, {"b": 1}]) == ["list", ["a"]]
    assert shape([]) != shape({})
    assert shape(3) != shape("3")


def episode() -> list[dict[str, Any]]:
    return [
        {"name": "get_order", "arguments": LOOKUP, "response": ORDER},
        {"name": "cancel_order", "arguments": LOOKUP, "response": CANCELLED},
        {"name": "cancel_order", "arguments": LOOKUP, "response": {"error": "already_cancelled"}},
        {"name": "get_order", "arguments": LOOKUP, "response": {**ORDER, "status": "cancelled"}},
    ]


async def test_probes_know_what_follows_from_their_history(worker: Worker, retail: EnvironmentSpec) -> None:
    probes = await record_probes(worker, retail, episode())
    assert [probe.determined for probe in probes] == [False, True, True, True]
    # The first cancellation changes the state; the second is refused and changes nothing more.
    assert [probe.after_change for probe in probes] == [False, False, True, True]
    refused = await record_probes(worker, retail, [{**episode()[1], "response": SHIPPED}, episode()[0]])
    assert [probe.after_change for probe in refused] == [False, False]
    assert worker.real_calls == 0


async def test_each_probe_is_rehearsed_after_the_true_history(
    worker: Worker, retail: EnvironmentSpec, cancel_task: Callable[..., Scenario], form: Any, say: Any
) -> None:
    probes = await record_probes(worker, retail, episode())
    seen: list[str] = []

    def lie(text: str, role: Role) -> list[int]:
        assert role is Role.REHEARSE
        seen.append(text)
        return list(say.response(SHIPPED))

    found = await measure(ScriptedPolicy(form, lie), [(cancel_task(), retail, probes)], max_tokens=64)
    assert [c.rehearsed for c in found] == [SHIPPED] * 4
    assert all(text.endswith("<|tool|>") for text in seen)
    # However often it lies, it is asked again with the truth before it.
    assert [text.count("already_shipped") for text in seen] == [0] * 4
    assert [text.count("<|call|>") for text in seen] == [1, 2, 3, 4]
    assert [text.count('"status":"pending"') for text in seen] == [0, 1, 1, 1]
    assert worker.real_calls == 0


async def test_the_oracle_of_responses_has_perfect_fidelity(
    worker: Worker, retail: EnvironmentSpec, cancel_task: Callable[..., Scenario], form: Any, say: Any
) -> None:
    probes = await record_probes(worker, retail, episode())
    policy = ScriptedPolicy(form, lambda text, role: say.response(probes[text.count("<|call|>") - 1].real))
    found = fidelity_scores(await measure(policy, [(cancel_task(), retail, probes)], max_tokens=64))
    assert (found["values"], found["state"], found["error_recall"], found["false_alarms"]) == (1.0, 1.0, 1.0, 0.0)
    assert found["n"] == 4


@pytest.mark.parametrize("text", ["{not json", "", "[" * 5000])
async def test_a_response_that_cannot_be_read_counts_against_the_rehearser(
    worker: Worker, retail: EnvironmentSpec, cancel_task: Callable[..., Scenario], form: Any, text: str
) -> None:
    probes = await record_probes(worker, retail, episode())
    policy = ScriptedPolicy(form, lambda history, role: form.encode(form.answer(text)))
    found = await measure(policy, [(cancel_task(), retail, probes)], max_tokens=10_000)
    assert not any(c.readable for c in found)
    assert fidelity_scores(found)["values"] == 0.0


async def test_a_response_that_was_cut_cannot_be_read(
    worker: Worker, retail: EnvironmentSpec, cancel_task: Callable[..., Scenario], form: Any, say: Any
) -> None:
    probes = await record_probes(worker, retail, episode()[:1])
    policy = ScriptedPolicy(form, lambda history, role: say.response(ORDER))
    [found] = await measure(policy, [(cancel_task(), retail, probes)], max_tokens=3)
    assert not found.readable


async def test_replay_gives_the_real_responses_to_the_calls_of_a_trajectory(
    worker: Worker, retail: EnvironmentSpec, cancel_task: Callable[..., Scenario], script: Any, say: Any
) -> None:
    acts = [
        say.call("get_order", **LOOKUP),
        say.call("cancel_order", **LOOKUP),
        say.call("nonsense"),
        say.call("cancel_order", **LOOKUP),
        say.reply("Done."),
    ]
    policy, scenario = script(acts), cancel_task()
    prompt = open_transcript(policy.format, retail, scenario, random=random_stream(0))
    environment = ExecutableEnvironment(retail, scenario, worker=worker, policy=policy)
    limits = Limits(max_length=1000)
    made = await rollout(policy, environment, scenario, prompt, limits=limits, temperature=1.0)
    real = await replay(worker, retail, scenario, made)
    assert [answer.get("error") for answer in real] == [None, None, "unknown_tool", "already_cancelled"]
    assert real[:2] == [ORDER, CANCELLED]
    assert real == [exchange.response for exchange in made.exchanges]
