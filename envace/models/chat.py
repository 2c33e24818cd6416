"""Chat formats over a tokenizer's own template: whatever family a model is of, its template says how it is written.

The template renders the opening of a conversation. What stands between later messages (ends of turns, separators,
headers) is learned from it once, by rendering a conversation of marked texts and reading what it puts around them; from
then on messages are appended as ids and nothing is rendered again. That the ids are those of the template's own
rendering is tested for each family (tests/models/test_chat_families.py) and by `envace doctor` for any other.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from envace.errors import ModelError
from envace.models.formats import Glue, SafeEncoder
from envace.models.parsing import Dialect, Mode, parse
from envace.models.templates import Template
from envace.types import Author, CallFailure, Message, Parsed, Role, ToolCall, ToolSpec

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PROBE = ToolSpec(
    name="probe_tool",
    description="A tool to learn a template with.",
    parameters={
        "type": "object",
        "properties": {"value": {"type": "string", "description": "Any text."}},
        "required": ["value"],
    },
)
USER_TEXT, REPLY_TEXT, ARGUMENT, FIRST, SECOND = "zqusrqz", "zqrplqz", "zqargqz", '{"zq": "frst"}', '{"zq": "scnd"}'
NEXT_TEXT = "zqnxtqz"
"""Marked texts: no template writes them itself. The responses are JSON because some templates encode other text."""

TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
"""Marks that are a token in some vocabularies and letters in others; either way no text of others may write them."""
KEPT = ("<|python_tag|>",)
"""Special tokens that stand within a step and do not end it."""
MARKS = tuple(chr(code) for code in range(0xE000, 0xE100))
"""Private-use characters; one that no text holds marks where a text of others is cut."""


@dataclass(frozen=True, kw_only=True)
class Learned:
    """What a template writes around texts."""

    end: str
    """The token that ends an assistant's message, e.g. `<|im_end|>`."""
    separator: str
    """What it writes after that token before the next message, e.g. a newline."""
    first_header: Glue
    next_header: Glue | None
    """None where the template refuses a second response to one step."""
    response_end: Glue
    """The end of a tool's response, up to and with its own end tag."""
    act_header: Glue
    """From there to the next acting step."""
    user_header: Glue | None
    """What it writes between the token that ends a reply and the user's next message; None where it takes none."""
    user_end: Glue
    """From the end of that message to the next acting step."""
    asked: str
    """The rendering of an instruction alone, up to where the header of an acting step begins."""
    opening_header: str
    """What `open` adds to a user's message."""


class ChatFormat:
    """A model family's way of writing, learned from its template."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        ends: Collection[int] = (),
        thinking: bool | None = None,
        dialect: Dialect | None = None,
        mode: Mode = "strict",
    ) -> None:
        """Learn a tokenizer's template.

        Args:
            tokenizer: With a chat template.
            ends: Further ids that may end a step, e.g. those of the model's generation config.
            thinking: Switches the template's `enable_thinking`, for families that have it.
            dialect: How calls are written; None recognises it.
            mode: `strict` for scores and rewards, `repair` for deployment.

        Raises:
            ModelError: There is no template, or it cannot be learned.
        """
        self.tokenizer = tokenizer
        self.mode: Mode = mode
        options = {} if thinking is None else {"enable_thinking": thinking}
        self.template = _template(tokenizer, options)
        self._control = _control_tokens(tokenizer)
        self.learned = _check_headers(_learn(self.template, self._control))
        self.encode = SafeEncoder(tokenizer, {*self._control, *TAGS})
        _check_encoding(self.encode, self.decode)
        vocabulary = tokenizer.get_vocab()
        self._stop = frozenset(vocabulary[token] for token in self._control - {*KEPT, *TAGS})
        self._ends = frozenset({vocabulary[self.learned.end], *ends})
        self.pad_id = _first(tokenizer.pad_token_id, tokenizer.eos_token_id, vocabulary[self.learned.end])
        # A model whose template knows no reasoning may well write its tags in a reply.
        self._reasoning = ("<think>", "</think>") if "</think>" in str(tokenizer.chat_template) else None
        self.dialect = dialect or _dialect(self._text(self._written_call()))

    @property
    def parallel(self) -> bool:
        """Whether the template takes several responses to one step."""
        return self.learned.next_header is not None

    def open(self, tools: Sequence[ToolSpec], messages: Sequence[Message]) -> list[int]:
        """The template's own rendering of tools and messages, with the header of an acting step."""
        return self._guarded(lambda said, listed: self.template.render(said, listed, open=True), messages, tools)

    def tool_header(self, *, first: bool = True) -> Glue:
        """As the template writes it; a second response that it refuses is headed like a first one."""
        if first or self.learned.next_header is None:
            return self.learned.first_header
        return self.learned.next_header

    def answer(self, text: str) -> tuple[str, ...]:
        """The text as the template writes it, and its end."""
        return self.template.shown(text), self.learned.response_end

    def act_header(self) -> Glue:
        """From the end of the last response to the next acting step."""
        return self.learned.act_header

    def user_turn(self, text: str) -> tuple[str, ...]:
        """A user's next message after a final reply, up to where the policy acts.

        Raises:
            ModelError: The template takes no second message of the user.
        """
        if self.learned.user_header is None:
            raise ModelError("The chat template takes no second user message, so scripted user turns cannot be said.")
        shown = text.strip() if self.template.trims_user else text
        return self.learned.user_header, shown, self.learned.user_end

    def written(self, message: Message) -> list[int]:
        """What the template writes for the message, from the header to its end-of-turn token."""
        return self._guarded(self._text, message)

    def stop_ids(self) -> frozenset[int]:
        """Every special token ends a step, wherever it comes; only those that end turns make it whole."""
        return self._stop | self._ends

    def stop_text(self, role: Role) -> str | None:
        """A rehearsed response ends at its own end tag, unless that is a special token anyway."""
        tag = self.learned.response_end.strip()
        return tag if role is Role.REHEARSE and tag not in self._control - set(TAGS) else None

    def parse(self, ids: Sequence[int], tools: Sequence[ToolSpec] = ()) -> Parsed:
        """Calls, text and reasoning of a step that ended with an end-of-turn token."""
        if not ids or ids[-1] not in self._ends:
            return Parsed(failure=CallFailure.NO_END, detail="the step does not end with an end-of-turn token")
        text = self.decode(ids[:-1])
        if self.learned.opening_header.rstrip().endswith("<think>"):
            text = "<think>" + text
        return parse(text, self.dialect, mode=self.mode, tools=tools, reasoning_tags=self._reasoning)

    def response_text(self, ids: Sequence[int]) -> str | None:
        """The text before its end tag; None where that is missing or a special token stands before it."""
        text, tag = self.decode(ids), self.learned.response_end.strip()
        before, found, _ = text.partition(tag)
        if not found or any(token in self._stop for token in ids[:-1]):
            return None
        return before.removesuffix("\n")

    def decode(self, ids: Sequence[int]) -> str:
        """Readable text with control tokens."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def _written_call(self) -> Message:
        return Message(author=Author.ASSISTANT, calls=(ToolCall(name=PROBE.name, arguments={"value": ARGUMENT}),))

    def _text(self, message: Message) -> str:
        """What the template writes for an assistant's message after the header."""
        whole = self._rendered(message)
        head = self.learned.asked + self.learned.opening_header
        if not whole.startswith(head):
            head = self.learned.asked + _open_part(self.learned.opening_header)
        if not whole.startswith(head):
            raise ModelError("The chat template writes an assistant's message differently from the header it opens.")
        return whole[len(head) :].removesuffix(self.learned.separator)

    def _rendered(self, message: Message) -> str:
        """An instruction and the message, up to the message's end.

        Calls are rendered with a response behind them, as they will be: some templates (Qwen3) write a last message
        differently.
        """
        before = Message(author=Author.USER, content=USER_TEXT)
        if not message.calls:
            return self.template.render([before, message], [PROBE], open=False)
        answers = [
            Message(author=Author.TOOL, content=FIRST, name=call.name, call_id=call.id) for call in message.calls
        ]
        text = self.template.render([before, message, *answers], [PROBE], open=False)
        following = self.learned.end + self.learned.first_header + FIRST
        return text[: text.index(following) + len(self.learned.end)]

    def _guarded(self, render: Callable[..., str], *values: Any) -> list[int]:
        """Ids of a rendering of values, in whose texts control tokens are marked first and cut afterwards."""
        texts = _texts(values)
        mark = next(mark for mark in MARKS if not any(mark in text or _escaped(mark) in text for text in texts))
        text = render(*(_map_texts(value, lambda text: self._cut(text, mark)) for value in values))
        # A template that escapes what is not ASCII has escaped the mark too.
        pieces = text.replace(_escaped(mark), mark).split(mark)
        return [token for piece in pieces for token in self.encode([Glue(piece)])]

    def _cut(self, text: str, mark: str) -> str:
        """The text with a mark after the first letter of every control token in it."""
        cuts = [start + 1 for start, _ in self.encode.occurrences(text)]
        return mark.join(text[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True))


def _escaped(mark: str) -> str:
    return f"\\u{ord(mark):04x}"


def _open_part(header: str) -> str:
    """A header without the reasoning that it opens: a template may drop that from messages it is given."""
    return header.split("<think>")[0]


def _check_encoding(encode: SafeEncoder, decode: Callable[[Sequence[int]], str]) -> None:
    """Texts are encoded in pieces, so a tokenizer must not add anything of its own to one.

    Raises:
        ModelError: It puts a space before each text (SentencePiece's dummy prefix), or takes one away.
    """
    for text in (" x", "x", "\nx"):
        back = decode(encode([text]))
        if back != text:
            raise ModelError(
                f"The tokenizer turns {text!r} into {back!r}: it changes texts where they begin, so a conversation "
                "cannot be appended to piece by piece. Serve the model and name its endpoint instead."
            )


def _first(*values: int | None) -> int:
    return next(value for value in values if value is not None)


def _control_tokens(tokenizer: PreTrainedTokenizerBase) -> frozenset[str]:
    """Added tokens that mean something: special ones, those that the template writes, and what looks like one.

    Some makers (DeepSeek) mark theirs as special by a look alone, with full-width bars.
    """
    template = str(tokenizer.chat_template)
    return frozenset(
        str(token)
        for token in tokenizer.added_tokens_decoder.values()
        if token.special
        or str(token) in TAGS
        or re.fullmatch("<[|\uff5c].*[|\uff5c]>", str(token))
        or _written_by(template, str(token))
    )


def _written_by(template: str, token: str) -> bool:
    """Whether a template writes a token; white space and single characters stand in any text."""
    return len(token.strip()) > 1 and token in template


def _template(tokenizer: PreTrainedTokenizerBase, options: Mapping[str, Any]) -> Template:
    """The template with tools if it knows them, else with tools in plain text."""
    for native, quotes, speaks in ((True, False, False), (True, True, False), (False, False, True)):
        template = Template(tokenizer, native=native, quotes=quotes, speaks=speaks, options=options)
        try:
            text = template.render(_conversation(1), [PROBE], open=True)
        except ModelError:
            continue
        if PROBE.description in text and ARGUMENT in text and FIRST in text:
            break
    else:
        template = Template(tokenizer, native=False, options=options)
    template.trims = not template.quotes and _trims(template, Author.TOOL)
    template.trims_user = _trims(template, Author.USER)
    return template


def _trims(template: Template, author: Author) -> bool:
    """Whether the template takes white space off an author's text: then it does not matter whether there is any."""
    plain = _conversation(1)
    padded = [replace(m, content=f"\n{m.content}\n") if m.author is author else m for m in plain]
    return template.render(padded, [PROBE], open=True) == template.render(plain, [PROBE], open=True)


def _conversation(responses: int) -> list[Message]:
    """An instruction, so many calls in one step, and their responses."""
    calls = tuple(ToolCall(name=PROBE.name, arguments={"value": ARGUMENT}, id=f"call{n:05d}") for n in range(responses))
    return [
        Message(author=Author.USER, content=USER_TEXT),
        Message(author=Author.ASSISTANT, calls=calls),
        *(
            Message(author=Author.TOOL, content=text, name=PROBE.name, call_id=call.id)
            for text, call in zip((FIRST, SECOND), calls, strict=False)
        ),
    ]


def _learn(template: Template, control: frozenset[str]) -> Learned:
    """Read from renderings what the template writes around texts.

    Raises:
        ModelError: It writes no end of turn, or no header.
    """
    user, reply = Message(author=Author.USER, content=USER_TEXT), Message(author=Author.ASSISTANT, content=REPLY_TEXT)
    asked, opened = (template.render([user], [PROBE], open=flag) for flag in (False, True))
    if not opened.startswith(asked) or opened == asked:
        raise ModelError("The chat template has no generation prompt, so it does not say where the model begins.")
    after_reply = template.render([user, reply], [PROBE], open=False).rpartition(REPLY_TEXT)[2]
    end = _leading_control(after_reply, control)
    before, after = _around(template.render(_conversation(1), [PROBE], open=False), FIRST)
    after_open = _around(template.render(_conversation(1), [PROBE], open=True), FIRST)[1]
    between = _between(template)
    response_end = _own_end(_common(after, between or after), control)
    user_header, user_end = _next_turn(template, end)
    return Learned(
        end=end,
        separator=after_reply[len(end) :],
        first_header=Glue(before.rpartition(ARGUMENT)[2].partition(end)[2]),
        next_header=None if between is None else Glue(between[len(response_end) :]),
        response_end=Glue(response_end),
        act_header=Glue(after_open[len(response_end) :]),
        user_header=user_header,
        user_end=user_end,
        asked=asked,
        opening_header=opened[len(asked) :],
    )


def _next_turn(template: Template, end: str) -> tuple[Glue | None, Glue]:
    """What stands around a user's second message; (None, "") where the template refuses or hides it."""
    said = [
        Message(author=Author.USER, content=USER_TEXT),
        Message(author=Author.ASSISTANT, content=REPLY_TEXT),
        Message(author=Author.USER, content=NEXT_TEXT),
    ]
    try:
        text = template.render(said, [PROBE], open=True)
    except ModelError:
        return None, Glue("")
    between, found, after = text.rpartition(REPLY_TEXT)[2].partition(NEXT_TEXT)
    whole = found and between.startswith(end)
    return (Glue(between[len(end) :]), Glue(after)) if whole else (None, Glue(""))


def _check_headers(learned: Learned) -> Learned:
    """Headers are written for every call alike, so none may hold what belongs to one.

    Raises:
        ModelError: The template writes a tool's name or a call's id around its response.
    """
    for glue in (learned.first_header, learned.next_header or "", learned.response_end, learned.act_header):
        if PROBE.name in glue or "call0000" in glue:
            raise ModelError(f"The chat template writes the tool's name or the call's id around a response: {glue!r}.")
    return learned


def _leading_control(text: str, control: frozenset[str]) -> str:
    """The control token that the text begins with."""
    found = max((token for token in control if text.startswith(token)), key=len, default="")
    if not found:
        raise ModelError(
            f"The chat template does not end an assistant's message with a control token but with {text!r}."
        )
    return found


def _around(text: str, part: str) -> tuple[str, str]:
    before, found, after = text.rpartition(part)
    if not found:
        raise ModelError(f"The chat template does not show a tool's response {part!r}.")
    return before, after


def _between(template: Template) -> str | None:
    """What stands between two responses to one step; None where the template refuses them."""
    try:
        text = template.render(_conversation(2), [PROBE], open=False)
    except ModelError:
        return None
    _, first, rest = text.partition(FIRST)
    between, second, _ = rest.partition(SECOND)
    return between if first and second else None


def _common(one: str, other: str) -> str:
    """What both begin with."""
    same = next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    return one[:same]


def _own_end(text: str, control: frozenset[str]) -> str:
    """The text up to its first control token, where it has one: what follows belongs to the next message."""
    ends = [text.index(token) + len(token) for token in {*control, *TAGS} if token in text]
    return text[: min(ends)] if ends else text


def _dialect(call: str) -> Dialect:
    """How calls are written, told from one that the template wrote.

    Raises:
        ModelError: It is a way that we do not parse.
    """
    marks = {"<function=": Dialect.QWEN_XML, "<tool_call>": Dialect.HERMES, '"parameters"': Dialect.LLAMA}
    for mark, dialect in marks.items():
        if mark in call:
            return dialect
    if re.search(rf"\[?{PROBE.name}\(", call):
        return Dialect.PYTHONIC
    if '"arguments"' in call:
        return Dialect.LLAMA
    raise ModelError(f"The chat template writes calls in a way that is not known: {call[:200]!r}. Name a dialect.")


def _texts(value: Any) -> list[str]:
    """Every text in messages, tools and JSON."""
    found: list[str] = []

    def keep(text: str) -> str:
        found.append(text)
        return text

    _map_texts(value, keep)
    return found


def _map_texts(value: Any, change: Callable[[str], str]) -> Any:
    """Messages, tools and JSON with every text in them changed."""
    if isinstance(value, Message):
        return Message(
            author=value.author,
            content=change(value.content),
            calls=tuple(_map_texts(call, change) for call in value.calls),
            reasoning=None if value.reasoning is None else change(value.reasoning),
            call_id=value.call_id,
            name=change(value.name),
        )
    if isinstance(value, ToolCall):
        return ToolCall(name=change(value.name), arguments=_map_texts(value.arguments, change), id=value.id)
    if isinstance(value, ToolSpec):
        return ToolSpec(
            name=change(value.name),
            description=change(value.description),
            parameters=_map_texts(value.parameters, change),
            effect=value.effect,
        )
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change(str(key)): _map_texts(inner, change) for key, inner in value.items()}
    return [_map_texts(inner, change) for inner in value] if isinstance(value, (list, tuple)) else value
