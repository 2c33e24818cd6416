"""A run folder: config.json, env.json, metrics.jsonl, trajectories.jsonl, checkpoints/, results.json, report.html."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from envace.errors import RunError
from envace.runs.lines import append_lines, read_lines, truncate_lines

PACKAGES = ("envace", "torch", "transformers", "tokenizers", "numpy")


class RunFolder:
    """Reads and writes one run folder."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config_file = path / "config.json"
        self.metrics_file = path / "metrics.jsonl"
        self.trajectories_file = path / "trajectories.jsonl"
        self.results_file = path / "results.json"
        self.report_file = path / "report.html"
        self.checkpoints = path / "checkpoints"
        self._watchers: list[Callable[[dict[str, Any]], None]] = []

    @classmethod
    def create(
        cls, path: Path, config: dict[str, Any], *, resume: bool, inputs: dict[str, str] | None = None
    ) -> RunFolder:
        """Start a run, or go on with one.

        Args:
            path: The folder.
            config: The resolved recipe.
            resume: Whether to go on with a run that is there.
            inputs: Hashes of what the recipe only names by a path (environments, scenarios, starting weights).

        Raises:
            RunError: The folder holds a run and `resume` is not asked for, or a run of another recipe or other inputs.
        """
        folder = cls(path)
        if path.exists() and not path.is_dir():
            raise RunError(f"{path} is a file; a run is written to a folder.")
        if not folder.config_file.exists():
            # The config comes last: it is what makes a folder a run, so a run that was killed here has not begun.
            folder.write_json(path / "env.json", {**environment_facts(), "inputs": inputs or {}})
            folder.write_json(folder.config_file, config)
            return folder
        if not resume:
            cls.check_free(path)
        different = _differences(folder.config(), config)
        if different:
            raise RunError(
                f"{path} is a run of another recipe; different: {', '.join(different)}. Resume with the recipe it "
                "was started with, or name another folder with --out."
            )
        before = _read_object(path / "env.json").get("inputs", {}) if inputs else {}
        changed = [name for name in before if before[name] != (inputs or {}).get(name)]
        if changed:
            raise RunError(
                f"{path}: {', '.join(changed)} changed since the run was started, so it cannot go on as that run. "
                "Restore what it was started with, or name another folder with --out."
            )
        return folder

    @classmethod
    def check_free(cls, path: Path) -> None:
        """Raise RunError where a run is already there."""
        if cls(path).config_file.exists():
            raise RunError(
                f"{path} already holds a run. Go on with it (--resume, resume=True), or name another folder (--out)."
            )

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """Open an existing run. Raises RunError when there is none."""
        if not (path / "config.json").exists():
            inside = sorted(str(found.parent) for found in path.glob("*/env.json"))
            hint = f" These within are: {', '.join(inside[:5])}." if inside else ""
            raise RunError(f"{path} is not a run folder: it has no config.json.{hint}")
        return cls(path)

    def config(self) -> dict[str, Any]:
        """The resolved recipe."""
        return _read_object(self.config_file)

    def metrics(self, kind: str | None = None) -> list[dict[str, Any]]:
        """Metric records in order, of one `kind` (`sft`, `update`, `eval`) or of all."""
        return [r for r in read_lines(self.metrics_file) if kind is None or r.get("kind") == kind]

    def log(self, record: dict[str, Any]) -> None:
        """Append one metric record, and show it to whoever watches."""
        append_lines(self.metrics_file, [record])
        for watcher in self._watchers:
            watcher(record)

    def watch(self, watcher: Callable[[dict[str, Any]], None]) -> None:
        """Call `watcher` with every metric record from now on, once it is on the disk."""
        self._watchers.append(watcher)

    def unwatch(self, watcher: Callable[[dict[str, Any]], None]) -> None:
        """Call it no longer."""
        self._watchers.remove(watcher)

    def log_trajectories(self, records: list[dict[str, Any]]) -> None:
        """Append trajectories."""
        append_lines(self.trajectories_file, records)

    def trajectories(self) -> list[dict[str, Any]]:
        """All recorded trajectories."""
        return list(read_lines(self.trajectories_file))

    def results(self) -> dict[str, Any]:
        """Final results; empty before the run has any."""
        return _read_object(self.results_file) if self.results_file.exists() else {}

    def rewind(self, update: int) -> None:
        """Forget records of later updates than the checkpoint to go on from."""
        for path in (self.metrics_file, self.trajectories_file):
            truncate_lines(path, lambda record: record.get("update", 0) <= update)

    def rewind_steps(self, step: int) -> None:
        """Forget records of later warm-up steps than the checkpoint to go on from."""
        truncate_lines(self.metrics_file, lambda record: record.get("step", 0) <= step)

    def write_json(self, path: Path, value: dict[str, Any]) -> None:
        """Write a JSON file whole or not at all. Raises RunError when the disk refuses."""
        partial = path.with_name(path.name + ".partial")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            partial.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
            os.replace(partial, path)
        except OSError as error:
            partial.unlink(missing_ok=True)
            raise RunError(f"cannot write {path}: {error.strerror}.") from error


def environment_facts() -> dict[str, Any]:
    """Versions, platform and code revision, so that a run can say what produced it."""
    return {
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "packages": {name: _version(name) for name in PACKAGES},
        "revision": _revision(),
    }


def data_hash(texts: list[str]) -> str:
    """A short SHA-256 over texts in order."""
    digest = hashlib.sha256()
    for text in texts:
        digest.update(text.encode())
        digest.update(b"\0")
    return digest.hexdigest()[:16]


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _revision() -> str:
    """The git revision of the code, with a mark when it has local changes; empty outside a checkout."""
    here = Path(__file__).parent
    try:
        head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=here, capture_output=True, text=True, timeout=5)
        changed = subprocess.run(["git", "status", "--porcelain"], cwd=here, capture_output=True, text=True, timeout=5)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return "" if head.returncode else head.stdout.strip() + ("+changes" if changed.stdout.strip() else "")


def _read_object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RunError(f"cannot read {path}: {error}") from None
    if not isinstance(value, dict):
        raise RunError(f"{path} does not hold a JSON object.")
    return value


def _differences(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> list[str]:
    """Dotted names of the keys in which two recipes differ."""
    names = []
    for key in sorted(set(old) | set(new)):
        left, right = old.get(key), new.get(key)
        if isinstance(left, dict) and isinstance(right, dict):
            names += _differences(left, right, f"{prefix}{key}.")
        elif left != right:
            names.append(f"{prefix}{key} ({left!r} there, {right!r} here)")
    return names
