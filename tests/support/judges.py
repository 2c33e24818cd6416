"""A judge behind the loopback: it reads the questions of a prompt and answers by a rule."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from support.loopback import Asked, Reply

Rule = Callable[[Mapping[str, Any], str], bool]
"""(question, the turn as shown) -> whether it passes."""


def shown(asked: Asked) -> list[str]:
    """What stands between the fences of a prompt: tools, conversation before, turn, questions."""
    prompt = asked.json["messages"][0]["content"]
    name = re.search(r"^BEGIN (\S+)$", prompt, re.MULTILINE).group(1)  # type: ignore[union-attr]
    blocks = re.findall(rf"^BEGIN {name}\n(.*?)\n?^END {name}$", prompt, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 4
    return blocks


def questions(asked: Asked) -> list[dict[str, Any]]:
    return [json.loads(line) for line in shown(asked)[3].splitlines()]


def said(content: str, *, finish: str = "stop", usage: Any = None) -> Reply:
    choice = {"index": 0, "message": {"role": "assistant", "content": content}, "finish_reason": finish}
    return Reply({"choices": [choice], "usage": usage or {"prompt_tokens": 100, "completion_tokens": 10}})


def verdicts(found: Sequence[tuple[str, Any]]) -> str:
    return json.dumps({"verdicts": [{"id": name, "reason": "so it is", "verdict": given} for name, given in found]})


def by_rule(rule: Rule) -> Callable[[Asked], Reply]:
    """Answers of the loopback by a rule."""

    def answer(asked: Asked) -> Reply:
        turn = shown(asked)[2]
        return said(verdicts([(q["id"], "pass" if rule(q, turn) else "fail") for q in questions(asked)]))

    return answer
