"""JSON lines on disk: appended whole, read up to the last whole line."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from envace.errors import RunError


def append_lines(path: Path, records: Iterable[dict[str, Any]]) -> None:
    """Append records, flushed to the disk together. Raises RunError when the disk refuses; what stood there stays."""
    text = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
    size = path.stat().st_size if path.exists() else 0
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        if path.exists():
            os.truncate(path, size)
        raise RunError(f"cannot write {path}: {error.strerror}. What was written before is intact.") from error


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Every whole record. A last line without its end is what a killed process leaves, and is passed over.

    Raises:
        RunError: A line before the last is not a JSON object.
    """
    if not path.exists():
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                return
            yield _record(path, number, line)


def _record(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except ValueError:  # not JSON, or not UTF-8
        raise RunError(f"{path}:{number} is not JSON; the run folder is damaged.") from None
    if not isinstance(record, dict):
        raise RunError(f"{path}:{number} is not a JSON object; the run folder is damaged.")
    return record


def truncate_lines(path: Path, keep: Callable[[dict[str, Any]], bool]) -> None:
    """Rewrite a file with the records to keep; the old file stays until the new one is whole."""
    if not path.exists():
        return
    kept = [record for record in read_lines(path) if keep(record)]
    partial = path.with_suffix(".partial")
    partial.write_text("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in kept), encoding="utf-8")
    os.replace(partial, path)
