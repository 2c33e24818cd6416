"""The executable environment: calls run in the worker process on the scenario's real opening state."""

from __future__ import annotations

from envace.errors import DataError
from envace.models.policy import Policy
from envace.models.transcripts import Transcript
from envace.sandbox import Session, Worker
from envace.scenarios import EnvironmentSpec, Scenario
from envace.scenarios.packages import dump_line
from envace.types import Consistency, Exchange, Segment, ToolCall


class ExecutableEnvironment:
    """One episode on a scenario's real state."""

    def __init__(self, spec: EnvironmentSpec, scenario: Scenario, *, worker: Worker, policy: Policy) -> None:
        if scenario.state is None:
            raise DataError(
                f"Scenario {scenario.id!r} is public: its opening state is withheld, so it cannot be executed."
            )
        self.spec, self.state = spec, scenario.state
        self._worker, self._policy = worker, policy
        self.session: Session | None = None

    async def open(self) -> None:
        """Open the episode in the worker."""
        self.session = await self._policy.hold(self._worker.open(self.spec.id, self.state))

    async def respond(self, call: ToolCall, transcript: Transcript) -> Exchange:
        """Execute the call; its result is given tokens."""
        assert self.session is not None
        response = await self._policy.hold(self.session.call(call.name, call.arguments))
        text = dump_line(response)
        transcript.say(*self._policy.format.answer(text))
        return Exchange(call=call, response=response, text=text, consistency=Consistency.CONSISTENT)

    def own_rows(self) -> list[Segment]:
        """None."""
        return []

    async def close(self) -> None:
        """Close the episode."""
        if self.session is not None:
            await self._policy.hold(self.session.close())
