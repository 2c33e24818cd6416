"""Rows as they stand in a source: .json, .jsonl and .parquet files, folders of them, data sets on the hub."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from envace.errors import DataError

SUFFIXES = (".json", ".jsonl", ".parquet")
HUB = "hub:"
"""Begins the name of a data set on the hub: `hub:owner/name`, or `hub:owner/name/split`."""
REACH_SECONDS = 5.0
"""How long the hub may take to accept a connection."""


@dataclass(frozen=True)
class Unreadable:
    """Stands for a line that is no JSON."""

    detail: str


def is_dataset(name: str) -> bool:
    """Whether a name is that of a data set: a data file, there or not, or one on the hub."""
    return name.startswith(HUB) or Path(name).suffix in SUFFIXES


def read_rows(source: str | Path) -> Iterator[Any]:
    """Rows as they stand in a source. Raises DataError where it cannot be read as a whole."""
    for path in _files(source):
        yield from _READERS[path.suffix](path)


def _files(source: str | Path) -> list[Path]:
    if str(source).startswith(HUB):
        return _from_hub(str(source).removeprefix(HUB))
    path = Path(source)
    if path.is_dir():
        found = sorted(each for each in path.iterdir() if each.suffix in SUFFIXES)
        if not found:
            raise DataError(f"{path} holds no {', '.join(SUFFIXES)} file.")
        return found
    if path.suffix not in SUFFIXES:
        raise DataError(f"{path} is no data file; give a {', '.join(SUFFIXES)} file, or {HUB}OWNER/NAME.")
    if not path.is_file():
        raise DataError(f"{path} is not there.")
    return [path]


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read {path}: {error}") from None


def _json_rows(path: Path) -> Iterator[Any]:
    try:
        value = json.loads(_read_text(path))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is no JSON ({error}). For one row a line, name it .jsonl.") from None
    if isinstance(value, Mapping) and isinstance(value.get("data"), list):
        value = value["data"]
    yield from value if isinstance(value, list) else [value]


def _json_lines(path: Path) -> Iterator[Any]:
    for line in _read_text(path).split("\n"):  # not splitlines: JSON text may hold other line ends
        if line.strip():
            try:
                yield json.loads(line)
            except (ValueError, RecursionError) as error:
                yield Unreadable(f"no JSON: {error}")


def _parquet_rows(path: Path) -> Iterator[Any]:
    arrow, parquet = arrow_modules()
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=256):
                yield from (_without_nulls(row) for row in batch.to_pylist())
    except (OSError, arrow.ArrowException) as error:
        raise DataError(f"cannot read {path}: {' '.join(str(error).split())[:200]}") from None


def _without_nulls(value: Any) -> Any:
    """A null under a key is how Arrow writes a key that a row does not have but another has."""
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value


_READERS: dict[str, Callable[[Path], Iterator[Any]]] = {
    ".json": _json_rows,
    ".jsonl": _json_lines,
    ".parquet": _parquet_rows,
}


def arrow_modules() -> tuple[Any, Any]:
    """`pyarrow` and `pyarrow.parquet`. Raises DataError where they are not installed."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise DataError("Parquet files need pyarrow, which is not installed. Run: pip install 'envace[data]'") from None
    return pyarrow, pyarrow.parquet


def _from_hub(name: str) -> list[Path]:
    """Download the data files of a hub data set; with a split, those whose path has it as a word. Never run online."""
    owner, _, rest = name.partition("/")
    repository, _, split = rest.partition("/")
    if not owner or not repository:
        raise DataError(f"{HUB}{name} names no data set; write {HUB}OWNER/NAME or {HUB}OWNER/NAME/SPLIT.")
    try:
        import huggingface_hub
    except ImportError:
        raise DataError("The hub needs huggingface_hub. Run: pip install huggingface_hub") from None
    full = f"{owner}/{repository}"
    _check_reach(huggingface_hub.constants.ENDPOINT, name)
    try:
        listed = sorted(huggingface_hub.HfApi().list_repo_files(full, repo_type="dataset"))
        chosen = _of_split([file for file in listed if Path(file).suffix in SUFFIXES], split, full)
        return [Path(huggingface_hub.hf_hub_download(full, file, repo_type="dataset")) for file in chosen]
    except DataError:
        raise
    except Exception as error:  # noqa: BLE001 - the client's and its transport's many kinds; the boundary is here
        said = " ".join(str(error).split())[:200]
        raise DataError(f"cannot read {HUB}{name}: {type(error).__name__}: {said}") from None


def _check_reach(endpoint: str, name: str) -> None:
    """The client tries a host that cannot be found for half a minute; a connection tells at once."""
    address = urlsplit(endpoint)
    if any(os.environ.get(key) for key in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")):
        return
    try:
        port = address.port or (443 if address.scheme == "https" else 80)
        socket.create_connection((address.hostname or "", port), timeout=REACH_SECONDS).close()
    except OSError as error:
        raise DataError(
            f"cannot read {HUB}{name}: {address.hostname} does not answer ({error}). Download the files where there is "
            "a network, and name their folder."
        ) from None


def _of_split(files: Sequence[str], split: str, name: str) -> list[str]:
    words = {
        file: file.replace("/", " ").replace("-", " ").replace(".", " ").replace("_", " ").split() for file in files
    }
    chosen = [file for file in files if not split or split in words[file]]
    if not chosen:
        raise DataError(f"{name} has no data file{f' of split {split!r}' if split else ''}; it has {', '.join(files)}.")
    return chosen
