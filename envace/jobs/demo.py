"""`envace demo`: the starter recipe through sft, train, eval and report, by the same calls that anyone can make."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from envace.jobs.display import Display, Silent
from envace.jobs.evaluate import evaluate
from envace.jobs.models import MODEL_FOLDER
from envace.jobs.sft import sft
from envace.jobs.train import train, train_summary
from envace.report.page import report
from envace.runs import RunFolder
from envace.training.recipe import Recipe, load_recipe

RECIPE = Path(__file__).parent.parent / "starter" / "recipe.yaml"
"""The demo's recipe; `envace recipe` prints it to copy and change."""

QUICK = (
    "updates=8",
    "eval.every=4",
    "eval.scenarios=60",
    "data.heldout=120",
    "data.unseen=30",
    "eval.fidelity=30",
)
"""What `--quick` changes."""


def demo(
    *,
    out: Path = Path("runs/demo"),
    seed: int = 0,
    quick: bool = False,
    from_scratch: bool = False,
    compare: bool = False,
    resume: bool = False,
    overrides: tuple[str, ...] = (),
    display: Display | None = None,
) -> dict[str, Any]:
    """Train the starter policy by world rehearsal, and measure it for real before and after.

    Returns:
        `warm_up`, `trained` and, with `compare`, `grpo_real`: each an evaluation (`success`, `do`, `decline`, `n`,
        `ci`,
        `fidelity`, ...); `feasible_share` (first, last); `real_calls_in_training`; `seconds`; `run`.
    """
    display, started = display or Silent(), time.perf_counter()
    recipe = load_recipe(RECIPE, [*(QUICK if quick else ()), f"seed={seed}", *overrides])
    arms = {"trained": recipe.arm, **({"grpo_real": "grpo-real"} if compare else {})}
    for arm in () if resume else arms.values():  # before anything is measured
        RunFolder.check_free(out / arm)
    if from_scratch:
        recipe = _from_scratch(recipe, out, resume, display)
    display.say("evaluating the warm-up policy")
    results: dict[str, Any] = {"warm_up": evaluate(recipe, display=display)}
    for name, arm in arms.items():
        results[name], summary = _arm(recipe.model_copy(update={"arm": arm}), out / arm, resume, display)
        if name == "trained":
            results["feasible_share"] = summary["feasible_share"]
            results["real_calls_in_training"] = summary["real_calls_in_training"]
    results["seconds"] = round(time.perf_counter() - started, 1)
    results["run"] = str(out / recipe.arm)
    folder = RunFolder.open(out / recipe.arm)
    folder.write_json(folder.results_file, {**folder.results(), **results})  # training wrote which update is best
    page = report([folder.path])
    return {**results, "report": str(page)}


def _from_scratch(recipe: Recipe, out: Path, resume: bool, display: Display) -> Recipe:
    """Make the warm-up anew, and start from it."""
    folder = out / "warm-up"
    if not (resume and (folder / MODEL_FOLDER).exists()):
        student = recipe.model_copy(update={"model": "new"})
        sft(student, out=folder, resume=resume and folder.exists(), display=display)
    return recipe.model_copy(update={"model": str(folder / MODEL_FOLDER)})


def _arm(recipe: Recipe, out: Path, resume: bool, display: Display) -> tuple[dict[str, Any], dict[str, Any]]:
    """Train one arm and evaluate it."""
    display.say(f"training by {recipe.arm}")
    if resume and (out / MODEL_FOLDER).exists():
        folder = RunFolder.create(out, recipe.model_dump(mode="json"), resume=True)
        summary = train_summary(recipe, folder, 0.0)
    else:
        summary = train(recipe, out=out, resume=resume and out.exists(), display=display)
    display.say("evaluating the trained policy")
    return evaluate(recipe, model=str(out / MODEL_FOLDER), display=display), summary


def demos(*, out: Path, seeds: range, **settings: Any) -> dict[str, Any]:
    """The demo for several seeds; with one, its own result.

    Returns:
        For several: `runs` (the results in order), sums of `real_calls_in_training` and `seconds`, and one `report`
        over all.
    """
    if len(seeds) == 1:
        return demo(out=out, seed=seeds[0], **settings)
    runs = [demo(out=out / f"seed-{seed}", seed=seed, **settings) for seed in seeds]
    page = report([Path(run["run"]) for run in runs], out=out / "comparison.html")
    return {
        "runs": runs,
        "real_calls_in_training": sum(run["real_calls_in_training"] for run in runs),
        "seconds": round(sum(run["seconds"] for run in runs), 1),
        "run": str(out),
        "report": str(page),
    }
