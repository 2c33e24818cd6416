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
    if options.plot:
        _plot(options, rows)
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
    parser.add_argument("--plot", type=Path, help="write a picture of the curves there")
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
        "success_curve": [(evaluation["update"], evaluation["success"]) for evaluation in evaluations],
        "reward_curve": _smooth(updates, "reward"),
        "feasible_curve": _smooth(updates, "feasible_share"),
        "best": max(evaluation["success"] for evaluation in evaluations),
        "reward": [_mean(updates[:tenth], "reward"), _mean(updates[-tenth:], "reward")],
        "feasible": [_mean(updates[:tenth], "feasible_share"), _mean(updates[-tenth:], "feasible_share")],
        "real_calls": sum(update["real_calls"] for update in updates),
        "sampled_tokens": sum(update["sampled_tokens"] for update in updates),
    }


def _plot(options: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    """Real success and feasible share over updates: thin lines are seeds, thick ones their mean."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 3, figsize=(12, 3.4), layout="constrained")
    titles = ("Held-out real success", "Reward", "Worlds in which the request can be done")
    for panel, title, key in zip(panels, titles, ("success", "reward_curve", "feasible_curve"), strict=True):
        for colour, arm in zip(("#0072B2", "#D55E00", "#009E73", "#CC79A7"), options.arms.split(","), strict=False):
            curves = [row["success_curve"] if key == "success" else row[key] for row in rows if row["arm"] == arm]
            for curve in curves:
                panel.plot(*zip(*curve, strict=True), color=colour, linewidth=0.6, alpha=0.45)
            mean = [(curves[0][i][0], sum(c[i][1] for c in curves) / len(curves)) for i in range(len(curves[0]))]
            panel.plot(*zip(*mean, strict=True), color=colour, linewidth=2.2, label=arm)
        panel.set(title=title, xlabel="update", ylim=(0, 1))
        panel.grid(alpha=0.25)
    panels[0].legend(frameon=False)
    figure.savefig(options.plot, dpi=110)


def _smooth(records: list[dict[str, Any]], key: str, width: int = 5) -> list[tuple[int, float]]:
    """Means of consecutive updates."""
    chunks = [records[i : i + width] for i in range(0, len(records), width)]
    return [(chunk[-1]["update"], _mean(chunk, key) or 0.0) for chunk in chunks]


def _envace(*arguments: str) -> None:
    done = subprocess.run([sys.executable, "-m", "envace", *arguments], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"envace {' '.join(arguments)} failed:\n{done.stderr[-2000:]}")


def _mean(records: list[dict[str, Any]], key: str) -> float | None:
    values = [record[key] for record in records if record.get(key) is not None]
    return sum(values) / len(values) if values else None


def _share(value: float | None) -> str:
    return "  - " if value is None else f"{value:.2f}"
