"""Demonstrations and the supervised warm-up: both roles are learned, prompts and headers are not."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from support.families import tokenizer

from envace.errors import TrainingError
from envace.models.chat import ChatFormat
from envace.models.formats import StarterFormat
from envace.models.transcripts import random_stream
from envace.sandbox import Worker
from envace.scenarios import EnvironmentSpec, Scenario, opening
from envace.training.arms import ACT
from envace.training.demonstrations import (
    Style,
    SupervisedRow,
    demonstrate,
    supervised_rows,
    under_fresh_ids,
)
from envace.training.demonstrations import demonstrated as said_in
from envace.training.recipe import LossSection
from envace.training.sft import MuonAdam, batches, held_out_loss, imitate, schedule, sft_step, supervised_loss
from envace.types import Author, Message, ToolCall

LOOKUP = {"order_id": "#W111111"}


async def demonstrated(worker: Worker, task: Scenario, *, carelessness: float = 0.0, seed: int = 0) -> dict[str, Any]:
    item = {"state": task.state, "goal": task.goal}
    [found] = await demonstrate(worker, "retail", [item], carelessness=carelessness, seed=seed)
    return found


async def test_a_careful_demonstration_is_the_expected_ending(
    worker: Worker, cancel_task: Callable[..., Scenario]
) -> None:
    for status in ("pending", "shipped"):
        task = cancel_task(status)
        found = await demonstrated(worker, task)
        assert task.expected is not None
        assert found["calls"] == [call.model_dump() for call in task.expected.calls]
        assert (found["outcome"], found["reply"]) == (task.expected.outcome, task.expected.reply)
        assert tuple(found["facts"]) == task.expected.facts
        assert found["final_state"] == task.expected.final_state


async def test_careless_demonstrations_differ_by_seed_and_repeat_by_seed(
    worker: Worker, cancel_task: Callable[..., Scenario]
) -> None:
    task = cancel_task("shipped")
    found = [await demonstrated(worker, task, carelessness=0.6, seed=seed) for seed in range(8)]
    again = [await demonstrated(worker, task, carelessness=0.6, seed=seed) for seed in range(8)]
    assert found == again
    assert len({str(one) for one in found}) > 2


async def test_both_roles_are_learned_and_nothing_else(
    worker: Worker, retail: EnvironmentSpec, cancel_task: Callable[..., Scenario], form: StarterFormat
) -> None:
    task = cancel_task()
    [row] = supervised_rows(form, retail, task, said_in(await demonstrated(worker, task)), Style())
    learned, given = form.decode(row.ids[row.learn].tolist()), form.decode(row.ids[~row.learn].tolist())
    assert learned == (
        '<|call|>get_order {"order_id":"#W111111"}<|end|>'
        '{"order_id":"#W111111","customer_id":"CU222222","item":"lamp","status":"pending","total":120}<|end|>'
        '<|call|>cancel_order {"order_id":"#W111111"}<|end|>{"status":"cancelled"}<|end|>Done, refund 120.<|end|>'
    )
    assert given == form.decode(form.open(retail.tools, opening(retail, task))) + 2 * "<|tool|><|assistant|>"


THOUGHT = [
    Message(author=Author.ASSISTANT, calls=(ToolCall(name="get_order", arguments=LOOKUP),), reasoning="I look."),
    Message(author=Author.TOOL, content='{"status":"pending"}', name="get_order"),
    Message(author=Author.ASSISTANT, content="It is pending.", reasoning="I know."),
    Message(author=Author.USER, content="and now?"),
    Message(author=Author.ASSISTANT, content="Still pending.", reasoning="I wait."),
]
"""A recorded conversation of two turns, with reasoning."""


def learned(form: ChatFormat, rows: list[SupervisedRow]) -> list[str]:
    return [form.decode(row.ids[row.learn].tolist()) for row in rows]


@pytest.fixture
def taught(retail: EnvironmentSpec, cancel_task: Callable[..., Scenario]) -> Callable[..., Any]:
    """Rows of that conversation, for a family whose template drops earlier reasoning."""
    form = ChatFormat(tokenizer("qwen3"))

    def rows(**style: Any) -> tuple[ChatFormat, list[SupervisedRow]]:
        return form, supervised_rows(form, retail, cancel_task(), THOUGHT, Style(**style))

    return rows


def test_a_round_is_a_row_of_which_the_last_step_is_learned(taught: Callable[..., Any]) -> None:
    form, rows = taught(rows="round", roles=ACT)
    first, second, third = learned(form, rows)
    assert first.startswith("<think>\nI look.") and "get_order" in first
    assert second == "<think>\nI know.\n</think>\n\nIt is pending.<|im_end|>"
    assert third == "<think>\nI wait.\n</think>\n\nStill pending.<|im_end|>"
    # What stands before the last step is what the template shows: reasoning of an earlier turn is gone.
    assert "I look." in form.decode(rows[1].ids.tolist())
    assert "I look." not in form.decode(rows[2].ids.tolist())


def test_a_conversation_is_one_row_that_keeps_what_was_thought(taught: Callable[..., Any]) -> None:
    form, [row] = taught(roles=ACT)
    text = form.decode(row.ids.tolist())
    assert all(thought in text for thought in ("I look.", "I know.", "I wait."))
    assert learned(form, [row])[0].count("<|im_end|>") == 3
    assert '{"status":"pending"}' not in learned(form, [row])[0]
    form, [both] = taught()
    assert '{"status":"pending"}' in learned(form, [both])[0]
    assert form.decode(both.ids.tolist()) == text


def test_recorded_reasoning_can_be_left_out(taught: Callable[..., Any]) -> None:
    for style in ({"rows": "round", "roles": ACT}, {}):
        form, rows = taught(thinking="strip", **style)
        for row in rows:
            text = form.decode(row.ids.tolist())
            assert not any(thought in text for thought in ("I look.", "I know.", "I wait."))


def test_in_layout_prompted_a_response_is_learned_after_its_own_prompt(taught: Callable[..., Any]) -> None:
    form, [conversation, response] = taught(layout="prompted")
    assert '{"status":"pending"}' not in learned(form, [conversation])[0]
    assert learned(form, [response])[0].endswith(
        '<execution_result>\n{"status":"pending"}\n</execution_result><|im_end|>'
    )
    text = form.decode(response.ids.tolist())
    assert "You play the tools" in text and "I look." not in text
    assert '"arguments":{"order_id":"#W111111"}' in text


def row(ids: list[int], learn: list[int]) -> SupervisedRow:
    mask = np.zeros(len(ids), dtype=np.bool_)
    mask[learn] = True
    return SupervisedRow(ids=np.array(ids), learn=mask)


def test_the_loss_is_the_mean_over_learned_tokens_of_all_rows(new_tiny: Any) -> None:
    model = new_tiny()
    rows = [row([5, 6, 7, 8, 9], [2, 4]), row([10, 11, 12], [1])]
    with torch.no_grad():
        total = 0.0
        for one in rows:
            log_TV = torch.log_softmax(model(torch.from_numpy(one.ids)[None]).logits[0], -1)
            total -= sum(float(log_TV[t - 1, one.ids[t]]) for t in np.flatnonzero(one.learn))
        assert float(supervised_loss(model, rows, 0)) == pytest.approx(total / 3, abs=1e-4)


def test_a_few_steps_learn_a_row_and_a_resumed_optimizer_goes_on_alike(new_tiny: Any) -> None:
    rows = [row([5, 6, 7, 8, 9], [1, 2, 3, 4])]

    def trained(model: Any, optimizer: MuonAdam, steps: range) -> list[float]:
        return [sft_step(model, optimizer, rows, step=s, steps=8, pad_id=0)["loss"] for s in steps]

    whole = new_tiny()
    losses = trained(whole, MuonAdam(whole, matrix_lr=0.02, lr=0.02), range(8))
    assert losses[-1] < losses[0] / 2
    parted = new_tiny()
    first = MuonAdam(parted, matrix_lr=0.02, lr=0.02)
    before = trained(parted, first, range(4))
    second = MuonAdam(parted, matrix_lr=0.02, lr=0.02)
    second.load_state_dict(first.state_dict())
    assert before + trained(parted, second, range(4, 8)) == pytest.approx(losses, abs=1e-5)


def test_a_loss_that_is_not_finite_takes_no_step(new_tiny: Any) -> None:
    model = new_tiny()
    with torch.no_grad():
        model.model.norm.weight[0] = float("nan")
    before = model.model.embed_tokens.weight.clone()
    with pytest.raises(TrainingError, match=r"step 3 .*lower sft\.lr"):
        sft_step(model, MuonAdam(model, matrix_lr=0.1, lr=0.1), [row([5, 6], [1])], step=3, steps=8, pad_id=0)
    assert torch.equal(model.model.embed_tokens.weight, before)


def test_the_schedule_warms_up_and_ends_at_a_tenth() -> None:
    rates = [schedule(step, 100) for step in range(100)]
    assert rates[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert max(rates) == 1.0
    assert rates[-1] == pytest.approx(0.1, abs=0.01)
    assert all(0 < rate <= 1 for rate in rates)
    assert 0 < schedule(0, 1) <= 1


def test_every_row_comes_once_before_any_comes_again() -> None:
    rows = [row([number] * (2 + number % 5), [1]) for number in range(50)]
    drawn = list(batches(rows, size=8, steps=14, seed=0))  # 50 rows are 7 batches
    numbers = [[int(one.ids[0]) for one in batch] for batch in drawn]
    assert sorted(n for batch in numbers[:7] for n in batch) == list(range(50))
    assert sorted(n for batch in numbers[7:] for n in batch) == list(range(50))
    assert numbers[:7] != numbers[7:]
    again = [[int(one.ids[0]) for one in batch] for batch in batches(rows, size=8, steps=14, seed=0)]
    assert again == numbers


def gym_like(**changes: Any) -> Scenario:
    values: dict[str, Any] = {
        "id": "s", "environment": "gym",
        "instruction": "Book MB123456 and MB12345678, not XMB123456, on 2026-10-05, for 120.",
        "goal": {"member": "MB123456", "guests": ["MB999999"], "day": "2026-10-05", "price": 120},
        "state": {"members": {"MB123456": {"member_id": "MB123456", "friend": "MB654321"}, "MB654321": {}},
                  "days": {"2026-10-05": {"open": True}}},
    }  # fmt: skip
    return Scenario(**{**values, **changes})


def test_fresh_ids_change_an_id_alike_wherever_it_stands_and_nothing_else() -> None:
    before = gym_like()
    after = under_fresh_ids(before, random_stream(0))
    assert after.state is not None
    new, friend = after.goal["member"], after.state["members"][after.goal["member"]]["friend"]
    assert re.fullmatch("MB[1-9][0-9]{5}", new)
    assert new not in ("MB123456", "MB654321", "MB999999", friend)
    assert after.instruction == before.instruction.replace("Book MB123456 ", f"Book {new} ")
    assert list(after.state["members"]) == [new, friend]
    assert after.state["members"][new]["member_id"] == new
    # An id of no record is still one; dates and numbers are no ids.
    assert after.goal["guests"] != before.goal["guests"]
    assert after.goal["guests"][0] not in after.state["members"]
    assert (after.goal["day"], after.goal["price"], list(after.state["days"])) == ("2026-10-05", 120, ["2026-10-05"])


def test_fresh_ids_depend_on_the_stream_alone() -> None:
    drawn = [under_fresh_ids(gym_like(), random_stream(seed)).goal["member"] for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]


def test_every_digit_may_be_drawn_but_a_leading_zero() -> None:
    # An id without zeros must not teach that there are none: "074" would then never have been copied.
    drawn = [under_fresh_ids(gym_like(), random_stream(seed)).goal["member"][2:] for seed in range(200)]
    assert {letter for name in drawn for letter in name[1:]} == set("0123456789")
    assert {name[0] for name in drawn} == set("123456789")


def test_a_scenario_without_ids_stays() -> None:
    plain = gym_like(state={"days": {"2026-10-05": {}}}, goal={})
    assert under_fresh_ids(plain, random_stream(0)) is plain


async def test_a_demonstration_under_fresh_ids_is_the_same_one_renamed(
    worker: Worker, cancel_task: Callable[..., Scenario]
) -> None:
    task = cancel_task("shipped")
    renamed = under_fresh_ids(task, random_stream(3))
    before, after = await demonstrated(worker, task), await demonstrated(worker, renamed)
    assert [call["name"] for call in after["calls"]] == [call["name"] for call in before["calls"]]
    assert (after["outcome"], after["reply"]) == (before["outcome"], before["reply"])
    assert after["calls"][0]["arguments"] != before["calls"][0]["arguments"]


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(("max_batch_tokens", "logit_chunk"), [(2048, 256), (5, 1), (10, 2)])
def test_imitation_does_not_depend_on_how_rows_and_logits_are_cut(
    new_tiny: Any, max_batch_tokens: int, logit_chunk: int, recompute: bool
) -> None:
    rows = [row([5, 6, 7, 8, 9], [2, 4]), row([10, 11, 12], [1]), row([7, 8], [])]
    plain, cut = new_tiny(), new_tiny()
    loss = supervised_loss(plain, rows, 0)
    loss.backward()
    settings = LossSection(
        max_batch_tokens=max_batch_tokens, logit_chunk=logit_chunk, recompute=recompute, max_grad_norm=1e9
    )
    found = imitate(cut, torch.optim.SGD(cut.parameters(), lr=0.0), rows, settings=settings, pad_id=0)
    assert found["loss"] == pytest.approx(loss.item(), abs=1e-5)
    assert (found["learned_tokens"], found["trained_tokens"]) == (3, 10)
    for one, other in zip(plain.parameters(), cut.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, atol=1e-6, rtol=1e-4)
    assert held_out_loss(plain, rows, settings=settings, pad_id=0) == pytest.approx(loss.item(), abs=1e-5)


def test_nothing_to_imitate_is_an_error(new_tiny: Any) -> None:
    model = new_tiny()
    with pytest.raises(TrainingError, match="No token"):
        imitate(model, torch.optim.SGD(model.parameters(), lr=0.1), [row([5, 6], [])], settings=LossSection(), pad_id=0)


def test_a_response_is_learned_after_the_call_that_it_answers_whatever_the_order(
    retail: EnvironmentSpec, cancel_task: Callable[..., Scenario]
) -> None:
    form = ChatFormat(tokenizer("qwen3"))
    names = ("#W111111", "#W222222")
    calls = tuple(ToolCall(name="get_order", arguments={"order_id": name}, id=name) for name in names)
    said = [
        Message(author=Author.ASSISTANT, calls=calls),
        Message(author=Author.TOOL, content='{"of":2}', call_id="#W222222"),
        Message(author=Author.TOOL, content='{"of":1}', call_id="#W111111"),
    ]
    rows = supervised_rows(form, retail, cancel_task(), said, Style(layout="prompted"))
    for row in rows[1:]:
        asked = form.decode(row.ids[~row.learn].tolist()).split("The call to answer: ")[1]
        number = 1 if "#W111111" in asked else 2
        assert f'{{"of":{number}}}' in form.decode(row.ids[row.learn].tolist())
