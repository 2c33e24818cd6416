"""The cache and the training forward against an eager full forward, for kinds of attention that models have.

Prompts and steps are longer than the windows, chunks of given tokens are read in passes of their own, and rows differ
in length, so that a mask or position that is off by one shows.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from support.families import tokenizer
from transformers import PreTrainedModel

from envace.errors import ModelError
from envace.models.chat import ChatFormat
from envace.models.local import LocalPolicy
from envace.models.ragged import ATTENTION, RaggedCache, keeps_all
from envace.models.transcripts import Transcript, random_stream
from envace.training.forward import hidden_states, log_probabilities
from envace.types import Author, Role

SHAPE: dict[str, Any] = {
    "vocab_size": 700, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "initializer_range": 0.4, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
WINDOW = 8
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", {}),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {"head_dim": 8}),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", {"use_sliding_window": False, "sliding_window": WINDOW}),
    "qwen2-sliding": (
        "Qwen2ForCausalLM", "Qwen2Config",
        {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2},
    ),
    "mistral": ("MistralForCausalLM", "MistralConfig", {"sliding_window": None}),
    "mistral-sliding": ("MistralForCausalLM", "MistralConfig", {"sliding_window": WINDOW}),
    "phi3-sliding": ("Phi3ForCausalLM", "Phi3Config", {"sliding_window": WINDOW}),
    "gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig", {"sliding_window": WINDOW, "head_dim": 8}),
    "smollm3": ("SmolLM3ForCausalLM", "SmolLM3Config", {}),
    "cohere2": ("Cohere2ForCausalLM", "Cohere2Config", {"sliding_window": WINDOW}),
    "granite": ("GraniteForCausalLM", "GraniteConfig", {"logits_scaling": 3.0}),
}  # fmt: skip


def build(name: str, **changes: Any) -> PreTrainedModel:
    model, config, settings = MODELS[name]
    torch.manual_seed(0)
    made: PreTrainedModel = getattr(transformers, model)(
        getattr(transformers, config)(**{**SHAPE, **settings, **changes})
    )
    made.set_attn_implementation("eager")
    return made.eval()


class Endless(ChatFormat):
    """Without stop tokens, so that lengths are the test's."""

    def stop_ids(self) -> frozenset[int]:
        return frozenset()

    def stop_text(self, role: Role) -> str | None:
        return None


def talked(model: PreTrainedModel, *, chunk: int) -> list[Transcript]:
    """Three transcripts that act, are given twelve tokens, and act again, twice."""
    policy = LocalPolicy(model, Endless(tokenizer("chatml")))
    policy._chunk = chunk
    held = [Transcript(range(5, 5 + length), random=random_stream(length)) for length in (30, 12, 3)]

    async def talk(transcript: Transcript) -> None:
        policy.begin(transcript)
        for _ in range(3):
            step = await policy.sample(transcript, Role.ACT, max_tokens=6, temperature=1.0)
            transcript.take(step, Role.ACT)
            transcript.give(range(40, 52), Author.TOOL)
        policy.end(transcript)

    async def everyone() -> None:
        await asyncio.gather(*map(talk, held))

    asyncio.run(everyone())
    return held


@torch.no_grad()
def largest_gap(held: list[Transcript], logprobs: Callable[[torch.Tensor], torch.Tensor]) -> float:
    """The largest difference between sampled log-probabilities and those of a full forward (T, V)."""
    gap = 0.0
    for transcript in held:
        log_TV, start = logprobs(torch.tensor([transcript.ids])), 0
        for segment in transcript.segments:
            for offset, logprob in enumerate(segment.logprobs or []):
                gap = max(gap, abs(float(log_TV[start + offset - 1, segment.ids[offset]]) - logprob))
            start += len(segment.ids)
    return gap


@pytest.mark.parametrize("chunk", [2, 1000])
@pytest.mark.parametrize("name", MODELS)
def test_cache_and_training_see_what_a_full_forward_sees(name: str, chunk: int) -> None:
    model = build(name)
    plain = copy.deepcopy(model)
    held = talked(model, chunk=chunk)
    assert largest_gap(held, lambda ids: torch.log_softmax(plain(ids).logits[0].float(), -1)) < 3e-4
    assert largest_gap(held, lambda ids: log_probabilities(model, hidden_states(model, ids)[0], 1.0)) < 3e-4


KEEP_ALL = ("llama", "qwen3", "qwen2", "mistral", "smollm3", "granite")


@pytest.mark.parametrize("name", MODELS)
def test_prompts_are_shared_only_where_every_layer_keeps_all(name: str) -> None:
    assert keeps_all(build(name).config) == (name in KEEP_ALL)


@pytest.mark.parametrize("attention", ["sdpa", ATTENTION])
@pytest.mark.parametrize("name", KEEP_ALL)
def test_a_prompt_that_is_read_once_gives_the_hidden_states_and_gradients_of_whole_rows(
    name: str, attention: str
) -> None:
    model, start = build(name), 20
    model.set_attn_implementation(attention)
    rows = torch.arange(5, 5 + 3 * 33).reshape(3, 33)
    rows[:, :start] = rows[0, :start]
    found = []
    for after in (
        lambda: hidden_states(model, rows)[:, start:],
        lambda: hidden_states(model, rows[:, start:], rows[0, :start]),
    ):
        model.zero_grad()
        hidden = after()
        (hidden * torch.linspace(-1, 1, hidden.numel()).reshape(hidden.shape)).sum().backward()
        gradients = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
        found.append((hidden.detach(), torch.cat(gradients)))
    torch.testing.assert_close(found[1][0], found[0][0], rtol=1e-3, atol=1e-4)
    gap = (found[1][1] - found[0][1]).norm() / found[0][1].norm()
    assert float(gap) < 1e-4


@pytest.mark.parametrize(
    ("model", "config", "settings"),
    [
        ("Gemma2ForCausalLM", "Gemma2Config", {"head_dim": 8}),
        ("BloomForCausalLM", "BloomConfig", {"n_head": 4, "n_layer": 2}),
    ],
)
def test_attention_that_the_cache_cannot_hold_is_refused(model: str, config: str, settings: dict[str, Any]) -> None:
    made = getattr(transformers, model)(getattr(transformers, config)(**{**SHAPE, **settings}))
    with pytest.raises(ModelError, match="serve the model"):
        RaggedCache(made)


def test_positions_that_depend_on_the_length_are_refused() -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    with pytest.raises(ModelError, match="rotary positions that change with the length"):
        RaggedCache(build("llama", rope_parameters=rope))
