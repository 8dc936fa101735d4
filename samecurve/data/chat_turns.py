"""The assistant's turns of a conversation in the texts that a chat template makes of it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from typing import Any, NamedTuple

from samecurve.data.chat_template import CALL, PROBE, ChatTemplate
from samecurve.data.conversation_encoder import Span
from samecurve.data.schemas.conversation import Conversation
from samecurve.data.schemas.messages import REASONING
from samecurve.errors import DataError
from samecurve.specs.data_names import CHATML

OTHER_TEMPLATE = f"set tokenizer.chat_template to the template of another model, or to {CHATML}"
# Variables of templates that drop reasoning from earlier turns, with the value that keeps it.
_KEEPING = {"preserve_thinking": "true", "clear_thinking": "false", "truncate_history_thinking": "false"}
_CALLS = [{**CALL, "function": {"name": PROBE, "arguments": {}}}]


class Rendered(NamedTuple):
    """A text, its trained character ranges, and by their starts the weights of those whose weight is not 1."""

    text: str
    spans: list[Span]
    weights: Mapping[int, float] = {}


class Answer(NamedTuple):
    """A turn of the assistant as inference sees it: rendered with nothing behind it.

    Attributes:
        body: the text up to the end of the turn.
        row: the whole text.
    """

    body: str
    row: Rendered


class RenderedTurns:
    """The renderings of one conversation, and the trained spans in them.

    Attributes:
        num_unlike: number of answers so far that begin otherwise than the generation prompt ends.
        num_unreasoned: number of trained answers so far whose reasoning the template leaves out at inference, too.
        num_untold: number of trained answers so far whose text the template leaves out, as it has calls of tools.
    """

    def __init__(self, conversation: Conversation, template: ChatTemplate):
        self._conversation, self._template = conversation, template
        self._render = cache(partial(template.render, conversation))
        self.num_unlike = self.num_unreasoned = self.num_untold = 0

    def text(self, num_messages: int) -> str:
        """Return the text of the first messages, without what closes each text, or begins an answer unasked."""
        text = self._render(num_messages)[0].removesuffix(self._template.closing) if num_messages else ""
        return text.removesuffix(self._template.unasked or "")

    def completion(self) -> Rendered:
        """Return the whole conversation, of which everything after the prompt is trained."""
        num_messages = len(self._conversation.messages)
        text, start = self._prompted(self._conversation.num_prompt, num_messages)
        return self._ended(text, [(start, len(text))], num_messages - 1)

    def answers(self) -> dict[int, Answer]:
        """Return the trained turns of the assistant by their indices.

        Raises:
            DataError: if the tokens of a turn cannot be found.
        """
        said = enumerate(self._conversation.messages)
        trained = [index for index, message in said if message["role"] == "assistant" and message.get("weight") != 0]
        answers = {index: self._answer(index) for index in trained if index >= self._conversation.num_prompt}
        for index, answer in answers.items():
            message = self._conversation.messages[index]
            thought = message["content"].rpartition("</think>")[0].strip().removeprefix("<think>")  # as DeepSeek R1's
            reasoning = next((str(message[key]) for key in REASONING if message.get(key)), thought)
            self.num_unreasoned += reasoning.strip() not in answer.row.text
            start = next((start for start, _ in answer.row.spans), 0)
            said, calls = answer.row.text[start:], message.get("tool_calls", ())
            self.num_untold += bool(calls) and message["content"].strip() not in said
            names = [str(call.get("function", call).get("name", "")) for call in calls]
            if lost := [name for name in names if name not in said]:
                raise self._error(
                    f"message {index}: the chat template leaves out the call of {lost[0]!r} beside the turn's text; "
                    f"remove the text, or {OTHER_TEMPLATE}"
                )
        return answers

    def as_inference(self, answers: dict[int, Answer]) -> list[Rendered]:
        """Return the fewest rows in which each answer is once as inference sees it, in the order of their last turns.

        The whole conversation is one of them, if an answer is trained in it.
        """
        others = self._trained_by_weight()
        rows, left = [], dict(answers)
        whole = len(self._conversation.messages) - 1
        for last in [*([] if whole in answers else [whole]), *reversed(answers)]:
            if last in answers and last not in left:
                continue
            row = left.pop(last).row if last in left else Rendered(self._render(last + 1)[0], [])
            served = {index: spans for index in left if (spans := self._served(left[index], row.text)) is not None}
            left = {index: answer for index, answer in left.items() if index not in served}
            spans = [span for spans in served.values() for span in spans] + row.spans
            spans += others if last == whole else []
            if spans:
                rows.append(Rendered(row.text, spans, self._weights({**served, last: row.spans})))
        return rows[::-1]

    def kept(self, answers: dict[int, Answer]) -> list[Rendered]:
        """Return the whole conversation as one row, in which turns may end otherwise than at inference.

        Raises:
            DataError: if the template leaves out something of an answer, such as its reasoning, once others follow.
        """
        whole = len(self._conversation.messages) - 1
        row = answers[whole].row if whole in answers else Rendered(self._render(whole + 1)[0], [])
        spans: list[Span] = []
        by_index = {whole: row.spans}
        for index in sorted(answers.keys() - {whole}):
            body, own = answers[index]
            # the end of the turn may be another one, as <|return|> and <|end|> of gpt-oss
            end = max((token for token in self._template.special if body.endswith(token)), key=len, default="")
            served = self._served(answers[index], row.text)
            served = served or self._served(Answer(body.removesuffix(end), own), row.text)
            if served is None:
                name = next((name for name in _KEEPING if name in self._template.variables), None)
                fix = "set data.reasoning=as_inference, which makes a row of each such turn"
                raise self._error(
                    f"message {index}: data.reasoning=keep trains the conversation as one row, but the chat template "
                    f"renders this turn differently when others follow; {fix}"
                    + (f", or set data.chat_template_kwargs={{{name}: {_KEEPING[name]}}}" if name else "")
                )
            spans += served
            by_index[index] = served
        return [Rendered(row.text, [*spans, *row.spans, *self._trained_by_weight()], self._weights(by_index))]

    def _weights(self, spans: Mapping[int, list[Span]]) -> dict[int, float]:
        """Map the starts of the messages' spans, given by the index of the message, to weights other than 1."""
        weights = {index: self._conversation.messages[index].get("weight", 1) for index in spans}
        return {start: weights[index] for index, own in spans.items() for start, _ in own if weights[index] != 1}

    def _answer(self, index: int) -> Answer:
        special = self._template.special
        if not self._template.marked:
            text, start = self._prompted(index, index + 1)
            message = self._conversation.messages[index]
            content = message["content"].strip()
            is_last = content and not message.get("tool_calls") and content in text[start:]
            behind = text[start:].rpartition(content)[2] if is_last else ""
            if more := self._template.text_behind_end(behind):
                raise self._error(
                    f"message {index}: the chat template writes {shown(more)} behind this turn, which no model has to "
                    f"write; {OTHER_TEMPLATE}"
                )
            # no model has to write white space after the token that ends the turn
            stripped = text[:start] + text[start:].rstrip()
            end = len(stripped) if stripped[start:].endswith(special) else len(text)
            return Answer(self._body(text), self._ended(text, [(start, end)], index))
        text, marks = self._render(index + 1)
        before = self.text(index)
        if not text.startswith(before):
            if any(message["role"] == "assistant" for message in self._conversation.messages[:index]):
                raise self._error(
                    f"message {index}: the chat template renders the turns before this one differently when it "
                    "follows, so its marks cannot be told from theirs; give the turns before it as a column `prompt`, "
                    "and this one as `completion`"
                )
            before = ""
        spans = [(start, end) for start, end in marks if len(before) <= start < end]
        return Answer(self._body(text), self._ended(text, spans, index) if spans else Rendered(text, []))

    def _body(self, text: str) -> str:
        """Return a text up to the end of its last turn."""
        body = text.removesuffix(self._template.closing).rstrip()
        return body if body.endswith(self._template.special) else text  # what closes a text may be its only end

    def _prompted(self, index: int, num_messages: int) -> tuple[str, int]:
        """Return the text of the first messages, and where in it the answer of one begins.

        That is where the generation prompt ends. If the template renders the turns before the answer differently once
        it follows, as Mistral's a system prompt, the text is the prompt and the answer behind it.
        """
        text, before = self._render(num_messages)[0], self.text(index)
        try:
            asked = self._render(index, True)[0]
        except DataError:
            if index:
                raise
            asked = ""  # many templates refuse to render nothing
        if asked != before and text.startswith(asked):
            return text, len(asked)
        head, calls = self._head(index), self._conversation.messages[index].get("tool_calls")
        if calls and not text.startswith(head):  # the header before calls may be another one
            with suppress(DataError):
                head = self._head(index, tool_calls=calls)
        # the prompt may render the turns before differently: it begins with its last special token then
        at = len(before) if asked.startswith(before) else max(map(asked.rfind, self._template.special), default=-1)
        opening, header = asked[max(at, 0) :], head.removeprefix(before)
        squeezed = {"".join(part.split()) for part in (asked, head)}
        is_same = len(squeezed) == 1 and not self._template.shared_start(opening, header).strip()
        if is_same and not text.startswith(asked) and num_messages == index + 1 and text.startswith(head):
            # as vLLM's for Llama 4, with a line break before the prompt, but none before the turn
            return asked + text[len(head) :], len(asked)
        if all(part.startswith(before) for part in (text, head, asked)):
            return text, self._unlike(index, text, before, asked)
        if num_messages == index + 1 and text.startswith(head):
            if opening and (head.endswith(opening) or opening in head[self._start_of_last(index) :]):
                # gpt-oss writes the name of a channel between the opening and the content
                return asked + text[head.rindex(opening) + len(opening) :], len(asked)
            mark = max((token for token in self._template.special if asked.endswith(token)), key=len, default="")
            if mark and not (space := head.rpartition(mark)[2]).strip():
                return asked + space + text[len(head) :], len(asked)
        raise self._error(
            f"message {index}: the chat template renders the turns before this one differently when it follows, so its "
            f"tokens cannot be found; {OTHER_TEMPLATE}"
        )

    def _start_of_last(self, index: int) -> int:
        """Return where the content of the message before a turn begins in the text up to the turn's content."""
        messages = list(self._conversation.messages[: index + 1])
        messages[index - 1] = {**messages[index - 1], "content": PROBE}
        return len(RenderedTurns(replace(self._conversation, messages=tuple(messages)), self._template)._head(index))

    def _head(self, index: int, **keys: Any) -> str:
        """Return the text up to the content of a turn, or to another PROBE that `keys` of the message have."""
        message = self._conversation.messages[index]
        said = {"role": "assistant", "content": PROBE, **{key: PROBE for key in REASONING if message.get(key)}, **keys}
        probed = replace(self._conversation, messages=(*self._conversation.messages[:index], said))
        head, mark, _ = self._template.render(probed)[0].partition(PROBE)
        if not mark:
            what = "the content of" if said["content"] else "calls of tools in"
            raise self._error(f"message {index}: the chat template leaves out {what} this turn; {OTHER_TEMPLATE}")
        return head

    def _unlike(self, index: int, text: str, before: str, asked: str) -> int:
        """Return where an answer begins that is not what follows a generation prompt.

        Args:
            index: the answer's index.
            text: text with the answer.
            before: the text before it.
            asked: the same with the generation prompt.
        """
        header = self._head(index)[len(before) :]
        if asked == before and header.strip() and not index:
            raise self._error(
                "message 0: the conversation begins with an answer, and the chat template writes no prompt for one; "
                'give this turn "weight": 0, or put a turn of the user before it'
            )
        if asked == before and header.strip():
            raise self._error(
                f"message {index}: the chat template has no generation prompt, so {shown(header.strip())} cannot be "
                f"separated from the answer; {OTHER_TEMPLATE}"
            )
        if asked == before:
            return len(before)
        # The prompt ends with <think>, say, and the answer has none. What both begin with is no part of the answer.
        common = self._template.shared_start(asked[len(before) :], header)
        if not text.startswith(before + common) and self._conversation.messages[index].get("tool_calls"):
            header = self._head(index, content="", tool_calls=_CALLS)[len(before) :]
            common = self._template.shared_start(asked[len(before) :], header)
        is_opened = common.strip() or not header or common and header[len(common) :] in asked[len(before) :]
        if not is_opened or not text.startswith(before + common):
            raise self._error(
                f"message {index}: the chat template begins this turn otherwise than the generation prompt "
                f"{shown(asked[len(before) :])}, so the answer's first token cannot be found; {OTHER_TEMPLATE}"
            )
        self.num_unlike += 1
        return len(before) + len(common)

    def _served(self, answer: Answer, text: str) -> list[Span] | None:
        """Return the spans of an answer in a longer text; None if it or the text before it reads differently there."""
        end = len(answer.body)
        if not text.startswith(answer.body):
            return None
        spans = [
            (start, stop if text[:stop] == answer.row.text[:stop] else min(stop, end))
            for start, stop in answer.row.spans
            if start < end
        ]
        if not spans or text[: spans[-1][1]].rstrip().endswith(self._template.special):
            return spans
        # the next turn's first token ends it
        stop = self._template.end_of_turn(text, end)
        return None if stop is None else [*spans[:-1], (spans[-1][0], stop)]

    def _ended(self, text: str, spans: list[Span], index: int) -> Rendered:
        """Extend the last span of a turn to the special token that ends it; if need be, to that of a next turn.

        Raises DataError if there is none.
        """
        *others, (start, end) = spans
        if text[start:end].rstrip().endswith(self._template.special):
            return Rendered(text, spans)
        if end == len(text):
            text += self._template.next_role_end("tool_calls" in self._conversation.messages[index])
        stop = self._template.end_of_turn(text, end)
        if stop is None:
            raise self._error(
                "the chat template writes no special token after the assistant's turn "
                f"{shown(text[start:end])}, and none begins the next turn, so the model would never learn to stop; set "
                f"tokenizer.chat_template to {CHATML}, which adds the tokens that it writes, or to the template of "
                "another model"
            )
        return Rendered(text, [*others, (start, stop)])

    def _trained_by_weight(self) -> list[Span]:
        """Return the spans of others' turns of weight 1: the content, and the tokenizer's end of text if that follows.

        The rule is axolotl's (should_train and train_on_eot in prompt_strategies/chat_template.py).
        """
        spans, messages = [], self._conversation.messages
        text, eos = self._render(len(messages))[0], self._template.eos
        for index, message in enumerate(messages):
            if message["role"] == "assistant" or message.get("weight") != 1:
                continue
            probed = replace(self._conversation, messages=(*messages[:index], {**message, "content": PROBE}))
            head, _, tail = self._template.render(probed)[0].removesuffix(self._template.closing).partition(PROBE)
            whole = self.text(index + 1)
            if not (text.startswith(whole) and whole.startswith(head) and whole.endswith(tail)):
                raise self._error(
                    f"message {index}: the chat template renders this turn differently when others follow, so its "
                    "tokens cannot be found; remove its `train`"
                )
            start, end = len(head), len(whole) - len(tail)
            spans.append((start, end + len(eos) if eos and text.startswith(eos, end) else end))
        return spans

    def _error(self, text: str) -> DataError:
        return DataError(f"{self._conversation.place}: {text}")


def shown(text: str) -> str:
    return repr(text if len(text) <= 40 else f"{text[:20]}...{text[-17:]}")
