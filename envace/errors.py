"""The exception tree: every error a user can meet, one class per boundary.

EnvaceError
├── ConfigError        a recipe or an argument is wrong
├── DataError          a scenario, package or record is wrong
├── ModelError         a model, tokenizer or checkpoint is wrong
│   ├── EndpointError  an endpoint refused, failed, or answered nonsense
│   └── ContextOverflow  a transcript is longer than the model can read
├── RunError           a run folder is missing, foreign or damaged
├── TrainingError      training cannot go on (numbers, groups)
└── SandboxError       the worker process failed
    ├── WorkerDied     it ended by itself or had to be killed
    └── DeadlineError  it did not answer in time

Messages say what was found, where, and what to do. The command line prints them without a traceback.
"""


class EnvaceError(Exception):
    """Base of every error that is the user's to mend."""


class ConfigError(EnvaceError):
    """A recipe key or an argument is unknown, missing or out of range."""


class DataError(EnvaceError):
    """A scenario, an environment package or a record cannot be used."""


class ModelError(EnvaceError):
    """A model folder, tokenizer or checkpoint cannot be loaded."""


class EndpointError(ModelError):
    """An endpoint could not be reached, refused, or answered what cannot be used; `cause` says which, to be counted."""

    def __init__(self, message: str, cause: str = "unknown") -> None:
        super().__init__(message)
        self.cause = cause


class ContextOverflow(ModelError):
    """The transcript and the step that was asked for are longer than the model's context. Asking again cannot help."""


class RunError(EnvaceError):
    """A run folder is missing, belongs to another recipe, or is damaged."""


class TrainingError(EnvaceError):
    """Training cannot go on: non-finite numbers, or no usable group."""


class SandboxError(EnvaceError):
    """The worker process that runs environment code failed."""


class WorkerDied(SandboxError):
    """The worker process ended, or was killed for breaking its limits."""


class DeadlineError(SandboxError):
    """The worker process did not answer before its deadline."""
