"""Trackers: what goes to metrics.jsonl also goes to TensorBoard, Weights & Biases or Trackio. None ever ends a run."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import math
import threading
import uuid
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, Protocol

from envace.errors import ConfigError
from envace.runs.folder import RunFolder

TrackerName = Literal["none", "tensorboard", "wandb", "trackio"]
PROJECT = "envace"
IDENTITY = "tracker.json"
"""In the run folder: as which run the tracker knows it, so that a resumed run goes on there."""
CLOSE_SECONDS = 60.0
"""How long an end waits for a tracker to hand over what it holds back."""


class Tracker(Protocol):
    """One run of a tracker."""

    def log(self, numbers: dict[str, float], step: int) -> None:
        """Numbers of one record, at the number of its update (of its step, in a warm-up)."""

    def close(self) -> None:
        """Hand over what is held back."""


def check_tracker(name: TrackerName) -> None:
    """Raise ConfigError where the tracker's package is not installed."""
    if name != "none" and importlib.util.find_spec(name) is None:
        raise ConfigError(f"tracker {name} needs the package {name}. Run: pip install {name}")


@contextlib.contextmanager
def tracking(
    folder: RunFolder,
    name: TrackerName,
    *,
    config: dict[str, Any],
    done: int,
    project: str | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> Iterator[Guard | None]:
    """Hand every record that a run logs to a tracker, until the run ends in whatever way.

    Args:
        folder: The run; what is logged to it is tracked.
        name: Which tracker.
        config: The resolved recipe, without anything secret; it is sent once.
        done: Updates (or steps) that the run goes on after; what the tracker holds of later ones is made again.
        project: What the tracker files the run under; None is `envace`.
        say: Told, once, that the tracker fails.

    Yields:
        What counts failures; None without a tracker.

    Raises:
        ConfigError: The package is missing, or the tracker does not begin.
    """
    if name == "none":
        yield None
        return
    guard = Guard(name, _open(folder, name, config, done, project or PROJECT), say)
    folder.watch(guard.log)
    try:
        yield guard
    finally:
        folder.unwatch(guard.log)
        guard.close()


class Guard:
    """A tracker that may fail: the first failure is said, all are counted, none goes on to the run."""

    def __init__(self, name: str, tracker: Tracker, say: Callable[[str], None]) -> None:
        self._name, self._tracker, self._say = name, tracker, say
        self.failures = 0

    def log(self, record: dict[str, Any]) -> None:
        """Send the numbers of a metrics record."""
        numbers = numbers_of(record)
        step = int(record.get("step", record.get("update", 0)))
        if numbers:
            self._try(lambda: self._tracker.log(numbers, step))

    def close(self) -> None:
        """End the tracker's run; a tracker that does not answer is left behind after a while."""
        closing = threading.Thread(target=self._try, args=(self._tracker.close,), daemon=True)
        closing.start()
        closing.join(CLOSE_SECONDS)
        if closing.is_alive():
            self._failed(f"it did not close within {CLOSE_SECONDS:.0f} s")

    def _try(self, call: Callable[[], None]) -> None:
        try:
            with _quiet():
                call()
        except Exception as error:  # noqa: BLE001 - whatever a foreign tracker raises, the run is worth more
            self._failed(f"{type(error).__name__}: {error}")

    def _failed(self, why: str) -> None:
        self.failures += 1
        if self.failures == 1:
            said = " ".join(why.split())[:200]
            self._say(f"tracker {self._name} fails ({said}); the run goes on, and metrics.jsonl holds everything")


def numbers_of(record: dict[str, Any]) -> dict[str, float]:
    """The finite numbers of a metrics record, under their own names; names of nested ones are joined by `/`.

    Of an alarm, `alarm/NAME` is the value that set it off. `update` and `step` are where the numbers stand.
    """
    if record.get("kind") == "alarm":
        record = {f"alarm/{record['alarm']}": record["value"]}
    return dict(_flat({key: value for key, value in record.items() if key not in ("kind", "update", "step")}, ""))


def _flat(value: Any, name: str) -> Iterator[tuple[str, float]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _flat(inner, f"{name}/{key}" if name else str(key))
    elif isinstance(value, int | float) and math.isfinite(value):
        yield name, float(value)


def _open(folder: RunFolder, name: TrackerName, config: dict[str, Any], done: int, project: str) -> Tracker:
    check_tracker(name)
    makers: dict[str, Callable[[], Tracker]] = {
        "tensorboard": lambda: TensorBoard(folder.path, config, done),
        "wandb": lambda: WandB(folder.path, _identity(folder, name), config, project),
        "trackio": lambda: Trackio(folder.path, _identity(folder, name), config, project),
    }
    try:
        with _quiet():
            return makers[name]()
    except Exception as error:  # its own words for no login, no network, no disk
        said = " ".join(str(error).split())[:300]
        raise ConfigError(
            f"tracker {name} does not begin: {type(error).__name__}: {said}. Mend that, or set tracker=none."
        ) from error


def _identity(folder: RunFolder, name: str) -> str:
    """As which run a tracker knows this folder; made at first."""
    path = folder.path / IDENTITY
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        known = json.loads(path.read_text(encoding="utf-8"))
        if known["tracker"] == name:
            return str(known["run"])
    run = uuid.uuid4().hex[:12]
    folder.write_json(path, {"tracker": name, "run": run})
    return run


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """What trackers print on standard output is dropped: that is for the result. Their warnings are theirs."""
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


class TensorBoard:
    """Event files in RUN/tensorboard. A resumed run takes back what was written after its checkpoint."""

    def __init__(self, path: Path, config: dict[str, Any], done: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(path / "tensorboard"), purge_step=done + 1 if done else 0)
        if not done:
            text = json.dumps(config, indent=2, ensure_ascii=False)
            self._writer.add_text("config", "\n".join(f"    {line}" for line in text.splitlines()), 0)

    def log(self, numbers: dict[str, float], step: int) -> None:
        """A scalar each, on the disk at once: a killed run has what it logged."""
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        """Write the rest."""
        self._writer.close()


class WandB:
    """Weights & Biases: online, or offline into RUN/wandb with WANDB_MODE=offline. It drops steps it already has."""

    def __init__(self, path: Path, run: str, config: dict[str, Any], project: str) -> None:
        import wandb

        # Beside numbers it would send the command line, the code's repository and all output: any may hold a secret.
        settings = wandb.Settings(
            console="off", disable_git=True, save_code=False, x_disable_meta=True, x_disable_stats=True, silent=True
        )
        self._run: Any = wandb.init(
            project=project, id=run, name=path.name, dir=str(path), config=config, resume="allow", settings=settings
        )

    def log(self, numbers: dict[str, float], step: int) -> None:
        """One row of its history."""
        self._run.log(numbers, step=step)

    def close(self) -> None:
        """Upload the rest."""
        self._run.finish()


class Trackio:
    """Trackio on this machine, in its own folder (TRACKIO_DIR), or where TRACKIO_SPACE_ID says."""

    def __init__(self, path: Path, run: str, config: dict[str, Any], project: str) -> None:
        import trackio

        self._run: Any = trackio.init(
            project=project,
            name=f"{path.name}-{run}",
            config=config,
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        # Else it is ended once more when Python ends, with a line on standard output.
        trackio.context_vars.current_run.set(None)

    def log(self, numbers: dict[str, float], step: int) -> None:
        """One row of its table."""
        self._run.log(numbers, step=step)

    def close(self) -> None:
        """Write the rest."""
        self._run.finish()
