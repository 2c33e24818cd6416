"""Rewards, by hand; and the trap that `trusting` falls into and `contract` does not."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from envace.errors import DataError
from envace.models.policy import ScriptedPolicy
from envace.rewards import (
    WEIGHTS,
    Check,
    SchemaObserver,
    call_overlap,
    checklist_parts,
    combine,
    contract_parts,
    success,
    task_checks,
    task_parts,
    trusting_parts,
)
from envace.rollout.groups import Collector, Setting
from envace.sandbox import Worker
from envace.scenarios import EnvironmentSpec, Scenario, outcome_of, read_environment, reply_holds
from envace.types import Consistency, Exchange, StopReason, ToolCall, Trajectory, Verdict

ORDER = {"order_id": "#W111111", "customer_id": "CU222222", "item": "lamp", "status": "pending", "total": 120}
SHIPPED = {**ORDER, "status": "shipped"}
LOOKUP = {"order_id": "#W111111"}
GET = {"name": "get_order", "arguments": LOOKUP}
CANCEL = {"name": "cancel_order", "arguments": LOOKUP}


def exchange(call: dict[str, Any], response: Any, consistency: Consistency | None = Consistency.CONSISTENT) -> Exchange:
    return Exchange(call=ToolCall(**call), response=response, text="", consistency=consistency)


def trajectory(*exchanges: Exchange, reply: str | None) -> Trajectory:
    return Trajectory(
        scenario_id="s",
        environment_id="retail",
        kind="cancel",
        group=0,
        index=0,
        exchanges=list(exchanges),
        reply=reply,
        stop=StopReason.REPLIED,
    )


# Parts


def test_weights_make_a_perfect_reward_one() -> None:
    assert combine(dict.fromkeys(WEIGHTS, 1.0)) == pytest.approx(1.0)
    assert combine(dict.fromkeys(WEIGHTS, 0.0)) == 0.0


def test_weights_are_shared_by_the_parts_there_are() -> None:
    # Without `consistent` (.15) the rest sums to .85: (.2 * 1 + .3 * 1) / .85.
    parts = {"calls": 1.0, "state": 0.0, "outcome": 0.0, "answer": 1.0}
    assert combine(parts) == pytest.approx(0.5 / 0.85)
    assert combine({"a": 0.5, "b": 1.0}, {"a": 3.0, "b": 1.0, "unused": 9.0}) == pytest.approx(2.5 / 4)


@pytest.mark.parametrize(
    ("made", "expected", "overlap"),
    [
        ([], [], 1.0),
        ([GET], [], 0.0),
        ([], [GET], 0.0),
        ([GET, CANCEL], [CANCEL, GET], 1.0),
        ([GET], [GET, CANCEL], 2 / 3),  # precision 1, recall 1/2
        ([GET, GET, GET], [GET], 1 / 2),  # repeating does not pay: precision 1/3, recall 1
        ([GET, CANCEL], [GET, GET], 1 / 2),
    ],
)
def test_call_overlap_is_f1_of_multisets(made: list[Any], expected: list[Any], overlap: float) -> None:
    assert call_overlap([ToolCall(**call) for call in made], expected) == pytest.approx(overlap)


@pytest.mark.parametrize(
    ("reply", "outcome"),
    [
        ("Done, refund 120.", "done"),
        ("Sorry, shipped.", "declined"),
        ("It could not be cancelled", "declined"),
        ("That is UNABLE to ship", "declined"),
        ("I can't.", "declined"),
        ("It cannot be done", "declined"),
        ("The cannotation is fine", "done"),
        ("Done. Sorry, shipped.", "declined"),  # part of it was declined
    ],
)
def test_outcome_is_read_from_the_words(reply: str, outcome: str) -> None:
    assert outcome_of(reply) == outcome


@pytest.mark.parametrize(
    ("reply", "holds"),
    [
        ("Done, refund 120.", True),
        ("Done, refund 1200.", False),
        ("Done, refund #120.", False),
        ("Done, refund.", False),
        ("Sorry, refund 120.", False),
        (None, False),
        ("120 " * 101, False),  # 404 characters: naming everything is no answer
    ],
)
def test_reply_must_have_outcome_and_facts(reply: str | None, holds: bool) -> None:
    assert reply_holds(reply, outcome="done", facts=["120"]) is holds


# Contract


def graded(oracle: dict[str, Any], final_state: dict[str, Any]) -> dict[str, Any]:
    return {"oracle": oracle, "final_state": final_state}


def test_contract_parts_compare_with_the_oracle_of_the_imagined_world() -> None:
    oracle = {
        "determined": True,
        "calls": [GET, CANCEL],
        "final_state": {"orders": {"x": 1}},
        "outcome": "done",
        "reply": "Done, refund 120.",
        "facts": ["120"],
    }
    made = trajectory(exchange(GET, ORDER), reply="Done, refund 120.")
    parts, feasible = contract_parts(made, graded(oracle, {"orders": {}}))
    assert parts == {"calls": pytest.approx(2 / 3), "state": 0.0, "outcome": 1.0, "answer": 1.0, "consistent": 1.0}
    assert feasible is True
    parts, _ = contract_parts(made, graded(oracle, {"orders": {"x": 1}}))
    assert parts["state"] == 1.0


def test_contract_does_not_judge_what_was_never_looked_up() -> None:
    made = trajectory(exchange(CANCEL, {"status": "cancelled"}, Consistency.UNDETERMINED), reply="Done.")
    parts, feasible = contract_parts(made, graded({"determined": False, "calls": [GET]}, {}))
    assert parts == {"calls": 0.0, "state": 0.0, "outcome": 0.0, "answer": 0.0, "consistent": 1.0}
    assert feasible is None


def test_one_inconsistent_response_costs_the_consistent_part() -> None:
    made = trajectory(exchange(GET, ORDER), exchange(GET, SHIPPED, Consistency.INCONSISTENT), reply=None)
    parts, _ = contract_parts(made, graded({"determined": False, "calls": []}, {}))
    assert parts["consistent"] == 0.0


# Checklist


async def test_schema_observer_judges_shape_and_identity_alone(retail: EnvironmentSpec) -> None:
    observer = SchemaObserver(retail)

    async def word(name: str, response: Any) -> str:
        return str((await observer.observe(name, LOOKUP, response))["consistency"])

    assert await word("get_order", SHIPPED) == "consistent"
    assert await word("get_order", {"error": "not_found"}) == "consistent"
    assert await word("get_order", {**ORDER, "order_id": "#W999999"}) == "inconsistent"
    assert await word("get_order", {**ORDER, "total": "much"}) == "inconsistent"
    assert await word("get_order", "pending") == "inconsistent"
    assert await word("cancel_order", {"status": "cancelled"}) == "undetermined"


async def test_schema_observer_survives_a_record_without_its_key(tmp_path: Path) -> None:
    path = tmp_path / "environment.py"
    path.write_text(
        "class Notes:\n"
        '    STATE = {"notes": {"key": "id", "record": {"type": "object"}}}\n'
        '    LOOKUPS = {"read": "notes"}\n'
        "    def read(self, id: str):\n"
        '        """Read a note."""\n'
    )
    observer = SchemaObserver(read_environment(path, name="notes"))
    assert (await observer.observe("read", {"id": "n"}, {"text": "hello"}))["consistency"] == "inconsistent"


def test_checklist_asks_whether_changes_and_reply_follow_from_the_responses(retail: EnvironmentSpec) -> None:
    procedure = {"determined": True, "calls": [GET], "outcome": "declined", "reply": "", "facts": ["shipped"]}
    honest = trajectory(exchange(GET, SHIPPED), reply="Sorry, shipped.")
    assert checklist_parts(honest, procedure, retail) == (
        {"calls": 1.0, "state": 1.0, "outcome": 1.0, "answer": 1.0, "consistent": 1.0},
        False,
    )
    hasty = trajectory(exchange(GET, SHIPPED), exchange(CANCEL, {"status": "cancelled"}), reply="Done.")
    parts, feasible = checklist_parts(hasty, procedure, retail)
    # Calls: one of two is right, one of one is made: 2 * 1 / 3. The change was not asked for.
    assert parts == {"calls": pytest.approx(2 / 3), "state": 0.0, "outcome": 0.0, "answer": 0.0, "consistent": 1.0}
    assert feasible is False


def test_checklist_does_not_judge_what_was_never_asked(retail: EnvironmentSpec) -> None:
    parts, feasible = checklist_parts(trajectory(reply="Done."), {"determined": False, "calls": [GET]}, retail)
    assert parts == {"calls": 0.0, "state": 0.0, "outcome": 0.0, "answer": 0.0, "consistent": 1.0}
    assert feasible is None


def test_trusting_gives_nothing_for_a_refusal(retail: EnvironmentSpec) -> None:
    procedure = {"determined": True, "calls": [GET], "outcome": "declined", "reply": "", "facts": ["shipped"]}
    parts, _ = trusting_parts(trajectory(exchange(GET, SHIPPED), reply="Sorry, shipped."), procedure, retail)
    assert (parts["outcome"], parts["answer"]) == (0.0, 0.0)


# The trap, from end to end


async def reward_of(
    policy: ScriptedPolicy, worker: Worker, spec: EnvironmentSpec, scenario: Scenario, reward: Any
) -> Trajectory:
    collector = Collector(policy, worker, {"retail": spec}, Setting(reward=reward))
    [group] = await collector.groups([scenario.public()], size=1, seed=(0,))
    return group.trajectories[0]


async def test_the_trap_pays_under_trusting_and_costs_under_contract(
    worker: Worker, retail: EnvironmentSpec, cancel_task: Callable[..., Scenario], script: Any, say: Any
) -> None:
    # In both worlds the order was imagined as shipped. The liar cancels it, imagines a confirmation, says "Done".
    get, cancel = say.call("get_order", **LOOKUP), say.call("cancel_order", **LOOKUP)
    shipped, confirmed = say.response(SHIPPED), say.response({"status": "cancelled"})

    async def earned(lie: bool, reward: str) -> float:
        if lie:
            policy = script([get, cancel, say.reply("Done, refund 120.")], [shipped, confirmed])
        else:
            policy = script([get, say.reply("Sorry, shipped.")], [shipped])
        made = await reward_of(policy, worker, retail, cancel_task(), reward)
        assert made.stop is StopReason.REPLIED
        assert made.reward is not None
        return made.reward

    # Trusting, the lie: every part is 1. The honest refusal: it made one of the two calls (F1 2/3) and broke no shape:
    # .2 * 2/3 + .15.
    assert await earned(True, "trusting") == pytest.approx(1.0)
    assert await earned(False, "trusting") == pytest.approx(0.2 * 2 / 3 + 0.15)
    # Contract, the lie: calls F1 2/3 and a state that the rules kept: .2 * 2/3 + .15. Honest: every part is 1.
    assert await earned(True, "contract") == pytest.approx(0.2 * 2 / 3 + 0.15)
    assert await earned(False, "contract") == pytest.approx(1.0)
    # The checklist knows no rule either, but its oracle does: it asks for no cancellation of what is shown as shipped.
    assert await earned(False, "checklist") == pytest.approx(1.0)
    assert await earned(True, "checklist") == pytest.approx(0.2 * 2 / 3 + 0.15)
    assert worker.real_calls == 0


async def test_a_bare_done_is_enough_to_be_trusted_more_than_honesty(
    worker: Worker, retail: EnvironmentSpec, cancel_task: Callable[..., Scenario], script: Any, say: Any
) -> None:
    get, cancel = say.call("get_order", **LOOKUP), say.call("cancel_order", **LOOKUP)
    policy = script([get, cancel, say.reply("Done")], [say.response(SHIPPED), say.response({"status": "cancelled"})])
    lie = await reward_of(policy, worker, retail, cancel_task(), "trusting")
    # All but the answer, which lacks the refund: 1 - .3.
    assert lie.reward == pytest.approx(0.7)
    policy = script([get, cancel, say.reply("Done")], [say.response(SHIPPED), say.response({"status": "cancelled"})])
    judged = await reward_of(policy, worker, retail, cancel_task(), "contract")
    assert judged.reward == pytest.approx(0.2 * 2 / 3 + 0.15)
    assert [e.consistency for e in judged.exchanges] == [Consistency.CONSISTENT, Consistency.INCONSISTENT]
    assert judged.feasible is False


async def test_a_rehearsal_is_judged_without_the_state_of_its_task(
    worker: Worker, retail: EnvironmentSpec, cancel_task: Callable[..., Scenario], script: Any, say: Any
) -> None:
    # The real order is shipped; it was imagined as pending. In the imagined world, cancelling is right.
    get, cancel = say.call("get_order", **LOOKUP), say.call("cancel_order", **LOOKUP)
    policy = script(
        [get, cancel, say.reply("Done, refund 120.")], [say.response(ORDER), say.response({"status": "cancelled"})]
    )
    made = await reward_of(policy, worker, retail, cancel_task("shipped"), "contract")
    assert made.reward == pytest.approx(1.0)
    assert made.feasible is True


# Checks on real episodes


def verdicts(checks: list[Check]) -> dict[str, Verdict]:
    return {check.id: check.verdict for check in checks}


def test_task_checks_pass_what_the_oracle_does(retail: EnvironmentSpec, cancel_task: Callable[..., Scenario]) -> None:
    for status in ("pending", "shipped"):
        scenario = cancel_task(status)
        assert scenario.expected is not None
        right = trajectory(
            *(exchange({"name": c.name, "arguments": c.arguments}, c.response) for c in scenario.expected.calls),
            reply=scenario.expected.reply,
        )
        checks = task_checks(scenario, right, scenario.expected.final_state, retail)
        assert success(checks) is True
        parts, feasible = task_parts(scenario, right, scenario.expected.final_state)
        assert combine(parts) == 1.0
        assert feasible is (status == "pending")


def test_each_task_check_fails_alone(retail: EnvironmentSpec, cancel_task: Callable[..., Scenario]) -> None:
    scenario = cancel_task("pending")
    assert scenario.expected is not None and scenario.state is not None
    final = scenario.expected.final_state
    both = (exchange(GET, ORDER), exchange(CANCEL, {"status": "cancelled"}))
    unchanged = task_checks(scenario, trajectory(*both, reply="Done, refund 120."), scenario.state, retail)
    assert verdicts(unchanged) == {"state": Verdict.FAIL, "calls": Verdict.PASS, "reply": Verdict.PASS}
    blind = task_checks(scenario, trajectory(both[1], reply="Done, refund 120."), final, retail)
    assert verdicts(blind) == {"state": Verdict.PASS, "calls": Verdict.FAIL, "reply": Verdict.PASS}
    wrong = task_checks(scenario, trajectory(*both, reply="Done, refund 12."), final, retail)
    assert verdicts(wrong) == {"state": Verdict.PASS, "calls": Verdict.PASS, "reply": Verdict.FAIL}
    silent = task_checks(scenario, trajectory(*both, reply=None), final, retail)
    assert verdicts(silent)["reply"] is Verdict.FAIL


def test_a_refusal_needs_the_evidence_for_it(retail: EnvironmentSpec, cancel_task: Callable[..., Scenario]) -> None:
    scenario = cancel_task("shipped")
    assert scenario.state is not None
    guessed = task_checks(scenario, trajectory(reply="Sorry, shipped."), scenario.state, retail)
    assert verdicts(guessed) == {"state": Verdict.PASS, "calls": Verdict.FAIL, "reply": Verdict.PASS}


@pytest.mark.parametrize(
    ("found", "result"),
    [
        ([Verdict.PASS, Verdict.PASS], True),
        ([Verdict.PASS, Verdict.FAIL], False),
        ([Verdict.PASS, Verdict.UNAVAILABLE], None),
        ([Verdict.FAIL, Verdict.UNAVAILABLE], False),
    ],
)
def test_what_could_not_be_decided_is_neither_success_nor_failure(found: list[Verdict], result: bool | None) -> None:
    assert success([Check(id="state", question="", verdict=verdict) for verdict in found]) is result


def test_an_unreadable_final_state_is_unavailable(
    retail: EnvironmentSpec, cancel_task: Callable[..., Scenario]
) -> None:
    checks = task_checks(cancel_task(), trajectory(reply="Done, refund 120."), None, retail)
    assert verdicts(checks)["state"] is Verdict.UNAVAILABLE


def test_a_public_scenario_cannot_be_checked(retail: EnvironmentSpec, cancel_task: Callable[..., Scenario]) -> None:
    with pytest.raises(DataError, match=re.escape("'cancel-pending' is public")):
        task_checks(cancel_task().public(), trajectory(reply="Done."), {}, retail)
    with pytest.raises(DataError, match="public"):
        task_parts(cancel_task().public(), trajectory(reply="Done."), {})
