"""One update against TRL's GRPOTrainer: trained tokens/s and peak memory, same model, same rows, same optimiser.

Each side runs in a process of its own, so that its peak memory is its own; the sides take turns, and a pair of
neighbours makes one ratio. A process makes one update to warm up, which is not timed, and then a few that are.

What is equal: weights, prompts, completions, which tokens are learned, rewards and so advantages (mean of the group, no
division), k3 KL of 1e-4 to a frozen copy, token mean over the whole update (TRL calls it dapo), clip .2, AdamW at 1e-6,
float32, threads. Both print the gradient norm of their first update, which must agree.

What is TRL's own best here: `rollout_func` hands it the rows, so it neither samples nor decodes; no gradient
checkpointing (it is on by default and slower); one generation batch an update, so that it need not compute old
log-probabilities; no logging, no saving; and micro-batches of 4 rows, faster and leaner than 8 (`--batch`). Its clock
runs from the beginning of a step, after data loading, to the end of the optimiser's step; the reference's pass is
inside for both. On a CPU its fused head scores every position, the prompt's and the padding's too; on a GPU only those
of completions, so that a ratio of the small model, which is nearly all head, says little about a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from envace.jobs.models import SMOLLM2, load
from envace.training.advantages import AdvantageSettings
from envace.training.batches import training_rows
from envace.training.forward import Reference, hidden_states, log_probabilities
from envace.training.recipe import LossSection
from envace.training.update import update
from envace.types import Author, Group, Learn, Role, Segment, Trajectory

THREADS = int(os.environ.get("OMP_NUM_THREADS", "2"))
"""On a machine that others use, one: torch's threads wait for one another."""
VOCABULARY, LEARNING_RATE = 49152, 1e-6
SIZE = 8
Seconds = np.ndarray[Any, np.dtype[np.float64]]
MODELS = {"small": 4, "smollm2": 2}
"""Groups of an update, by model."""


def main(arguments: list[str]) -> None:
    """Compare, or as a child measure one side."""
    parser = argparse.ArgumentParser(prog="python -m bench trl", description=__doc__)
    parser.add_argument("--model", choices=MODELS, default="small")
    parser.add_argument("--prompt", type=int, default=180, help="tokens of a prompt")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--updates", type=int, default=3, help="timed updates of a process")
    parser.add_argument("--batch", type=int, default=4, help="rows of TRL's micro-batch")
    parser.add_argument("--max-batch-tokens", type=int, default=2048)
    parser.add_argument("--logit-chunk", type=int, default=256)
    parser.add_argument("--whole", action="store_true", help="read the prompt of every row")
    parser.add_argument("--side", choices=("envace", "trl"))
    options = parser.parse_args(arguments)
    torch.set_num_threads(THREADS)
    if options.side:
        print(json.dumps(_ours(options) if options.side == "envace" else _trl(options)))
        return
    _compare(options, arguments)


def _compare(options: argparse.Namespace, arguments: list[str]) -> None:
    sides: dict[str, list[dict[str, Any]]] = {"envace": [], "trl": []}
    for _ in range(options.pairs):
        for side, found in sides.items():
            found.append(_child(side, arguments))
    rates = {side: [run["tokens_per_s"] for run in runs] for side, runs in sides.items()}
    ratios = [a / b for a, b in zip(rates["envace"], rates["trl"], strict=True)]
    work = [a["tokens_per_cpu_s"] / b["tokens_per_cpu_s"] for a, b in zip(*sides.values(), strict=True)]
    memory = {side: statistics.median(run["peak_gb"] for run in runs) for side, runs in sides.items()}
    added = {side: statistics.median(run["update_gb"] for run in runs) for side, runs in sides.items()}
    print(f"trl: trained tokens/s of an update, {options.model}, prompts of {options.prompt} tokens, {THREADS} threads")
    print(f"  {sides['envace'][0]['tokens']} tokens in {MODELS[options.model] * SIZE} rows, {options.pairs} pairs")
    for side in sides:
        norm = sides[side][0]["grad_norm"]
        print(
            f"  {side:<8} median {statistics.median(rates[side]):8.0f}   peak {memory[side]:.2f} GB, "
            f"{added[side]:.2f} GB of it by updates   first gradient norm {norm:.5f}"
        )
    print(f"  ratio    median {statistics.median(ratios):.2f}, min {min(ratios):.2f}, max {max(ratios):.2f}")
    print(
        f"  the same by processor time  median {statistics.median(work):.2f}, min {min(work):.2f}, max {max(work):.2f}"
    )
    print(
        json.dumps({"bench": "trl", **vars(options), "threads": THREADS, "ratio": ratios, "cpu_ratio": work, **sides})
    )


def _child(side: str, arguments: list[str]) -> dict[str, Any]:
    command = [sys.executable, "-m", "bench", "trl", *arguments, "--side", side]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"the {side} side failed:\n{done.stderr[-3000:]}")
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def _model(name: str) -> PreTrainedModel:
    if name == "smollm2":
        return load(SMOLLM2).model
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=192, intermediate_size=512, num_hidden_layers=6, num_attention_heads=6,
        num_key_value_heads=2, max_position_embeddings=4096, tie_word_embeddings=True,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def _groups(options: argparse.Namespace) -> list[Group]:
    """Rollouts of one to four calls: an act of 12 to 40 tokens, a response of 10 to 40 that is given, a reply."""
    random, groups = np.random.default_rng(0), []

    def ids(low: int, high: int) -> list[int]:
        return random.integers(100, VOCABULARY, random.integers(low, high + 1)).tolist()

    for number in range(MODELS[options.model]):
        prompt, made = ids(options.prompt, options.prompt), []
        for index in range(SIZE):
            held = Trajectory(
                scenario_id=str(number), environment_id="", kind="", group=number, index=index,
                reward=float(random.random()),
            )  # fmt: skip
            held.segments = [Segment(ids=prompt, author=Author.USER)]
            for _ in range(random.integers(1, 5)):
                held.segments += [_acted(ids(12, 40)), Segment(ids=ids(10, 40), author=Author.TOOL)]
            held.segments.append(_acted(ids(12, 40)))
            made.append(held)
        groups.append(Group(scenario_id=str(number), trajectories=made))
    return groups


def _acted(ids: list[int]) -> Segment:
    return Segment(ids=ids, author=Author.ASSISTANT, role=Role.ACT, learn=Learn.POLICY, logprobs=[0.0] * len(ids))


@torch.no_grad()
def _fill_logprobs(model: PreTrainedModel, groups: list[Group]) -> None:
    """What sampling would have told, so that ratios are 1; TRL takes them for 1."""
    for trajectory in (trajectory for group in groups for trajectory in group.trajectories):
        ids = torch.tensor([[token for segment in trajectory.segments for token in segment.ids]])
        hidden_TD, start = hidden_states(model, ids)[0], 0
        for segment in trajectory.segments:
            end = start + len(segment.ids)
            if segment.logprobs is not None:
                log_NV = log_probabilities(model, hidden_TD[start - 1 : end - 1], 1.0)
                segment.logprobs = log_NV.gather(1, ids[0, start:end, None])[:, 0].tolist()
            start = end


def _ours(options: argparse.Namespace) -> dict[str, Any]:
    model, groups = _model(options.model), _groups(options)
    _fill_logprobs(model, groups)
    loss = LossSection(
        kl=1e-4, max_grad_norm=1e9, max_batch_tokens=options.max_batch_tokens, logit_chunk=options.logit_chunk,
        share_prompts=not options.whole,
    )  # fmt: skip
    rows = training_rows(groups, advantage=AdvantageSettings(baseline="trajectories"), loss=loss).rows
    reference = Reference(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    before, norms, seconds = _resident(reset=True), [], []
    for _ in range(1 + options.updates):
        started = _now()
        found = update(model, reference, optimizer, rows, settings=loss, temperature=1.0, pad_id=0)
        seconds.append(_now() - started)
        norms.append(found["grad_norm"])
    return _result(groups, seconds, norms, before)


def _trl(options: argparse.Namespace) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    try:
        from datasets import Dataset
        from transformers import TrainerCallback
        from trl import GRPOConfig, GRPOTrainer
    except ImportError as error:
        sys.exit(f"bench trl needs TRL with what it imports. Run: pip install trl==1.16.0 datasets ({error})")
    model, groups = _model(options.model), _groups(options)
    rows = [trajectory for group in groups for trajectory in group.trajectories]

    def hand_over(prompts: list[str], trainer: Any) -> dict[str, Any]:
        seen: dict[str, int] = dict.fromkeys(prompts, -1)
        numbers = []
        for name in prompts:  # every prompt comes once for each rollout of its group
            seen[name] += 1
            numbers.append(int(name) * SIZE + seen[name])
        picked = [rows[number] for number in numbers]
        after = [row.segments[1:] for row in picked]
        return {
            "prompt_ids": [row.segments[0].ids for row in picked],
            "completion_ids": [[token for part in parts for token in part.ids] for parts in after],
            "env_mask": [[int(part.role is not None) for part in parts for _ in part.ids] for parts in after],
            "logprobs": [[0.0 for part in parts for _ in part.ids] for parts in after],
            "row": numbers,
        }

    def reward(row: list[int], **rest: Any) -> list[float | None]:
        return [rows[number].reward for number in row]

    class Clock(TrainerCallback):  # type: ignore[misc]
        seconds: list[Seconds]
        norms: list[float]

        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            self.started = _now()

        def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
            if not self.norms:
                gradients = [p.grad.norm() for p in model.parameters() if p.grad is not None]
                self.norms.append(float(torch.stack(gradients).norm()))

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            self.seconds.append(_now() - self.started)

    clock = Clock()
    clock.seconds, clock.norms = [], []
    data = Dataset.from_dict({"prompt": [str(number) for number in range(len(groups))]})
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)  # the trainer loads its reference from where the model came from
        model = type(model).from_pretrained(folder, dtype=torch.float32)
        settings = GRPOConfig(
            folder, use_cpu=True, bf16=False, seed=0, report_to="none", logging_strategy="no", save_strategy="no",
            disable_tqdm=True, per_device_train_batch_size=options.batch, num_generations=SIZE,
            gradient_accumulation_steps=len(rows) // options.batch, max_steps=1 + options.updates,
            gradient_checkpointing=False, shuffle_dataset=False, beta=1e-4, epsilon=0.2, loss_type="dapo",
            scale_rewards="none", temperature=1.0, max_grad_norm=1e9, learning_rate=LEARNING_RATE, weight_decay=0.0,
            lr_scheduler_type="constant", optim="adamw_torch", num_iterations=1,
        )  # fmt: skip
        trainer = GRPOTrainer(
            model=model, reward_funcs=reward, args=settings, train_dataset=data, rollout_func=hand_over,
            processing_class=load(SMOLLM2).format.tokenizer, callbacks=[clock],
        )  # fmt: skip
        before = _resident(reset=True)
        trainer.train()
    return _result(groups, clock.seconds, clock.norms, before)


def _resident(*, reset: bool = False) -> float:
    """Resident GB now; if told, the peak begins anew from here (Linux)."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    return psutil.Process().memory_info().rss / 1e9


def _peak() -> float:
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) * 1024 / 1e9


def _now() -> Seconds:
    """Seconds by the clock, and of this process's processors."""
    return np.array([time.perf_counter(), time.process_time()])


def _result(groups: list[Group], seconds: list[Seconds], norms: list[float], before: float) -> dict[str, Any]:
    tokens = sum(len(s.ids) for group in groups for t in group.trajectories for s in t.segments)
    peak = _peak()
    return {
        "tokens": tokens,
        "tokens_per_s": tokens / float(np.median(seconds[1:], axis=0)[0]),
        "tokens_per_cpu_s": tokens / float(np.median(seconds[1:], axis=0)[1]),
        "seconds": np.array(seconds).tolist(),
        "grad_norm": norms[0],
        "peak_gb": peak,
        "update_gb": peak - before,
    }
