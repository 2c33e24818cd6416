"""The words that models are asked with, one text file each in this folder, with `{{ placeholders }}` of jinja2.

A file of one's own takes the place of one of them. It must show what the prompt is for: one that leaves out, say, the
questions would ask nothing, and nobody would notice.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from jinja2 import StrictUndefined, Template, TemplateError, meta
from jinja2.sandbox import ImmutableSandboxedEnvironment

from envace.errors import ConfigError

FOLDER = Path(__file__).parent

_REHEARSE = frozenset({"tools", "rules", "references", "history", "call"})
_JUDGE = frozenset({"fence", "tools", "before", "turn", "questions"})
VALUES: Mapping[str, tuple[frozenset[str], frozenset[str]]] = MappingProxyType(
    {
        "rehearse_system": (frozenset(), _REHEARSE),
        "rehearse_user": (frozenset({"call"}), _REHEARSE),
        "judge_turn": (_JUDGE, _JUDGE),
        "judge_item": (_JUDGE, _JUDGE),
    }
)
"""Prompt -> the values that it must show, and those that it may."""

_ENVIRONMENT = ImmutableSandboxedEnvironment(undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)


class Prompts:
    """Prompts by name, ready to be filled in."""

    def __init__(self, texts: Mapping[str, str]) -> None:
        self.texts = MappingProxyType(dict(texts))
        """The texts as they stand in their files."""
        self._templates: dict[str, Template] = {name: _ENVIRONMENT.from_string(text) for name, text in texts.items()}

    def fill(self, name: str, **values: str) -> str:
        """A prompt with its values filled in; these are never read as a template.

        Raises:
            ConfigError: The template fails on them.
        """
        try:
            return self._templates[name].render(values).strip()
        except TemplateError as error:
            raise ConfigError(f"prompts.{name} cannot be filled in: {error}") from None


def load_prompts(overrides: Mapping[str, Path | str] | None = None) -> Prompts:
    """The prompts of this folder, some of them replaced.

    Args:
        overrides: Name -> file.

    Raises:
        ConfigError: No prompt has that name (it names the nearest), the file cannot be read, is no template, or does
            not show what it must.
    """
    texts = {name: (FOLDER / f"{name}.md").read_text(encoding="utf-8") for name in VALUES}
    for name, path in (overrides or {}).items():
        if name not in VALUES:
            near = difflib.get_close_matches(name, VALUES, n=1)
            hint = f"Did you mean {near[0]}?" if near else f"There are {', '.join(sorted(VALUES))}."
            raise ConfigError(f"There is no prompt {name!r}. {hint}")
        texts[name] = _read(name, Path(path))
    return Prompts(texts)


def _read(name: str, path: Path) -> str:
    needed, allowed = VALUES[name]
    try:
        text = path.read_text(encoding="utf-8")
        used = meta.find_undeclared_variables(_ENVIRONMENT.parse(text))
    except (OSError, UnicodeDecodeError, TemplateError) as error:
        raise ConfigError(f"prompts.{name}: cannot use {path}: {error}") from None
    if used - allowed:
        raise ConfigError(
            f"prompts.{name}: {path} asks for {sorted(used - allowed)}; it can show {', '.join(sorted(allowed))}."
        )
    if needed - used:
        raise ConfigError(f"prompts.{name}: {path} does not show {', '.join(sorted(needed - used))}, as it must.")
    return text
