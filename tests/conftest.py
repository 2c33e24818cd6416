"""Real small objects for every test: a tokenizer of the starter kind, a tiny Llama, the retail package, a worker."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from envace.models.formats import ASSISTANT, CALL, END, Glue, StarterFormat
from envace.models.policy import ScriptedPolicy
from envace.sandbox import Worker
from envace.scenarios import EnvironmentSpec, Expected, Scenario, read_environment
from envace.scenarios.packages import dump_line
from envace.scenarios.schema import Call
from envace.starter.policy import new_tokenizer
from envace.starter.scenarios import starter_scenarios, starter_specs
from envace.starter.world import folder
from envace.types import Author, Message, Role


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """A recipe run in this process may have asked for more threads; on shared cores these slow small models tenfold."""
    torch.set_num_threads(1)


TEXTS = [
    'get_order {"order_id":"#W123456"} {"status":"pending","total":120,"item":"lamp"} Done, refund 120.',
    "cancel order #W123456, please. Sorry, shipped.",
]

ORDER = {"order_id": "#W111111", "customer_id": "CU222222", "item": "lamp", "status": "pending", "total": 120}


@pytest.fixture(scope="session")
def form() -> StarterFormat:
    """The starter format on a tokenizer built from a few texts."""
    return StarterFormat(new_tokenizer(TEXTS))


@pytest.fixture(scope="session")
def new_tiny(form: StarterFormat) -> Callable[..., LlamaForCausalLM]:
    """Makes a tiny Llama with grouped key heads; its weights are large enough that its choices vary."""

    def build(seed: int = 0) -> LlamaForCausalLM:
        torch.set_num_threads(1)  # fixtures of a module come before `one_thread`
        torch.manual_seed(seed)
        config = LlamaConfig(
            vocab_size=len(form.tokenizer),
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=512,
            initializer_range=0.3,
            tie_word_embeddings=True,
            pad_token_id=form.pad_id,
            eos_token_id=form.tokenizer.eos_token_id,
            bos_token_id=None,
        )
        return LlamaForCausalLM(config).eval()

    return build


@pytest.fixture(scope="session")
def retail() -> EnvironmentSpec:
    return read_environment(folder("retail") / "environment.py", name="retail")


@pytest.fixture
async def worker(retail: EnvironmentSpec) -> AsyncIterator[Worker]:
    async with Worker([retail.definition()]) as started:
        yield started


@pytest.fixture
def cancel_task() -> Callable[..., Scenario]:
    """Makes "cancel order #W111111" on an order of a given status, with the ending that the rules demand."""

    def build(status: str = "pending") -> Scenario:
        order = {**ORDER, "status": status}
        done = status == "pending"
        calls = [Call(name="get_order", arguments={"order_id": "#W111111"}, response=order)]
        if done:
            calls.append(
                Call(name="cancel_order", arguments={"order_id": "#W111111"}, response={"status": "cancelled"})
            )
        final = {**order, "status": "cancelled" if done else status}
        return Scenario(
            id=f"cancel-{status}",
            environment="retail",
            kind="cancel",
            instruction="cancel order #W111111, please",
            goal={"kind": "cancel", "order": "#W111111"},
            state={"orders": {"#W111111": order}, "customers": {}, "stock": {}},
            expected=Expected(
                outcome="done" if done else "declined",
                reply="Done, refund 120." if done else f"Sorry, already {status}.",
                facts=("120",) if done else (status,),
                calls=tuple(calls),
                final_state={"orders": {"#W111111": final}, "customers": {}, "stock": {}},
            ),
        )

    return build


class Say:
    """Ids of steps, as a policy would sample them."""

    def __init__(self, form: StarterFormat) -> None:
        self.form = form

    def call(self, name: str, **arguments: Any) -> list[int]:
        return self.written(name, dump_line(arguments))

    def written(self, name: str, arguments: str) -> list[int]:
        """A call whose arguments are any text."""
        return self.form.encode([Glue(CALL), f"{name} {arguments}", Glue(END)])

    def reply(self, text: str) -> list[int]:
        return self.form.encode([text, Glue(END)])

    def response(self, value: Any) -> list[int]:
        return self.form.encode(self.form.answer(dump_line(value)))

    def user(self, text: str) -> list[Message]:
        return [Message(author=Author.USER, content=text)]

    def control(self, token: str) -> int:
        number: int = self.form.tokenizer.convert_tokens_to_ids(token)
        return number


@pytest.fixture(scope="session")
def say(form: StarterFormat) -> Say:
    return Say(form)


@pytest.fixture(scope="session")
def script(form: StarterFormat) -> Callable[..., ScriptedPolicy]:
    """Makes a policy that acts and rehearses by list.

    `acts`: the acting steps of every rollout. `responses`: rehearsed responses in the order of asking.
    """

    def build(acts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]] = ()) -> ScriptedPolicy:
        queue = iter(responses)

        def next_ids(text: str, role: Role) -> list[int]:
            if role is Role.REHEARSE:
                return list(next(queue))
            return list(acts[text.count(ASSISTANT) - 1])

        return ScriptedPolicy(form, next_ids)

    return build


@pytest.fixture
async def starter_episodes() -> AsyncIterator[Callable[..., Any]]:
    """Gives a worker, a spec and so many held-out scenarios of a starter domain."""
    specs = starter_specs()
    async with Worker([spec.definition() for spec in specs.values()]) as started:

        async def build(domain: str, count: int) -> tuple[Worker, EnvironmentSpec, list[Scenario]]:
            scenarios = await starter_scenarios(started, domains=[domain], split="heldout", seed=5, count=count)
            return started, specs[domain], scenarios

        yield build
