"""What a model wrote in an acting step: calls, a reply, or why it is neither.

`parse` reads a decoded step in a dialect, `parse_starter` one whose control tokens are known by their ids, and
`parse_wire` a message of an OpenAI-compatible endpoint. Strict parsing is for scores and rewards: one malformed call
makes the step malformed. Repair is for deployment: what can be read is read, with a note of what was mended, and what
cannot keeps its failure, to be answered with an error.

Nothing of a step is lost: a character that is not white space is in the text, in the reasoning, inside the span of a
call, or part of a reasoning tag.
"""

from envace.models.parsing.reading import MAX_CALLS, MAX_CHARACTERS, Dialect, Mode
from envace.models.parsing.steps import parse, parse_starter
from envace.models.parsing.wire import parse_wire

__all__ = ["MAX_CALLS", "MAX_CHARACTERS", "Dialect", "Mode", "parse", "parse_starter", "parse_wire"]
