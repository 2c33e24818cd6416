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
    content = b"".join(map(_line, records))
    size = _whole_size(path)
    try:
        if path.exists() and path.stat().st_size != size:
            os.truncate(path, size)  # a last line without its end, left by a killed process
        with path.open("ab") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        if path.exists():
            os.truncate(path, size)
        raise RunError(f"cannot write {path}: {error.strerror}. What was written before is intact.") from error


def _line(record: dict[str, Any]) -> bytes:
    """A record as a line; text that UTF-8 cannot write (half a surrogate pair) is escaped."""
    try:
        return json.dumps(record, ensure_ascii=False).encode() + b"\n"
    except UnicodeEncodeError:
        return json.dumps(record).encode() + b"\n"


def _whole_size(path: Path) -> int:
    """Bytes up to the end of the last whole line."""
    if not path.exists():
        return 0
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        if size == 0:
            return 0
        file.seek(size - 1)
        if file.read(1) == b"\n":
            return size
        file.seek(0)
        return file.read().rfind(b"\n") + 1


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
    except UnicodeDecodeError:
        raise RunError(f"{path}:{number} is not UTF-8; the run folder is damaged.") from None
    except ValueError:
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
    try:
        partial.write_bytes(b"".join(map(_line, kept)))
        os.replace(partial, path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise RunError(f"cannot write {path}: {error.strerror}. What was written before is intact.") from error
