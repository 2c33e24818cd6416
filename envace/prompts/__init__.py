"""Every prompt that envace writes itself, one text file each in this folder; a recipe can put others in their place.

A prompt is a jinja2 template. What stands for somebody's text is filled in as JSON, so it cannot end its own string.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from jinja2 import StrictUndefined, Template, TemplateError, meta
from jinja2.sandbox import SandboxedEnvironment

from envace.errors import ConfigError

FOLDER = Path(__file__).parent
VALUES: dict[str, tuple[set[str], set[str]]] = {
    "rehearse_system": (set(), {"tools", "rules", "references", "history", "call"}),
    "rehearse_user": ({"call"}, {"tools", "rules", "references", "history", "call"}),
}
"""Prompt -> the values that it must show, and those that it may."""


@dataclass(frozen=True)
class Prompts:
    """The prompts of a run."""

    templates: Mapping[str, Template]

    def render(self, name: str, **values: str) -> str:
        """A prompt with its values filled in.

        Raises:
            ConfigError: The template fails on them.
        """
        try:
            return self.templates[name].render(**values).strip()
        except TemplateError as error:
            raise ConfigError(f"prompts.{name} cannot be filled in: {error}") from None


def load_prompts(overrides: Mapping[str, Path | str] | None = None) -> Prompts:
    """The prompts of this folder, those named in `overrides` read from other files.

    Raises:
        ConfigError: An unknown name, a file that cannot be read, or a template that shows not what it must.
    """
    replaced = dict(overrides or {})
    for name in replaced:
        if name not in VALUES:
            near = difflib.get_close_matches(name, VALUES, n=1)
            hint = f"Did you mean {near[0]}?" if near else f"There are {', '.join(sorted(VALUES))}."
            raise ConfigError(f"There is no prompt {name!r}. {hint}")
    return Prompts({name: _read(name, Path(replaced.get(name, FOLDER / f"{name}.md"))) for name in VALUES})


def _read(name: str, path: Path) -> Template:
    environment = SandboxedEnvironment(undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    needed, allowed = VALUES[name]
    try:
        text = path.read_text(encoding="utf-8")
        used = meta.find_undeclared_variables(environment.parse(text))
    except (OSError, UnicodeDecodeError, TemplateError) as error:
        raise ConfigError(f"prompts.{name}: cannot use {path}: {error}") from None
    if used - allowed:
        raise ConfigError(
            f"prompts.{name}: {path} asks for {sorted(used - allowed)}; it can show {', '.join(sorted(allowed))}."
        )
    if needed - used:
        raise ConfigError(f"prompts.{name}: {path} does not show {', '.join(sorted(needed - used))}, as it must.")
    return environment.from_string(text)
