"""The local policy on a real small language model against transformers' `generate`: SmolLM2-135M, batch 16.

`decode`: one acting step of 16 rollouts after a short prompt. `turns`: act, rehearse, act in the retail domain of the
starter world, with its tools and rules in the prompt; the peer prefills each whole transcript again at every turn, as
TRL's tool loop does with the transformers backend. There are two prompts of eight rollouts each, as groups have them.
Both sides sample at temperature 1 with the same weights and threads, stop tokens off, so that both write as many
tokens, and alternate within one process.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import time
from collections.abc import Callable

import torch

from envace.jobs.doctor import ASKED, TOOL
from envace.jobs.models import SMOLLM2, load
from envace.models.chat import ChatFormat
from envace.models.local import LocalPolicy
from envace.models.transcripts import Transcript, random_stream
from envace.scenarios import Scenario, opening
from envace.starter.scenarios import starter_specs
from envace.training.checkpoints import Loaded
from envace.types import Author, Message, Role

THREADS = int(os.environ.get("OMP_NUM_THREADS", "2"))
REPEATS, ROWS, TOKENS = 3, 16, 32
INSTRUCTIONS = ("What is the status of order #W111111?", "Please cancel my order #W222222, and tell me the refund.")


class Endless(ChatFormat):
    """Without stop tokens, so that a step is as long as it may be."""

    def stop_ids(self) -> frozenset[int]:
        return frozenset()

    def stop_text(self, role: Role) -> str | None:
        return None


def llm() -> None:
    """Sampled tokens/s of both, and their ratio."""
    torch.set_num_threads(THREADS)
    loaded = load(SMOLLM2)
    loaded.model.eval()
    form = Endless(loaded.format.tokenizer)
    for name, turns, prompts in (("decode", 1, _short(form)), ("turns", 3, _retail(form))):
        ours, peer = [], []
        for seed in range(REPEATS):
            ours.append(_rate(turns, lambda s=seed, t=turns, p=prompts: _ours(loaded, form, p, t, s)))
            peer.append(_rate(turns, lambda s=seed, t=turns, p=prompts: _generate(loaded, form, p, t, s)))
        ratios = [a / b for a, b in zip(ours, peer, strict=True)]
        print(f"llm {name}: sampled tokens/s, SmolLM2-135M float32, batch {ROWS}, {REPEATS} pairs, {THREADS} thread(s)")
        print(f"  prompts of {min(map(len, prompts))} to {max(map(len, prompts))} tokens")
        print(f"  envace    median {statistics.median(ours):7.1f}")
        print(f"  generate  median {statistics.median(peer):7.1f}")
        print(f"  ratio     median {statistics.median(ratios):.2f}, min {min(ratios):.2f}, max {max(ratios):.2f}")
        print(json.dumps({"bench": f"llm {name}", "envace": ours, "peer": peer, "ratio": ratios, "threads": THREADS}))


def _short(form: ChatFormat) -> list[list[int]]:
    asked = [[ASKED[0], Message(author=Author.USER, content=text)] for text in INSTRUCTIONS]
    return [list(form.open([TOOL], messages)) for messages in asked for _ in range(ROWS // 2)]


def _retail(form: ChatFormat) -> list[list[int]]:
    spec = starter_specs()["retail"]
    asked = [opening(spec, Scenario(id="bench", environment="retail", instruction=text)) for text in INSTRUCTIONS]
    return [list(form.open(spec.tools, messages)) for messages in asked for _ in range(ROWS // 2)]


def _ours(loaded: Loaded, form: ChatFormat, prompts: list[list[int]], turns: int, seed: int) -> None:
    policy = LocalPolicy(loaded.model, form)

    async def talk(ids: list[int], row: int) -> None:
        held = Transcript(ids, random=random_stream(seed, row))
        policy.begin(held)
        for turn in range(turns):
            role = Role.REHEARSE if turn % 2 else Role.ACT
            held.take(await policy.sample(held, role, max_tokens=TOKENS, temperature=1.0), role)
            held.say(form.act_header() if turn % 2 else form.tool_header())
            held.settle(form)
        policy.end(held)

    async def everyone() -> None:
        await asyncio.gather(*(talk(ids, row) for row, ids in enumerate(prompts)))

    asyncio.run(everyone())


@torch.inference_mode()
def _generate(loaded: Loaded, form: ChatFormat, prompts: list[list[int]], turns: int, seed: int) -> None:
    torch.manual_seed(seed)
    loaded.model.set_attn_implementation("sdpa")
    held = prompts
    for turn in range(turns):
        longest = max(map(len, held))
        ids = torch.tensor([[form.pad_id] * (longest - len(row)) + row for row in held])
        mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in held])
        out = loaded.model.generate(
            input_ids=ids, attention_mask=mask, do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
            max_new_tokens=TOKENS, min_new_tokens=TOKENS, eos_token_id=None, pad_token_id=form.pad_id,
        )  # fmt: skip
        header = form.encode([form.act_header() if turn % 2 else form.tool_header()])
        held = [row + new + header for row, new in zip(held, out[:, longest:].tolist(), strict=True)]


def _rate(turns: int, job: Callable[[], None]) -> float:
    started = time.perf_counter()
    job()
    return ROWS * TOKENS * turns / (time.perf_counter() - started)
