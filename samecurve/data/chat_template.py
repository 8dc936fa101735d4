"""A chat template: renders conversations as transformers does, and knows how it ends turns."""

from __future__ import annotations

import difflib
import os.path
import re
from collections.abc import Iterable
from datetime import datetime
from functools import cached_property, lru_cache
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from samecurve.data.conversation_encoder import Span
from samecurve.data.schemas.conversation import Conversation
from samecurve.data.schemas.messages import REASONING
from samecurve.data.time_limit import RenderTimeout, render_limit
from samecurve.errors import ConfigurationError, DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
PROBE = "samecurveProbe7f2d91c4e8b05a36"  # one word of ASCII, which occurs in no template and in no text
DATED = "strftime_now"  # transformers' function for templates that write today's date, as Llama 3.2's does
# What a template gets in any case.
_GIVEN = {"messages", "tools", "add_generation_prompt", "bos_token", "eos_token", "pad_token", "unk_token"}
USER, ANSWER = ({"role": role, "content": PROBE} for role in ("user", "assistant"))
CALL = {"type": "function", "id": "a1b2c3d4e", "function": {"name": "f", "arguments": {}}}
CALLING = {"role": "assistant", "content": "", "tool_calls": [CALL]}
_RESULT = {"role": "tool", "name": "f", "tool_call_id": "a1b2c3d4e", "content": PROBE}


class ChatTemplate:
    """A template with the special tokens of its tokenizer.

    Attributes:
        source: the template.
        marked: whether it marks the assistant's text by {% generation %}.
        dated: whether it writes today's date.
        special: the tokenizer's special tokens.
        eos: its end of text; "" without one.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, source: str, day: datetime, variables: dict[str, Any]):
        """`day`: what the template takes for today. `variables`: further variables, below those of a row."""
        self.source, self._variables = source, variables
        self.marked, self.dated = _GENERATION.search(source) is not None, DATED in source
        self.special = tuple(token.content for token in tokenizer.added_tokens_decoder.values() if token.special)
        self._compiled = source
        if self.dated:
            # A macro that replaces strftime_now, because transformers turns a function among the variables into text.
            directives = [f"%{dash}{letter}" for letter in "aAbBcdeDFHIjmMnprRSTuUwWxXyYZ" for dash in ("", "-")]
            values = "".join(f" | replace({name!r}, {day.strftime(name)!r})" for name in directives)
            # the last expression keeps a line break at the beginning of the template itself
            clock = "{% macro " + DATED + "(format) %}{{ format" + values + " }}{% endmacro %}{{ '' }}"
            self._compiled = clock + source
        self._names, self.eos = tokenizer.special_tokens_map, str(tokenizer.eos_token or "")
        added = sorted((token.content for token in tokenizer.added_tokens_decoder.values()), key=len, reverse=True)
        self._pieces = re.compile("|".join([r"(\s+)", *(f"({re.escape(token)})" for token in added)]))
        self._rendered_roles: dict[str, bool | None] = {}
        self._next_role_ends: dict[bool, str] = {}

    @cached_property
    def variables(self) -> set[str]:
        """Names of the variables that the template reads and that a row or recipe can set."""
        from jinja2 import TemplateError, meta

        try:
            environment = _compiled(self.source).environment
            # "set" of a name that is read before makes it no variable of jinja2's; "x is defined" does, too
            names = meta.find_undeclared_variables(environment.parse(self.source))
        except TemplateError:  # rendering reports it, with the row
            return set()
        asked = re.findall(r"(?<![.\w])([A-Za-z_]\w*)\s+is\s+(?:not\s+)?defined", self.source)
        return (names | set(asked)) - _GIVEN - set(self._names) - environment.globals.keys()

    def unknown_variable(self, names: Iterable[str]) -> str:
        """Describe the first name that is no variable of the template, for a message; "" if all are."""
        name = next((name for name in names if name not in self.variables), None)
        if name is None:
            return ""
        near = difflib.get_close_matches(name, self.variables, n=1)
        known = ", ".join(sorted(self.variables))
        fix = f"write {near[0]!r}" if near else f"it reads {known}" if known else "it reads none; remove it"
        return f"{name!r}, which the chat template does not read; {fix}"

    def reads(self, key: str) -> bool:
        """Whether the template has the key, as in message.key or message["key"]; for reasoning, by any name of it."""
        keys = REASONING if key in REASONING else (key,)
        return any(re.search(rf"""[.'"]{re.escape(name)}\b""", self.source) for name in keys)

    def render(
        self, conversation: Conversation, num_messages: int | None = None, prompt: bool = False
    ) -> tuple[str, list[Span]]:
        """Render the first messages. Returns the text and the ranges marked by {% generation %}.

        A generation prompt that the template writes after an answer unasked is left out.

        Args:
            num_messages: how many of its messages; None for all.
            prompt: add the generation prompt, which begins an answer.

        Raises:
            ConfigurationError: for a template without an end.
            DataError: for a conversation that the template cannot render.
        """
        text, marks = self._render(conversation, num_messages, prompt)
        if not prompt and conversation.messages[:num_messages][-1]["role"] == "assistant":
            text = text.removesuffix(self.unasked or "")
        return text, marks

    def _render(self, conversation: Conversation, num_messages: int | None, prompt: bool) -> tuple[str, list[Span]]:
        from transformers.utils.chat_template_utils import render_jinja_template

        said = conversation.messages[:num_messages]
        messages = [_as_read(message) for message in said]
        try:
            with render_limit():
                texts, spans = render_jinja_template(
                    [messages],
                    tools=list(conversation.tools) if conversation.tools else None,
                    chat_template=self._compiled,
                    return_assistant_tokens_mask=self.marked,
                    add_generation_prompt=prompt,
                    # Names such as eos_token, for the template; pyright expects them to be other parameters.
                    **self._names,  # pyright: ignore[reportArgumentType]
                    **{**self._variables, **(conversation.template_kwargs or {})},
                )
        except RenderTimeout as error:  # not the row's fault, and a thousand rows would take hours
            raise ConfigurationError(
                f"{conversation.place}: the chat template cannot render this conversation: {error}; set "
                "tokenizer.chat_template to another template"
            ) from error
        except Exception as error:  # errors of Jinja, and of any expression in the template
            reason = " ".join(str(error).split()) or type(error).__name__
            raise DataError(
                f"{conversation.place}: the chat template cannot render this conversation: {reason}; correct or remove "
                "the row, or set tokenizer.chat_template to another template"
            ) from error
        # render_jinja_template returns (texts, spans), whatever its annotation says.
        return str(texts[0]), spans[0] if self.marked else []  # pyright: ignore[reportReturnType]

    def _probe(self, *messages: dict[str, Any], prompt: bool = False, whole: bool = False) -> str | None:
        """Render messages of one's own; None where the template refuses them, as without a system prompt or tools.

        `whole`: with a generation prompt that nobody asked for.
        """
        render = self._render if whole else self.render
        try:
            return render(Conversation("the chat template", messages), None, prompt)[0]
        except DataError:
            return None

    @cached_property
    def unasked(self) -> str | None:
        """The generation prompt that a template writes after an answer, too; "" without one, None if unclear.

        Such a template ends both a question and an answer with the prompt, or with its beginning. The answer itself
        ends with the tokenizer's eos_token.
        """
        asked, whole = self._probe(USER, prompt=True, whole=True), self._probe(USER, whole=True)
        answered, followed = self._probe(USER, ANSWER, whole=True), self._probe(USER, ANSWER, USER, whole=True)
        if asked is None or whole is None or answered is None:
            return ""
        if asked != whole and (not asked.startswith(whole) or not followed or followed.startswith(answered)):
            return ""  # an answer ends as it does when others follow
        after = answered.rpartition(PROBE)[2]
        if self.eos and self.eos in after:
            rest = after.rpartition(self.eos)[2]
            return rest if rest.strip() and whole.endswith(rest) else ""
        if asked != whole:
            return ""
        common = os.path.commonprefix([after[::-1], asked[::-1]])[::-1]
        if not any(token in common for token in self.special) or sum(map(after.count, self.special)) < 2:
            return ""
        # the first of several tokens ends the answer, if the next question follows it, too
        end = len(answered) - len(after) + (self.end_of_turn(after, 0) or 0)
        ended = end > len(answered) - len(after) and followed and followed.startswith(answered[:end])
        return answered[end:] if ended and whole.endswith(answered[end:]) else None

    @cached_property
    def closing(self) -> str:
        """What stands at the end of each text without a generation prompt, as Phi 3's end of text; "" without one.

        No turn's end, because a question ends with it, too, and it is gone once the next turn follows.
        """
        whole, asked, answered = self._probe(USER), self._probe(USER, prompt=True), self._probe(USER, ANSWER)
        if whole is None or asked is None or answered is None:
            return ""
        token = next((token for token in self.special if whole.endswith(token) and answered.endswith(token)), None)
        return token if token and asked.startswith(whole.removesuffix(token)) and not asked.startswith(whole) else ""

    def renders_role(self, role: str) -> bool | None:
        """Whether messages of a role are in the text; None where a conversation with one is refused."""
        if role not in self._rendered_roles:
            message = _RESULT if role == "tool" else {"role": role, "content": PROBE}
            question, answer = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
            if role == "tool":
                texts = [self._probe(question, CALLING, message)]
            else:  # Mistral's write a system prompt into the last question only
                texts = [self._probe(message, question, answer), self._probe(message, question, prompt=True)]
            known = [PROBE in text for text in texts if text is not None]
            self._rendered_roles[role] = any(known) if known else None
        return self._rendered_roles[role]

    @cached_property
    def num_calls(self) -> int | None:
        """How many of two calls of tools in one turn are in the text: gpt-oss's has one. None if calls are refused.

        Of one call where two are refused. DeepSeek R1's needs a content of none for any.
        """
        question = {"role": "user", "content": "a"}
        for names in ([f"{PROBE}1", f"{PROBE}2"], [PROBE]):
            calls = [{**CALL, "function": {"name": name, "arguments": {}}} for name in names]
            turns = ({"role": "assistant", "content": text, "tool_calls": calls} for text in ("", "b"))
            texts = [text for turn in turns if (text := self._probe(question, turn)) is not None]
            if texts:
                return max(sum(name in text for name in names) for text in texts)
        return None

    @cached_property
    def renders_text(self) -> bool:
        """Whether contents that are texts are rendered: some templates for images read lists of parts only."""
        text = self._probe(USER, ANSWER)
        return text is None or PROBE in text

    @cached_property
    def ending(self) -> str:
        """What an answer ends with, whatever follows, if a special token is its end; "" without one.

        Kimi K3's has words between special tokens.
        """
        answered, followed = self._probe(USER, ANSWER), self._probe(USER, ANSWER, USER)
        end = answered.rpartition(PROBE)[2] if answered and followed and followed.startswith(answered) else ""
        return end if end.rstrip().endswith(self.special) else ""

    def next_role_end(self, calls: bool) -> str:
        """Return the special token behind an answer, and white space before it, if only a next turn writes them.

        "" if it writes no such token.

        Args:
            calls: whether the answer ends with calls of tools, so that their results follow instead of a question.
        """
        if calls not in self._next_role_ends:
            answer, following = (CALLING, _RESULT) if calls else (ANSWER, USER)
            before, after = self._probe(USER, answer) or "", self._probe(USER, answer, following) or ""
            rest = after[len(before) :] if before and after.startswith(before) else ""
            end = rest[: self.end_of_turn(rest, 0) or 0]
            if calls and before and not end:  # calls may read differently once others follow, and end as answers do
                behind = after.rpartition(PROBE)[0][len(os.path.commonprefix([before, after])) :]
                end = self.next_role_end(False)
                end = end if end in behind else ""
            self._next_role_ends[calls] = end
        return self._next_role_ends[calls]

    def end_of_turn(self, text: str, start: int) -> int | None:
        """Return the end of the special token at a place of a text, or behind white space there; None without one."""
        start = len(text) - len(text[start:].lstrip())
        # the longest, as one special token may be the beginning of another
        token = max((token for token in self.special if text.startswith(token, start)), key=len, default=None)
        return None if token is None else start + len(token)

    def text_behind_end(self, text: str) -> str:
        """Return what else than special tokens and white space stands behind the end of an answer's turn.

        That is its first special token, if not the template's `ending`.
        """
        pieces = [piece for piece in self._pieces.split(text.lstrip().removeprefix(self.ending.lstrip())) if piece]
        ended = next((at for at, piece in enumerate(pieces) if piece in self.special), len(pieces))
        return "".join(piece for piece in pieces[ended:] if piece not in self.special).strip()

    def shared_start(self, text: str, other: str) -> str:
        """Return what two texts begin with, in whole words, runs of white space and added tokens."""
        pieces = zip(*(filter(None, self._pieces.split(part)) for part in (text, other)), strict=False)
        return "".join(piece for piece, _ in takewhile(lambda both: both[0] == both[1], pieces))


def _as_read(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message as templates read it, by any transformers; without a weight, as some write whole messages."""
    said = {key: value for key, value in message.items() if key != "weight"}
    thoughts = next((said[name] for name in REASONING if said.get(name) is not None), None)
    return said if thoughts is None else {"thinking": thoughts, **said, "reasoning_content": thoughts}


@lru_cache
def _compiled(source: str) -> Any:
    from transformers.utils.chat_template_utils import _compile_jinja_template

    return _compile_jinja_template(source)
