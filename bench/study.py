"""The controlled comparison on the starter world: arms of equal length over seeds, in the real environment.

python -m bench study [--arms envace,published,grpo-real] [--seeds 3] [--updates 100] [--train N] [--out runs/study]
[--jobs 2]

Runs that are finished in the folder are not run again, so the table can be extended.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from envace.runs import RunFolder


def main(arguments: list[str]) -> None:
    """Run what is missing, then print the table."""
    options = _parse(arguments)
    jobs = [(arm, seed) for seed in range(options.seeds) for arm in options.arms.split(",")]
    with ThreadPoolExecutor(options.jobs) as pool:
        rows = list(pool.map(lambda job: _run(options, *job), jobs))
    print(f"{options.updates} updates, {rows[0]['n']} held-out scenarios a run, {options.train or 'fresh'} to train on")
    print("arm            seed  final  [95% CI]        do    decline  best  feasible first->last  real calls")
    for row in rows:
        low, high = row["ci"]
        feasible = " -> ".join(map(_share, row["feasible"]))
        print(
            f"{row['arm']:<14} {row['seed']:>4}  {row['success']:.3f}  [{low:.3f}, {high:.3f}]  {row['do']:.3f}  "
            f"{row['decline']:.3f}   {row['best']:.3f}  {feasible}         {row['real_calls']}"
        )
    for arm in options.arms.split(","):
        own = [row["success"] for row in rows if row["arm"] == arm]
        print(f"{arm:<14} mean {sum(own) / len(own):.3f}  min {min(own):.3f}  max {max(own):.3f}")
    print(json.dumps({"bench": "study", "updates": options.updates, "train": options.train, "rows": rows}))


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench study", description=__doc__)
    parser.add_argument("--arms", default="envace,published,grpo-real")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--updates", type=int, default=100)
    parser.add_argument("--train", type=int, default=0, help="fixed training scenarios; 0 draws enough for one pass")
    parser.add_argument("--heldout", type=int, default=500)
    parser.add_argument("--out", type=Path, default=Path("runs/study"))
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--set", action="append", default=[], help="further key=value of the recipe")
    return parser.parse_args(arguments)


def _run(options: argparse.Namespace, arm: str, seed: int) -> dict[str, Any]:
    """Train and evaluate one arm with one seed, in processes of their own."""
    train = options.train or 16 * options.updates
    out = options.out / f"{arm}-{options.updates}-{options.train or 'fresh'}{''.join(options.set)}-seed{seed}"
    folder = RunFolder(out)
    settings = [
        f"seed={seed}", f"arm={arm}", f"updates={options.updates}", f"data.train={train}",
        f"data.seed={seed if options.train else 0}",
        f"data.heldout={options.heldout}", "threads=1", *options.set,
    ]  # fmt: skip
    if "evaluated" not in folder.results():
        recipe = ["envace/starter/recipe.yaml", *settings]
        if not (out / "model").exists():
            resume = ["--resume"] if folder.config_file.exists() else []
            _envace("train", *recipe, "--out", str(out), *resume)
        # Every run is judged on the same held-out scenarios, whatever it trained on.
        _envace("eval", *recipe, "data.seed=0", "--model", str(out), "--out", str(out))
    result = folder.results()["evaluated"]
    updates, evaluations = folder.metrics("update"), folder.metrics("eval")
    tenth = max(1, len(updates) // 10)
    return {
        "arm": arm,
        "seed": seed,
        **{key: result[key] for key in ("success", "n", "ci", "do", "decline", "fidelity", "unseen")},
        "curve": [evaluation["success"] for evaluation in evaluations],
        "best": max(evaluation["success"] for evaluation in evaluations),
        "reward": [_mean(updates[:tenth], "reward"), _mean(updates[-tenth:], "reward")],
        "feasible": [_mean(updates[:tenth], "feasible_share"), _mean(updates[-tenth:], "feasible_share")],
        "real_calls": sum(update["real_calls"] for update in updates),
        "sampled_tokens": sum(update["sampled_tokens"] for update in updates),
    }


def _envace(*arguments: str) -> None:
    done = subprocess.run([sys.executable, "-m", "envace", *arguments], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"envace {' '.join(arguments)} failed:\n{done.stderr[-2000:]}")


def _mean(records: list[dict[str, Any]], key: str) -> float | None:
    values = [record[key] for record in records if record[key] is not None]
    return sum(values) / len(values) if values else None


def _share(value: float | None) -> str:
    return "  - " if value is None else f"{value:.2f}"
