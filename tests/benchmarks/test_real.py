"""Evaluation in the executable environment: intervals, verdicts, and the floors that say what a number is worth."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envace.benchmarks import evaluate_policy, summarise, wilson
from envace.benchmarks.real import Attempt
from envace.models.formats import ASSISTANT
from envace.models.policy import ScriptedPolicy
from envace.rewards import Check
from envace.rollout import Limits
from envace.sandbox import Worker
from envace.scenarios import EnvironmentSpec, Expected, Scenario, read_environment
from envace.types import Author, Message, Role, StopReason, ToolCall, Trajectory, Verdict

LIMITS = Limits(max_length=2000, max_step_tokens=400, max_steps=20)


@pytest.mark.parametrize(
    ("successes", "n", "low", "high"),
    [
        (8, 10, 0.490, 0.943),
        (0, 10, 0.000, 0.278),
        (10, 10, 0.722, 1.000),
        (1, 29, 0.006, 0.172),
        (81, 263, 0.255, 0.366),
        (0, 0, 0.0, 1.0),
    ],
)
def test_wilson_against_known_values(successes: int, n: int, low: float, high: float) -> None:
    # R. G. Newcombe, Statistics in Medicine 17 (1998), table I, method 3, for 81/263 and 1/29.
    assert wilson(successes, n) == pytest.approx((low, high), abs=6e-4)


def test_wilson_at_another_confidence() -> None:
    # z = 1.6449: (.8 + .13528 +- 1.6449 sqrt(.016 + .0067640)) / 1.27055
    assert wilson(8, 10, confidence=0.9) == pytest.approx((0.5408, 0.9315), abs=1e-3)


@given(st.integers(1, 500).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilson_holds_the_share_and_is_symmetric(pair: tuple[int, int]) -> None:
    successes, n = pair
    low, high = wilson(successes, n)
    assert 0 <= low <= successes / n + 1e-12
    assert successes / n - 1e-12 <= high <= 1
    mirrored = wilson(n - successes, n)
    assert (1 - mirrored[1], 1 - mirrored[0]) == pytest.approx((low, high))


# Floors and ceilings on real scenarios


async def evaluated(
    domain: str, starter_episodes: Callable[..., Any], form: Any, say: Callable[[Scenario, int], list[int]]
) -> list[Attempt]:
    """Evaluate a script that knows the scenario (by its instruction) and the number of the acting step."""
    worker, spec, scenarios = await starter_episodes(domain, 40)
    known = {scenario.instruction: scenario for scenario in scenarios}

    def act(text: str, role: Role) -> list[int]:
        instruction = text.split("<|user|>")[1].split("<|end|>")[0]
        return say(known[instruction], text.count(ASSISTANT) - 1)

    policy = ScriptedPolicy(form, act)
    found = await evaluate_policy(policy, scenarios, {domain: spec}, worker, limits=LIMITS, temperature=0.0)
    return found.attempts


@pytest.mark.parametrize("domain", ["retail", "flights", "bank", "calendar"])
async def test_the_oracle_solves_everything(domain: str, starter_episodes: Any, form: Any) -> None:
    def gold(scenario: Scenario, step: int) -> list[int]:
        assert scenario.expected is not None
        calls = scenario.expected.calls
        if step < len(calls):
            return form.written(
                Message(
                    author=Author.ASSISTANT, calls=(ToolCall(name=calls[step].name, arguments=calls[step].arguments),)
                )
            )
        return form.written(Message(author=Author.ASSISTANT, content=scenario.expected.reply))

    attempts = await evaluated(domain, starter_episodes, form, gold)
    assert [a.success for a in attempts] == [True] * 40
    summary = summarise(attempts)
    assert (summary["success"], summary["n"], summary["undecided"]) == (1.0, 40, 0)
    assert summary["stops"] == {"replied": 40}


@pytest.mark.parametrize("reply", ["Done.", "Sorry, I cannot do that."])
@pytest.mark.parametrize("domain", ["retail", "flights", "bank", "calendar"])
async def test_doing_nothing_solves_nothing(domain: str, reply: str, starter_episodes: Any, form: Any) -> None:
    attempts = await evaluated(
        domain,
        starter_episodes,
        form,
        lambda scenario, step: form.written(Message(author=Author.ASSISTANT, content=reply)),
    )
    assert {a.scenario.feasible for a in attempts} == {True, False}
    summary = summarise(attempts)
    assert (summary["do"], summary["decline"], summary["undecided"]) == (0.0, 0.0, 0)


async def test_guessing_the_right_reply_solves_no_task(starter_episodes: Any, form: Any) -> None:
    # Without its calls, even the oracle's own words are worth nothing: there is no evidence for them.
    def guess(scenario: Scenario, step: int) -> list[int]:
        assert scenario.expected is not None
        return form.written(Message(author=Author.ASSISTANT, content=scenario.expected.reply))

    attempts = await evaluated("retail", starter_episodes, form, guess)
    assert summarise([a for a in attempts if a.scenario.feasible])["do"] == 0.0


# What could not be decided


def attempt(
    verdicts: list[Verdict], *, kind: str = "cancel", environment: str = "retail", feasible: bool = True
) -> Attempt:
    expected = Expected(outcome="done" if feasible else "declined", reply="", final_state={})
    scenario = Scenario(id="s", environment=environment, kind=kind, instruction="", expected=expected)
    trajectory = Trajectory(scenario_id="s", environment_id=environment, kind=kind, group=0, index=0)
    trajectory.stop = StopReason.REPLIED
    checks = [Check(id="state", question="", verdict=verdict) for verdict in verdicts]
    return Attempt(scenario=scenario, trajectory=trajectory, checks=checks)


WIN, LOSS, OPEN = [Verdict.PASS], [Verdict.FAIL], [Verdict.UNAVAILABLE]


def test_an_undecided_attempt_is_neither_success_nor_failure() -> None:
    # 2 of 3 decided; with the undecided as a failure it would be 2 of 5.
    summary = summarise([attempt(v) for v in (WIN, WIN, LOSS, OPEN, OPEN)])
    assert summary["success"] == pytest.approx(2 / 3)
    assert (summary["n"], summary["undecided"]) == (3, 2)
    assert summary["ci"] == [round(bound, 4) for bound in wilson(2, 3)]


def test_shares_by_feasibility_environment_and_kind() -> None:
    summary = summarise(
        [
            attempt(WIN),
            attempt(LOSS, kind="swap"),
            attempt(WIN, environment="bank", feasible=False),
            attempt(LOSS, environment="bank", feasible=False),
            attempt(LOSS, environment="bank", feasible=False),
        ]
    )
    assert (summary["do"], summary["decline"]) == (pytest.approx(1 / 2), pytest.approx(1 / 3))
    assert summary["by_domain"]["bank"]["success"] == pytest.approx(1 / 3)
    assert summary["by_kind"]["swap"] == {"success": 0.0, "n": 1, "ci": [0.0, pytest.approx(0.7935, abs=1e-4)]}


def test_nothing_decided_is_none_not_zero() -> None:
    for attempts in ([], [attempt(OPEN)]):
        summary = summarise(attempts)
        assert (summary["success"], summary["do"], summary["decline"]) == (None, None, None)
        assert summary["ci"] == [0.0, 1.0]


async def test_an_environment_that_hangs_is_nobodys_failure(tmp_path: Path, form: Any, say: Any) -> None:
    path = tmp_path / "environment.py"
    path.write_text(
        'class Hanging:\n    def loop(self):\n        """Never end."""\n        while True:\n            pass\n'
    )
    spec: EnvironmentSpec = read_environment(path, name="hanging")
    expected = Expected(outcome="done", reply="Done.", final_state={})
    scenarios = [
        Scenario(id="a", environment="hanging", instruction="loop", state={}, expected=expected),
        Scenario(id="b", environment="hanging", instruction="wait", state={}, expected=expected),
    ]
    policy = ScriptedPolicy(
        form, lambda text, role: say.call("loop") if "loop<|end|><|a" in text else say.reply("Done.")
    )
    async with Worker([spec.definition()], seconds=0.4) as worker:
        found = await evaluate_policy(policy, scenarios, {"hanging": spec}, worker, limits=LIMITS, temperature=0.0)
    hung, fine = found.attempts
    assert {check.verdict for check in hung.checks} == {Verdict.UNAVAILABLE}
    assert (hung.success, fine.success) == (None, True)
    summary = summarise(found.attempts)
    assert (summary["success"], summary["n"], summary["undecided"]) == (1.0, 1, 1)
    assert summary["stops"] == {"infrastructure": 1, "replied": 1}


async def test_a_scenario_of_several_turns_is_tried_to_its_last(starter_episodes: Any, form: Any) -> None:
    worker, spec, [scenario, *_] = await starter_episodes("retail", 1)
    talked = scenario.model_copy(update={"turns": ("and now?", "really?")})
    said = Message(author=Author.ASSISTANT, content="Well.")
    policy = ScriptedPolicy(form, lambda text, role: form.written(said))
    found = await evaluate_policy(policy, [talked], {"retail": spec}, worker, limits=LIMITS, temperature=0.0)
    [attempt] = found.attempts
    assert [m.content for m in attempt.trajectory.messages] == ["Well.", "and now?", "Well.", "really?", "Well."]
