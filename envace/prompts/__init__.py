"""The words that models are asked with: a text file each, with `{{ placeholders }}` of jinja2.

A file of one's own replaces one of these by its name. It must use every placeholder that the bundled one uses, for a
prompt that leaves out, say, the questions would ask nothing, and nobody would notice.
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
SUFFIX = ".md"
NAMES = frozenset(path.stem for path in FOLDER.glob(f"*{SUFFIX}"))
"""The prompts there are."""

_ENVIRONMENT = ImmutableSandboxedEnvironment(undefined=StrictUndefined, keep_trailing_newline=False, autoescape=False)


class Prompts:
    """Prompts by name, ready to be filled in."""

    def __init__(self, texts: Mapping[str, str]) -> None:
        self.texts = MappingProxyType(dict(texts))
        """The texts as they stand in their files."""
        self._templates: dict[str, Template] = {name: _ENVIRONMENT.from_string(text) for name, text in texts.items()}

    def fill(self, name: str, **values: str) -> str:
        """A prompt with its placeholders filled in. What is filled in is never read as a template."""
        return self._templates[name].render(values)


def load_prompts(overrides: Mapping[str, Path | str] | None = None) -> Prompts:
    """The bundled prompts, some of them replaced.

    Args:
        overrides: Name -> file.

    Raises:
        ConfigError: No prompt has that name (it names the nearest), the file cannot be read, is no template, or its
            placeholders are not those of the bundled prompt.
    """
    texts = {name: (FOLDER / f"{name}{SUFFIX}").read_text(encoding="utf-8") for name in sorted(NAMES)}
    for name, path in (overrides or {}).items():
        if name not in NAMES:
            near = difflib.get_close_matches(name, NAMES, n=1)
            hint = f"Did you mean {near[0]}?" if near else f"There are {', '.join(sorted(NAMES))}."
            raise ConfigError(f"There is no prompt {name!r}. {hint}")
        texts[name] = _read(name, Path(path), _placeholders(texts[name]))
    return Prompts(texts)


def _read(name: str, path: Path, needed: set[str]) -> str:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path} for the prompt {name!r}: {error}") from None
    try:
        found = _placeholders(text)
    except TemplateError as error:
        raise ConfigError(f"{path} is no template for the prompt {name!r}: {error}.") from None
    for what, names in (("does not use", needed - found), ("uses the unknown", found - needed)):
        if names:
            listed = ", ".join(f"{{{{ {one} }}}}" for one in sorted(names))
            raise ConfigError(
                f"{path} {what} {listed}; the prompt {name!r} is filled with {', '.join(sorted(needed))}."
            )
    return text


def _placeholders(text: str) -> set[str]:
    return meta.find_undeclared_variables(_ENVIRONMENT.parse(text))
