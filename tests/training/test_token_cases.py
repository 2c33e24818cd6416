"""Tokens from sampling to the loss, on chat families: cases T1, T2, T6, T7, T8 and T10 of the field."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.families import FAMILIES, tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from envace.errors import TrainingError
from envace.models.chat import ChatFormat
from envace.models.local import LocalPolicy
from envace.models.transcripts import Transcript, random_stream
from envace.training.batches import training_rows
from envace.training.recipe import LossSection
from envace.training.update import update
from envace.types import Author, Group, Learn, Message, Role, Segment, Step, ToolCall, ToolSpec, Trajectory

TOOL = ToolSpec(name="get_order", description="Show an order.", parameters={"type": "object", "properties": {}})
ASKED = [Message(author=Author.USER, content="cancel order #W111111, please")]


def trajectory(*held: Transcript, index: int = 0, reward: float = 1.0) -> Trajectory:
    made = Trajectory(scenario_id="s", environment_id="e", kind="k", group=0, index=index, reward=reward)
    made.segments = [segment for transcript in held for segment in transcript.segments]
    return made


def rows_of(*trajectories: Trajectory) -> list:  # type: ignore[type-arg]
    return training_rows([Group(scenario_id="s", trajectories=list(trajectories))]).rows


def said(form: ChatFormat, text: str) -> Step:
    ids = [*form.encode([text]), *form.tokenizer.encode(form.learned.end, add_special_tokens=False)]
    return Step(ids=ids, logprobs=[-0.5] * len(ids), stopped=True)


def test_T1_a_new_row_begins_where_the_template_rewrites_what_was_sampled() -> None:
    form = ChatFormat(tokenizer("qwen3"))
    held = Transcript(form.open([], ASKED), random=random_stream(0))
    held.take(said(form, "<think>\na\n</think>\n\nhi"), Role.ACT)
    first = list(held.ids)
    again = [
        *ASKED,
        Message(author=Author.ASSISTANT, content="hi", reasoning="a"),
        Message(author=Author.USER, content="and now"),
    ]
    held.go_on(form.open([], again))
    assert (held.row, held.ids) == (1, form.open([], again))
    held.take(said(form, "<think>\nb\n</think>\n\nbye"), Role.ACT)
    rows = rows_of(trajectory(held))
    assert [row.ids.tolist() for row in rows] == [first, held.ids]
    assert [int(row.policy.sum()) for row in rows] == [len(held.segments[n].ids) for n in (1, 3)]


def test_T1_one_row_goes_on_where_the_next_prompt_extends_it() -> None:
    form = ChatFormat(tokenizer("qwen2.5"))
    held = Transcript(form.open([], ASKED), random=random_stream(0))
    held.take(said(form, "hi"), Role.ACT)
    again = [*ASKED, Message(author=Author.ASSISTANT, content="hi"), Message(author=Author.USER, content="and now")]
    held.go_on(form.open([], again))
    held.take(said(form, "bye"), Role.ACT)
    [row] = rows_of(trajectory(held))
    assert row.ids.tolist() == held.ids


def tiny(form: ChatFormat) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(form.tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=2048, initializer_range=0.3,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


async def test_T1_the_local_policy_reads_a_rewritten_prompt_anew() -> None:
    form = ChatFormat(tokenizer("qwen3"))
    model = tiny(form)
    policy = LocalPolicy(model, form)
    held = Transcript(form.open([], ASKED), random=random_stream(0))
    policy.begin(held)
    held.take(await policy.sample(held, Role.ACT, max_tokens=8, temperature=1.0), Role.ACT)
    held.go_on(form.open([TOOL], ASKED))
    held.take(await policy.sample(held, Role.ACT, max_tokens=8, temperature=1.0), Role.ACT)
    policy.end(held)
    logprobs = held.segments[-1].logprobs
    assert logprobs is not None
    with torch.no_grad():
        log_TV = torch.log_softmax(model(torch.tensor([held.ids])).logits[0], -1)
    start = len(held.prompt)
    wanted = [float(log_TV[start + n - 1, token]) for n, token in enumerate(held.ids[start:])]
    assert logprobs == pytest.approx(wanted, abs=1e-4)


@pytest.mark.parametrize("name", FAMILIES)
def test_T2_sampled_ids_that_a_tokenizer_would_join_stay_as_they_were_sampled(name: str) -> None:
    form = ChatFormat(tokenizer(name))
    joined = form.encode(["please"])
    split = [token for letter in "please" for token in form.encode([letter])]
    assert form.decode(split) == form.decode(joined)
    assert split != joined  # so that encoding the text again would give other ids
    held = Transcript(form.open([TOOL], ASKED), random=random_stream(0))
    sampled = Step(ids=split, logprobs=[-0.1] * len(split), stopped=True)
    held.take(sampled, Role.ACT)
    held.say(form.tool_header(), *form.answer("{}"), form.act_header())
    held.settle(form)
    [row] = rows_of(trajectory(held))
    start = len(held.segments[0].ids)
    assert row.ids[start : start + len(split)].tolist() == split


def test_T6_a_message_is_rendered_within_its_conversation_so_its_reasoning_stays() -> None:
    form = ChatFormat(tokenizer("qwen3"))
    call = ToolCall(name="get_order", arguments={})
    written = form.decode(form.written(Message(author=Author.ASSISTANT, calls=(call,), reasoning="I must look.")))
    assert written.startswith("<think>\nI must look.\n</think>")


def test_T7_a_segment_with_fewer_logprobs_than_ids_is_refused_and_nothing_is_padded() -> None:
    short = Segment(ids=[5, 6, 7], author=Author.ASSISTANT, role=Role.ACT, learn=Learn.POLICY, logprobs=[-0.1, -0.2])
    prompt = Segment(ids=[1, 2], author=Author.USER, opens_row=True)
    made = Trajectory(scenario_id="s", environment_id="e", kind="k", group=0, index=0, reward=1.0)
    made.segments = [prompt, short]
    with pytest.raises(TrainingError, match="3 sampled ids but 2 log-probabilities"):
        rows_of(made)
    short.logprobs = None
    with pytest.raises(TrainingError, match="3 sampled ids but 0 log-probabilities"):
        rows_of(made)


@pytest.mark.parametrize("name", FAMILIES)
def test_T8_only_sampled_tokens_are_trained_each_in_its_role(name: str) -> None:
    form = ChatFormat(tokenizer(name))
    held = Transcript(form.open([TOOL], ASKED), random=random_stream(0))
    act = said(form, "I look.")
    held.take(act, Role.ACT)
    held.say(form.tool_header())
    held.settle(form)
    rehearsed = form.tokenizer.encode('{"a": 1}' + form.learned.response_end, add_special_tokens=False)
    held.take(Step(ids=rehearsed, logprobs=[-0.3] * len(rehearsed), stopped=True), Role.REHEARSE)
    held.say(form.act_header())
    held.settle(form)
    held.take(act, Role.ACT)
    [row] = rows_of(trajectory(held))
    assert row.ids[row.policy & ~row.rehearse].tolist() == [*act.ids, *act.ids]
    assert row.ids[row.policy & row.rehearse].tolist() == rehearsed
    given = form.decode(row.ids[~row.policy].tolist())
    # Generation prompts and what follows an end-of-turn token are given, and nothing else is missing there.
    assert given.count(form.learned.opening_header) >= 2
    assert "I look." not in given


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
async def test_T10_the_first_ratio_is_one_at_any_sampling_temperature(temperature: float) -> None:
    form = ChatFormat(tokenizer("qwen3"))
    model = tiny(form)
    policy = LocalPolicy(model, form)
    attempts = []
    for index in range(2):
        held = Transcript(form.open([TOOL], ASKED), random=random_stream(index))
        policy.begin(held)
        held.take(await policy.sample(held, Role.ACT, max_tokens=12, temperature=temperature), Role.ACT)
        held.say(form.tool_header())
        held.settle(form)
        held.take(await policy.sample(held, Role.REHEARSE, max_tokens=12, temperature=temperature), Role.REHEARSE)
        policy.end(held)
        attempts.append(trajectory(held, index=index, reward=float(index)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    metrics = update(
        model, None, optimizer, rows_of(*attempts), settings=LossSection(), temperature=temperature, pad_id=form.pad_id
    )
    assert metrics["ratio"] == pytest.approx(1.0, abs=1e-4)
    assert metrics["tokens/act"] + metrics["tokens/rehearse"] == sum(
        len(segment.ids) for made in attempts for segment in made.segments if segment.role
    )
    assert np.isfinite(metrics["grad_norm"])
    assert metrics["grad_norm"] > 0
