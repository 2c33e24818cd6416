"""The verbs. Each builds a recipe or a path from its arguments, calls one job, and shows what it returns."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from envace import __version__
from envace.cli.display import display_for, show

app = typer.Typer(
    help="Train tool-using agents by world rehearsal: the policy also plays its environment.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"envace {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Say it and end.")
    ] = False,
) -> None:
    """Train tool-using agents by world rehearsal: the policy also plays its environment."""


RecipeArgument = Annotated[Path, typer.Argument(help="A recipe (YAML). `envace recipe` prints one to start from.")]
Overrides = Annotated[list[str] | None, typer.Argument(help="key=value changes to the recipe, e.g. updates=100.")]
Out = Annotated[Path | None, typer.Option(help="Run folder; default runs/NAME of the recipe.")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with the run in that folder.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON object on standard output, progress on standard error.")]


@app.command()
def demo(
    overrides: Overrides = None,
    out: Annotated[Path, typer.Option(help="Folder of the run.")] = Path("runs/demo"),
    seed: Annotated[int, typer.Option(help="Seed of the run.")] = 0,
    seeds: Annotated[int, typer.Option(min=1, help="Runs with so many seeds, counted from --seed.")] = 1,
    quick: Annotated[
        bool, typer.Option("--quick", help="A few updates and a small evaluation, within a minute.")
    ] = False,
    from_scratch: Annotated[bool, typer.Option("--from-scratch", help="Make the warm-up policy anew first.")] = False,
    compare: Annotated[
        bool, typer.Option("--compare", help="Also train in the real environment, with as many updates.")
    ] = False,
    resume: Resume = False,
    as_json: Json = False,
) -> None:
    """Train the bundled policy in the bundled world, and measure it for real before and after."""
    from envace.jobs.demo import demos

    result = demos(
        out=out,
        seeds=range(seed, seed + seeds),
        quick=quick,
        from_scratch=from_scratch,
        compare=compare,
        resume=resume,
        overrides=tuple(overrides or ()),
        display=display_for(as_json),
    )
    show(result, as_json, kind="demo")


@app.command()
def sft(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    out: Out = None,
    resume: Resume = False,
    as_json: Json = False,
) -> None:
    """Warm a model up on demonstrations, in both roles."""
    from envace.jobs.sft import sft as job
    from envace.training.recipe import load_recipe

    changed = load_recipe(recipe, overrides or ())
    show(job(changed, out=out, resume=resume, display=display_for(as_json)), as_json, kind="sft")


@app.command()
def train(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    out: Out = None,
    resume: Resume = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what the run would take and lacks; train nothing.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Train by role-wise GRPO."""
    from envace.jobs.train import train as job
    from envace.training.recipe import load_recipe

    changed = load_recipe(recipe, overrides or ())
    if dry_run:
        from envace.jobs.plan import plan

        show(plan(changed, out=out, resume=resume), as_json, kind="plan")
        return
    show(job(changed, out=out, resume=resume, display=display_for(as_json)), as_json, kind="train")


@app.command(name="eval")
def evaluate(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    model: Annotated[
        str | None,
        typer.Option(help="starter, a model or run folder, URL#NAME, gold, or nothing; default the recipe's."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="A run folder to add the result to.")] = None,
    as_json: Json = False,
) -> None:
    """Measure success in the real environment, and rehearsal fidelity."""
    from envace.jobs.evaluate import evaluate as job
    from envace.training.recipe import load_recipe

    show(
        job(load_recipe(recipe, overrides or ()), model=model, out=out, display=display_for(as_json)),
        as_json,
        kind="eval",
    )


@app.command()
def export(
    model: Annotated[str, typer.Argument(help="A run or model folder, starter, smollm2, or a hub name.")],
    out: Annotated[Path, typer.Option(help="The folder to write; it must not hold anything.")],
    dtype: Annotated[
        str | None,
        typer.Option(help="bfloat16, float16 or float32; default what the weights are stored in.", show_default=False),
    ] = None,
    best: Annotated[bool, typer.Option("--best", help="Of a run, the weights of its best evaluation.")] = False,
    as_json: Json = False,
) -> None:
    """Write merged weights as a plain folder for transformers, vLLM and llama.cpp."""
    from envace.jobs.export import export as job

    show(job(model, out=out, dtype=dtype, best=best), as_json, kind="export")


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(help="One run folder, or several to compare.")],
    out: Annotated[Path | None, typer.Option(help="Where to write the page.")] = None,
    as_json: Json = False,
) -> None:
    """Write report.html from run folders alone."""
    from envace.report.page import report as job

    show({"report": str(job(runs, out=out))}, as_json, kind="report")


@app.command()
def audit(
    world: Annotated[str, typer.Argument(help="starter, or the folder of an environment package.")] = "starter",
    count: Annotated[int, typer.Option(min=1, help="Scenarios of each split.")] = 300,
    as_json: Json = False,
) -> None:
    """Prove that scenarios can be solved and cannot be had for free. Exit code 1 if any falls short."""
    from envace.jobs.audit import audit as job

    result = job(world, count=count, display=display_for(as_json))
    show(result, as_json, kind="audit")
    if result["findings"]:
        raise typer.Exit(1)


@app.command()
def doctor(
    overrides: Overrides = None,
    model: Annotated[
        str, typer.Option(help="starter, smollm2, a model or run folder, a hub name, or URL#NAME.")
    ] = "starter",
    tokenizer: Annotated[
        str | None, typer.Option(help="Of an endpoint's model: also check the API that speaks in token ids.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Check what holds on a model or an endpoint: tokens, turns, calls, logprobs. Exit code 1 if anything does not."""
    from envace.jobs.doctor import doctor as job
    from envace.training.recipe import load_recipe

    result = job(model, tokenizer=tokenizer, recipe=load_recipe({}, overrides or ()))
    show(result, as_json, kind="doctor")
    if not result["ok"]:
        raise typer.Exit(1)


data = typer.Typer(help="Data sets of conversations with checklists: check, convert.", no_args_is_help=True)
app.add_typer(data, name="data")

Source = Annotated[str, typer.Argument(help="A .json, .jsonl or .parquet file, a folder of them, or hub:OWNER/NAME.")]
Normalise = Annotated[
    bool, typer.Option("--normalise", help="Scale the weights of a turn to a sum of 1, instead of leaving rows out.")
]

Sft = Annotated[bool, typer.Option("--sft", help="Rows are to be imitated, and need no checklist.")]


@data.command(name="check")
def data_check(
    source: Source,
    model: Annotated[str | None, typer.Option(help="Whose tokenizer counts the prompts.")] = None,
    max_prompt: Annotated[int | None, typer.Option(min=1, help="Tokens that a prompt may have.")] = None,
    normalise: Normalise = False,
    sft: Sft = False,
    as_json: Json = False,
) -> None:
    """Say which rows can be used, and why the others cannot. Exit code 1 if none can."""
    from envace.jobs.data import check_data

    result = check_data(source, model=model, max_prompt=max_prompt, normalise=normalise, sft=sft)
    show(result, as_json, kind="data")
    if not result["kept"]:
        raise typer.Exit(1)


@data.command(name="convert")
def data_convert(
    source: Source,
    out: Annotated[Path, typer.Argument(help="A .jsonl or .parquet file.")],
    normalise: Normalise = False,
    sft: Sft = False,
    as_json: Json = False,
) -> None:
    """Write the rows that can be used in our own form. Exit code 1 if none can."""
    from envace.jobs.data import convert_data

    result = convert_data(source, out, normalise=normalise, sft=sft)
    show(result, as_json, kind="data")
    if not result["kept"]:
        raise typer.Exit(1)


@app.command()
def recipe() -> None:
    """Print the starter recipe, to copy and change."""
    from envace.jobs.demo import RECIPE

    typer.echo(RECIPE.read_text(encoding="utf-8"), nl=False)
