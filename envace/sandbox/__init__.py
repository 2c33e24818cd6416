"""The worker process that runs code we did not write: environments, oracles, checks."""

from envace.sandbox.client import Session, Worker

__all__ = ["Session", "Worker"]
