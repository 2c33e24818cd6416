"""A made-up run folder. Its numbers are invented and mean nothing."""

import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

UPDATES = 40


def stage(success: float, do: float, decline: float, n: int = 400) -> dict[str, Any]:
    half = 1.96 * math.sqrt(success * (1 - success) / n)
    part = {
        "success": success,
        "n": n // 3,
        "ci": [round(success - 2 * half, 4), round(min(1, success + 2 * half), 4)],
    }
    return {
        "success": success,
        "n": n,
        "ci": [round(success - half, 4), round(success + half, 4)],
        "do": do,
        "decline": decline,
        "undecided": 0,
        "by_domain": {"bank": part, "flights": part, "retail": part},
        "by_kind": {"retail.cancel": part, "bank.transfer": part},
        "stops": {"replied": n - 12, "steps": 9, "parse": 3},
        "fidelity": {
            "error_class": 0.97,
            "error_recall": 0.93,
            "false_alarms": 0.02,
            "keys": 0.99,
            "values": 0.96,
            "state": 0.9,
            "n": 310,
            "n_determined": 204,
        },
        "unseen": {"success": success - 0.1, "n": 100, "ci": [success - 0.2, success]},
    }


def config(seed: int = 0, arm: str = "envace") -> dict[str, Any]:
    return {
        "name": "starter",
        "seed": seed,
        "world": "starter",
        "model": "starter",
        "arm": arm,
        "reward": "contract",
        "updates": UPDATES,
        "scenarios_per_update": 16,
        "group_size": 8,
        "learning_rate": 5e-4,
        "temperature": 1.0,
        "loss": {"clip_low": 0.2, "kl": 1e-4, "anchor_kl": 0.1},
        "eval": {"every": 10, "scenarios": 120},
    }


def metrics(seed: int = 0, updates: int = UPDATES) -> list[dict[str, Any]]:
    rng = random.Random(seed)
    records: list[dict[str, Any]] = []
    for step in range(0, 900, 30):
        records.append(
            {
                "kind": "sft",
                "step": step,
                "loss": 6 * math.exp(-step / 150) + 0.3,
                "tokens": 1700,
                "update": 0,
            }
        )
    for number in range(updates + 1):
        done = 1 - math.exp(-number / 9)
        if number:
            records.append(update_record(number, done, rng))
        if number % 10 == 0:
            success = 0.41 + 0.42 * done + rng.uniform(-0.02, 0.02)
            records.append(
                {
                    "kind": "eval",
                    "update": number,
                    "success": success,
                    "do": success - 0.06,
                    "decline": success + 0.08,
                    "n": 120,
                    "ci": [success - 0.08, min(1, success + 0.07)],
                }
            )
    return records


def update_record(number: int, done: float, rng: random.Random) -> dict[str, Any]:
    def noisy(value: float, width: float = 0.02) -> float:
        return value + rng.uniform(-width, width)

    return {
        "kind": "update",
        "update": number,
        "reward": noisy(0.5 + 0.3 * done),
        "reward_std": noisy(0.3),
        **{
            f"part/{name}": noisy(base + 0.3 * done)
            for name, base in (
                ("calls", 0.62),
                ("state", 0.5),
                ("outcome", 0.6),
                ("answer", 0.35),
                ("consistent", 0.68),
            )
        },
        "feasible_share": None if number == 7 else noisy(0.45 + 0.08 * done, 0.06),
        "consistent_share": noisy(0.93 + 0.05 * done, 0.01),
        "entropy/act": noisy(0.3 - 0.15 * done),
        "entropy/rehearse": noisy(0.22 - 0.05 * done),
        "kl": noisy(0.08 * done, 0.005),
        "anchor_kl": noisy(0.01 * done, 0.001),
        "grad_norm": 0.7,
        "clip_share": noisy(0.02, 0.01),
        "flat_cells": noisy(0.1 + 0.2 * done),
        "tokens_per_trajectory/act": noisy(31, 2),
        "tokens_per_trajectory/rehearse": noisy(17, 2),
        "stop/replied": 0.95,
        "stop/parse": noisy(0.02, 0.01),
        "stop/steps": noisy(0.02, 0.01),
        "stop/length": 0.01,
        "stop/infrastructure": 0.0,
        "sampled_tokens": 6000,
        "shared_tokens": 1800,
        "real_calls": 0,
        "seconds_rollout": 1.4,
        "seconds_update": 0.9,
        "rollout_tokens_per_s": noisy(7500, 400),
        "update_tokens_per_s": noisy(7000, 400),
    }


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"name": name, "arguments": arguments}


def exchange(
    made: dict[str, Any],
    rehearsed: Any,
    real: Any,
    *,
    determined: bool,
    consistency: str | None = "consistent",
) -> dict[str, Any]:
    return {
        "call": made,
        "rehearsed": rehearsed,
        "rehearsed_text": json.dumps(rehearsed),
        "real": real,
        "consistency": consistency,
        "determined": determined,
    }


def rehearsal(
    name: str,
    instruction: str,
    reply: str,
    exchanges: list[dict[str, Any]],
    *,
    feasible: bool = True,
    success: bool = True,
) -> dict[str, Any]:
    verdict = "pass" if success else "fail"
    return {
        "kind": "rehearsal",
        "update": UPDATES,
        "scenario_id": name,
        "environment_id": "retail",
        "instruction": instruction,
        "reply": reply,
        "feasible_real": feasible,
        "exchanges": exchanges,
        "real": {
            "success": success,
            "reply": reply,
            "exchanges": [{"call": e["call"], "response": e["real"]} for e in exchanges],
            "checks": [
                {"id": "state", "question": "Are all tables as the oracle leaves them?", "verdict": verdict},
                {"id": "calls", "question": "Were the necessary calls made?", "verdict": "pass"},
                {
                    "id": "reply",
                    "question": "Does the reply have the right outcome and facts?",
                    "verdict": verdict,
                },
            ],
        },
    }


def rehearsals() -> list[dict[str, Any]]:
    order = {
        "order_id": "#W104233",
        "customer_id": "CU550129",
        "item": "lamp",
        "status": "pending",
        "total": 84,
    }
    real = {**order, "customer_id": "CU771008", "item": "tent", "total": 129}
    shipped = {**order, "status": "shipped"}
    return [
        rehearsal(
            "retail-heldout-4",
            "Please cancel my order W104233.",
            "Done: order #W104233 is cancelled.",
            [
                exchange(
                    call("get_order", order_id="#W104233"),
                    order,
                    real,
                    determined=False,
                    consistency="undetermined",
                ),
                exchange(
                    call("cancel_order", order_id="#W104233"),
                    {**order, "status": "cancelled"},
                    {**real, "status": "cancelled"},
                    determined=False,
                ),
            ],
        ),
        rehearsal(
            "retail-heldout-9",
            "I want to cancel order W104233.",
            "Sorry, I cannot do that: the order has shipped.",
            [
                exchange(
                    call("get_order", order_id="W104233"),
                    {"error": "not_found"},
                    {"error": "not_found"},
                    determined=True,
                ),
                exchange(
                    call("get_order", order_id="#W104233"),
                    shipped,
                    shipped,
                    determined=False,
                    consistency="undetermined",
                ),
            ],
            feasible=False,
        ),
        rehearsal(
            "retail-heldout-17",
            "What did my last order cost? I am CU550129.",
            "Your last order cost 84.",
            [
                exchange(
                    call("cancel_order", order_id="#W104233"),
                    {**order, "status": "cancelled"},
                    {"error": "order_not_pending"},
                    determined=True,
                    consistency="inconsistent",
                ),
                exchange(
                    call("list_orders", customer_id="CU550129"),
                    [order],
                    [{**order, "status": "cancelled"}],
                    determined=True,
                ),
            ],
            success=False,
        ),
        rehearsal("retail-heldout-21", "Is the mug in stock?", "Yes, 12 are left.", []),
    ]


def training(group: int = 0) -> list[dict[str, Any]]:
    def segment(text: str, author: str, role: str | None = None, learn: str = "nothing") -> dict[str, Any]:
        return {
            "ids": [5] * (len(text) // 3),
            "author": author,
            "role": role,
            "learn": learn,
            "logprobs": None,
            "text": text,
        }

    opening = (
        "<|system|>get_order(order_id) cancel_order(order_id)<|end|>"
        "<|user|>Please cancel my order W104233.<|end|><|assistant|>"
    )
    found = '{"order_id":"#W104233","status":"pending","total":84}<|end|>'
    records = []
    for index, (reward, stop) in enumerate(((1.0, "replied"), (0.62, "replied"), (None, "infrastructure"))):
        first = index == 0
        records.append(
            {
                "kind": "train",
                "update": UPDATES,
                "scenario_id": "retail-train-77",
                "environment_id": "retail",
                "group": group,
                "index": index,
                "reward": reward,
                "parts": {"calls": 1.0, "state": 1.0, "consistent": 1.0} if reward else {},
                "stop": stop,
                "error": None if reward else "WorkerDied: the worker ended with -9",
                "feasible": True if reward else None,
                "reply": "Done.",
                "exchanges": [],
                "segments": [
                    segment(opening, "user"),
                    segment('<|call|>get_order {"order_id":"#W104233"}<|end|>', "assistant", "act", "policy"),
                    segment("<|tool|>", "tool"),
                    segment(found, "tool", "rehearse" if first else None, "anchor"),
                    segment("<|assistant|>", "assistant"),
                    segment('<|call|>cancel_order {"order_id":"#W104233"}<|end|>', "assistant", "act", "policy"),
                    segment("<|tool|>", "tool"),
                    segment(
                        '{"order_id":"#W104233","status":"cancelled","total":84}<|end|>',
                        "tool",
                        "rehearse",
                        "policy",
                    ),
                    segment("<|assistant|>", "assistant"),
                    segment("Done: order #W104233 is cancelled.<|end|>", "assistant", "act", "policy"),
                ],
            }
        )
    return records


def write_lines(path: Path, records: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")


def write_run(path: Path, *, seed: int = 0, arm: str = "envace") -> Path:
    path.mkdir(parents=True)
    write_json(path / "config.json", config(seed, arm))
    packages = {"envace": "0.1.0", "torch": "2.11.0", "transformers": "5.5.0"}
    write_json(
        path / "env.json",
        {
            "python": "3.11.2",
            "platform": "Linux-6.1-x86_64",
            "packages": packages,
            "revision": "e949b88c0ffee+changes",
        },
    )
    write_lines(path / "metrics.jsonl", metrics(seed))
    write_lines(path / "trajectories.jsonl", training() + rehearsals())
    after = 0.83 + 0.01 * seed
    results = {
        "warm_up": stage(0.41, 0.47, 0.34),
        "trained": stage(after, 0.77, 0.91),
        "feasible_share": [0.43, 0.52],
        "real_calls_in_training": 0,
        "seconds": 251.4,
    }
    write_json(path / "results.json", results)
    return path


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A whole run."""
    return write_run(tmp_path / "starter")


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., Path]:
    """Makes runs by name."""

    def make(name: str, **options: Any) -> Path:
        return write_run(tmp_path / name, **options)

    return make
