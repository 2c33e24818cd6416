"""What the documentation names exists: files, links, verbs, options, Python calls, recipe keys."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer.main

import envace
from envace.cli.app import app
from envace.rewards import WEIGHTS
from envace.training.recipe import load_recipe

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
TOP = ("envace/", "tests/", "docs/", "bench/", "examples/", ".ci/")
_COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]
VERBS = {
    f"{name} {inner}".strip(): command
    for name, group in _COMMANDS.items()
    for inner, command in getattr(group, "commands", {"": group}).items()
}


def pages() -> pytest.MarkDecorator:
    return pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def anchors(page: Path) -> set[str]:
    """Anchors of a page's headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def commands(text: str) -> Iterator[tuple[str, list[str]]]:
    """Verbs and arguments of the command lines in code blocks and code spans."""
    lines = re.findall(r"^ {4}(envace .*)$", text, re.MULTILINE) + re.findall(r"`(envace [^`]*)`", text)
    for line in lines:
        words = line.split("#")[0].split()[1:]
        size = 2 if " ".join(words[:2]) in VERBS else 1
        yield " ".join(words[:size]), words[size:]


@pages()
def test_every_link_leads_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if target.startswith("http"):
            continue
        name, _, anchor = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        assert path.exists(), target
        assert not anchor or anchor in anchors(path), target


@pages()
def test_every_path_named_in_code_exists(page: Path) -> None:
    spans = re.findall(r"`([^`\s]+)`", page.read_text(encoding="utf-8"))
    paths = [span for span in spans if span.startswith(TOP)]
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_the_file_tree_is_true_and_whole() -> None:
    tree = README.split("## Where things are")[1].split("```")[1]
    named = {line.split()[0].rstrip("/") for line in tree.strip().splitlines()}
    assert [path for path in named if not (ROOT / path).exists()] == []
    packages = {f"envace/{init.parent.name}" for init in (ROOT / "envace").glob("*/__init__.py")}
    assert packages - named == set()


@pages()
def test_every_verb_and_option_exists(page: Path) -> None:
    for verb, arguments in commands(page.read_text(encoding="utf-8")):
        assert verb in VERBS, verb
        options = {option for parameter in VERBS[verb].params for option in parameter.opts}
        for argument in arguments:
            assert not argument.startswith("--") or argument in options, f"{verb} {argument}"


def test_the_table_of_verbs_has_all_verbs_with_all_options() -> None:
    rows = re.findall(r"^\| `envace ([a-z]+(?: [a-z]+)?)[^`]*` \|[^|]*\|(.*)\|$", README, re.MULTILINE)
    listed = {verb: set(re.findall(r"--[\w-]+", options)) for verb, options in rows}
    real = {
        verb: {o for p in command.params for o in p.opts if o.startswith("--") and o != "--help"}
        for verb, command in VERBS.items()
    }
    assert listed == real


def test_the_five_commands_are_those_of_the_example() -> None:
    recipe = (ROOT / "examples" / "my_environment" / "recipe.yaml").read_text(encoding="utf-8")
    lines = [line.removeprefix("# ") for line in recipe.splitlines() if line.startswith("# envace ")]
    assert len(lines) == 5
    assert [line for line in lines if f"    {line}\n" not in README] == []


@pages()
def test_recipe_changes_that_are_shown_are_valid(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    change = re.compile(r"[a-z_.]+=[^\s`]+")
    spans = re.findall(rf"`({change.pattern}(?: {change.pattern})*)`", text)
    changes = change.findall(" ".join([*re.findall(r"^ {4}(envace .*)$", text, re.MULTILINE), *spans]))
    load_recipe(None, [word for word in changes if word != "key=value"])


def test_the_python_calls_exist() -> None:
    (block,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    nodes = list(ast.walk(ast.parse(block)))
    functions = {f"envace.{name}": getattr(envace, name) for name in ("load_recipe", "train", "evaluate", "audit")}
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("envace"):
            functions |= {a.name: getattr(importlib.import_module(str(node.module)), a.name) for a in node.names}
    called = {ast.unparse(node.func): node for node in nodes if isinstance(node, ast.Call)}
    assert set(functions) <= set(called)
    for name, function in functions.items():
        keywords = {keyword.arg: None for keyword in called[name].keywords if keyword.arg}
        inspect.signature(function).bind(*called[name].args, **keywords)
    assert set(re.findall(r"`envace\.(\w+)`", README)) - {"errors"} <= set(envace.__all__)


def test_the_results_have_their_markers() -> None:
    start, end = README.index("<!-- results:start -->"), README.index("<!-- results:end -->")
    assert start < end
    assert README.index("## Results") < start


def test_weights_in_the_table_of_rewards_are_the_defaults() -> None:
    page = (ROOT / "docs" / "rewards.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| `(\w+)` \| ([\d.]+) \|", page, re.MULTILINE)
    assert {name: float(weight) for name, weight in listed} == WEIGHTS
