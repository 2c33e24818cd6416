"""A learner: one set of weights that samples and is trained, and nothing of a rollout left behind."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import torch

from envace.models.formats import StarterFormat
from envace.models.ragged import RaggedCache
from envace.models.transcripts import Transcript, random_stream
from envace.training.arms import BOTH
from envace.training.checkpoints import Loaded
from envace.training.learner import Learner
from envace.training.recipe import load_recipe
from envace.types import Role


def learner(new_tiny: Callable[..., Any], form: StarterFormat) -> Learner:
    return Learner(Loaded(model=new_tiny(), format=form), load_recipe({}), roles=BOTH, anchored=True)


async def test_c5_the_sampler_has_the_trainers_own_weights_and_gives_its_cache_back(
    new_tiny: Callable[..., Any], form: StarterFormat
) -> None:
    # Engines that sample from a copy of their own must wake, sleep and be told of each step; here there is no copy.
    one = learner(new_tiny, form)
    policy = one.policy()
    assert policy.model is one.loaded.model
    transcript = Transcript([1, 2, 3], random=random_stream(0))
    policy.begin(transcript)
    await policy.sample(transcript, Role.ACT, max_tokens=4, temperature=1.0)
    caches = [weakref.ref(found) for found in gc.get_objects() if isinstance(found, RaggedCache)]
    assert caches
    del policy
    gc.collect()
    assert [cache for cache in caches if cache() is not None] == []


async def test_c3_what_is_sampled_next_comes_from_the_weights_after_the_step(
    new_tiny: Callable[..., Any], form: StarterFormat
) -> None:
    one = learner(new_tiny, form)

    async def logprobs() -> list[float] | None:
        policy = one.policy()
        transcript = Transcript([1, 2, 3], random=random_stream(0))
        policy.begin(transcript)
        return (await policy.sample(transcript, Role.ACT, max_tokens=1, temperature=1.0)).logprobs

    before = await logprobs()
    assert before == await logprobs()
    with torch.no_grad():
        one.loaded.model.get_input_embeddings().weight.mul_(1.1)
    assert before != await logprobs()
