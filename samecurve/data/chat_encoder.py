"""Encoders of conversations: the chat template renders them, and the assistant's tokens are marked as trained."""

from __future__ import annotations

import json
import os.path
import re
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from samecurve.data.conversation_encoder import ConversationEncoder, Span, TextEncoder, overlap
from samecurve.data.encoder import Encoded
from samecurve.data.schemas.conversation import ChatSchema, Conversation
from samecurve.data.time_limit import RenderTimeout, render_limit
from samecurve.errors import ConfigurationError, DataError
from samecurve.specs.data_names import CHATML
from samecurve.storage.cache import digest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

# Part of the cache key: raise it when the same conversation gives other tokens or other trained marks.
_VERSION = 1
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_PROBE = "\N{REFERENCE MARK}"
_DATED = "strftime_now"  # transformers' function for templates that write today's date, as Llama 3.2's does
_FIX = "set tokenizer.chat_template to a template of your own that marks the trained text with {% generation %}"


class ChatEncoder(ConversationEncoder):
    """Encodes conversations with the tokenizer's chat template.

    Trained spans are found in the rendered text; all tokens that overlap them are trained. A span is the part that the
    template marks by {% generation %}. Without such marks it is the text that each assistant turn adds to the text
    before it; if that is ambiguous, an error is raised. Turns of weight 0 are not trained. The special token that ends
    a turn is trained, even if the mark ends before it. A line break after that token is not trained unless it is
    marked, because generation stops before it.

    Some templates (Command A's) always write a generation prompt at the end. After an answer it is left out, because no
    model has to write it.

    With train_on="completion" everything after the prompt is trained instead, whatever is marked, as in TRL's
    DPOTrainer and KTOTrainer, and in SFTTrainer with completion_only_loss.

    Counts:
        answers_begun_inside_a_token: answers whose first characters share a token with the prompt, mostly a line break
            with the spaces after it. The model is trained to write this token, but never has to at inference.
        messages_with_special_tokens: messages whose text contains a special token.

    Raises:
        DataError: for a tokenizer without a template, and for a conversation that the template cannot render.
        ConfigurationError: for a template without an end.
    """

    renders = True
    counted = ("answers_begun_inside_a_token", "messages_with_special_tokens")

    def __init__(self, tokenizer: PreTrainedTokenizerFast, schema: ChatSchema, date: str | None = None):
        """`date`: the day that the template takes for today, as YYYY-MM-DD; None for today."""
        super().__init__(tokenizer)
        if not tokenizer.chat_template:
            raise DataError(
                f"{tokenizer.name_or_path or 'the tokenizer'}: there is no chat template; use a chat model's "
                f"tokenizer, set tokenizer.chat_template to a Jinja file or to {CHATML} (which adds its two tokens if "
                "they are missing), or set data.chat=false to train on prompts and completions, or on input_ids, "
                "without a template"
            )
        from tokenizers import processors

        self.tokenizer, self.schema = tokenizer, schema
        self._rust.encode_special_tokens = False  # the template writes special tokens as text
        # A post-processor would trim spaces from the offsets, and add tokens that the template has already written.
        self._rust.post_processor = processors.Sequence([])
        self._special = tuple(t.content for t in tokenizer.added_tokens_decoder.values() if t.special)
        day = datetime.fromisoformat(date or datetime.now().date().isoformat())
        self._clock = _clock(day)
        known: str | dict[str, str] = tokenizer.chat_template
        self._unasked: dict[str, str | None] = {}
        for template in known.values() if isinstance(known, dict) else (known,):
            self._unasked[template] = self._unasked_prompt(template)
        facts = [day.isoformat()] if _DATED in json.dumps(self.tokenizer.chat_template) else []
        facts += filter(None, self._unasked.values())
        # with the special tokens, which the template may write by their names
        template = [tokenizer.chat_template, {key: str(value) for key, value in tokenizer.special_tokens_map.items()}]
        self.identity = digest(_VERSION, self.identity, template, schema.train_on, *facts)

    def _unasked_prompt(self, template: str) -> str | None:
        """Return the generation prompt that a template writes after an answer, too; "" without one, None if unclear.

        Such a template renders a question alike with and without add_generation_prompt, and ends both a question and
        an answer with the prompt. The answer itself ends with the tokenizer's eos_token.
        """
        turns = tuple({"role": role, "content": _PROBE} for role in ("user", "assistant"))
        probe = Conversation("the chat template", turns)
        try:
            asked = self._apply(probe, template, 1, prompt=True)[0]
            if asked != self._apply(probe, template, 1)[0]:
                return ""
            after = self._apply(probe, template, 2)[0].rpartition(_PROBE)[2]
        except DataError:  # it may need a system prompt or tools
            return ""
        eos = str(self.tokenizer.eos_token or "")
        if eos and eos in after:
            rest = after.rpartition(eos)[2]
            return rest if rest.strip() and asked.endswith(rest) else ""
        common = os.path.commonprefix([after[::-1], asked[::-1]])[::-1]
        shared = any(token in common for token in self._special)
        return None if shared and sum(after.count(token) for token in self._special) > 1 else ""

    def reads(self, key: str) -> bool:
        """Whether one of the tokenizer's templates has the key, as in message.key or message["key"]."""
        named = self.tokenizer.chat_template
        templates = named.values() if isinstance(named, dict) else [named]
        return any(re.search(rf"""[.'"]{re.escape(key)}\b""", template or "") for template in templates)

    def encode_texts(self, documents: list[Conversation]) -> list[Encoded]:
        rendered = [self.render(document) for document in documents]
        encodings = self._rust.encode_batch([text for text, _ in rendered], add_special_tokens=False)
        encoded = []
        for document, encoding, (_, spans) in zip(documents, encodings, rendered, strict=True):
            offsets = np.array(encoding.offsets)
            encoded.append(Encoded(encoding.ids, overlap(offsets, spans)))
            inside = sum(bool(((offsets[:, 0] < start) & (start < offsets[:, 1])).any()) for start, _ in spans)
            self.counts["answers_begun_inside_a_token"] += inside
            special = (any(token in message["content"] for token in self._special) for message in document.messages)
            self.counts["messages_with_special_tokens"] += sum(special)
        return encoded

    def render(self, conversation: Conversation) -> tuple[str, list[Span]]:
        """Return the rendered text and its trained character ranges."""
        template = self._template(conversation)
        text, marked = self._apply(conversation, template, len(conversation.messages))
        if self._unasked[template] is None and not _GENERATION.search(template):
            raise DataError(
                f"{conversation.place}: the chat template ends a question and an answer alike, with and without a "
                "generation prompt, so the end of an answer cannot be told from the prompt for the next; " + _FIX
            )
        if self.schema.train_on == "all":
            return text, [(0, len(text))]
        if self.schema.train_on == "completion":
            spans = [self._completion(conversation, template, text)]
        elif _GENERATION.search(template):
            spans = self._without_untrained(conversation, template, text, [(a, b) for a, b in marked if a < b])
        else:
            spans = self._by_difference(conversation, template, text)
        asked_for = self._asked_for(conversation, template, text)
        if not spans and not asked_for:
            raise DataError(
                f"{conversation.place}: the chat template marks no text of this conversation as the assistant's, so no "
                f"token would be trained; {_FIX}"
            )
        return text, [*(self._with_end(conversation, text, span) for span in spans), *asked_for]

    def _template(self, conversation: Conversation) -> str:
        tools = list(conversation.tools) if conversation.tools else None
        # some tokenizers have several templates, of which one is for tools
        template = self.tokenizer.get_chat_template(None, tools)
        used = {"tools": tools, "tool_calls": any("tool_calls" in message for message in conversation.messages)}
        used |= {f"chat_template_kwargs.{name}": True for name in conversation.template_kwargs or ()}
        for name, is_used in used.items():
            if is_used and name.rpartition(".")[2] not in template:
                raise DataError(
                    f"{conversation.place}: the row has {name}, which the chat template does not render; remove them, "
                    "or set tokenizer.chat_template to a template that does"
                )
        return template

    def _apply(
        self, conversation: Conversation, template: str, num_messages: int, prompt: bool = False
    ) -> tuple[str, list[Span]]:
        """Render the first messages. Returns the text and the ranges marked by `generation`.

        `prompt` adds the generation prompt, which begins an answer.
        """
        from transformers.utils.chat_template_utils import render_jinja_template

        marks = _GENERATION.search(template) is not None
        said = conversation.messages[:num_messages]
        # without the weights, because a template may write whole messages (tojson)
        messages = [{key: value for key, value in message.items() if key != "weight"} for message in said]
        try:
            with render_limit():
                texts, spans = render_jinja_template(
                    [messages],
                    tools=list(conversation.tools) if conversation.tools else None,
                    chat_template=self._clock + template if _DATED in template else template,
                    return_assistant_tokens_mask=marks,
                    add_generation_prompt=prompt,
                    # Names such as eos_token, for the template; pyright expects them to be other parameters.
                    **self.tokenizer.special_tokens_map,  # pyright: ignore[reportArgumentType]
                    **(conversation.template_kwargs or {}),
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
        text = str(texts[0])
        if not prompt and said[-1]["role"] == "assistant":
            text = text.removesuffix(self._unasked.get(template) or "")
        # render_jinja_template returns (texts, spans), whatever its annotation says.
        return text, spans[0] if marks else []  # pyright: ignore[reportReturnType]

    def _without_untrained(self, conversation: Conversation, template: str, text: str, spans: list[Span]) -> list[Span]:
        """Remove spans in turns that are not trained."""
        for first, last in _untrained(conversation):
            ends = []
            for count in (first, last):
                before = self._apply(conversation, template, count)[0] if count else ""
                before = text if count == len(conversation.messages) else before
                if not text.startswith(before):
                    raise DataError(
                        f"{conversation.place}: the chat template renders the first {count} messages differently when "
                        "others follow, so the end of the untrained turns cannot be found; put all turns into one "
                        "column of messages without weights"
                    )
                ends.append(len(before))
            spans = [span for span in spans if not ends[0] <= span[0] < ends[1]]
        return spans

    def _completion(self, conversation: Conversation, template: str, text: str) -> Span:
        """Return the span after the prompt and the generation prompt."""
        asked = self._apply(conversation, template, conversation.num_prompt, prompt=True)[0]
        if not text.startswith(asked):
            raise DataError(
                f"{conversation.place}: the chat template renders the prompt differently when the completion follows, "
                "so the start of the completion cannot be found; set data.train_on=assistant"
            )
        return len(asked), len(text)

    def _by_difference(self, conversation: Conversation, template: str, text: str) -> list[Span]:
        """Return the span that each assistant turn adds to the text that the model is prompted with."""
        spans = []
        apply = partial(self._apply, conversation, template)
        for index in range(conversation.num_prompt, len(conversation.messages)):
            message = conversation.messages[index]
            if message["role"] != "assistant" or message.get("weight") == 0:
                continue
            asked, answered = apply(index, prompt=True)[0], apply(index + 1)[0]
            if not (text.startswith(answered) and answered.startswith(asked)):
                raise DataError(
                    f"{conversation.place}: message {index}: the chat template renders this turn differently when "
                    f"others follow, so its tokens cannot be found; {_FIX}"
                )
            header = self._header(conversation, template, index) if asked == apply(index)[0] else ""
            if header:
                raise DataError(
                    f"{conversation.place}: message {index}: the chat template has no generation prompt, so "
                    f"{_shown(header)} cannot be separated from the answer; {_FIX}"
                )
            spans.append(self._trimmed(text, len(asked), len(answered)))
        return spans

    def _asked_for(self, conversation: Conversation, template: str, text: str) -> list[Span]:
        """Return the spans of others' turns of weight 1: the content, and the tokenizer's end of text if that follows.

        The rule is axolotl's (should_train and train_on_eot in prompt_strategies/chat_template.py).
        """
        spans = []
        for index, message in enumerate(conversation.messages if self.schema.train_on == "assistant" else ()):
            if message["role"] == "assistant" or message.get("weight") != 1:
                continue
            probe = ({**message, "content": _PROBE},)
            probed = replace(conversation, messages=(*conversation.messages[:index], *probe))
            head, _, tail = self._apply(probed, template, index + 1)[0].partition(_PROBE)
            whole = self._apply(conversation, template, index + 1)[0]
            if not (text.startswith(whole) and whole.startswith(head) and whole.endswith(tail)):
                raise DataError(
                    f"{conversation.place}: message {index}: the chat template renders this turn differently when "
                    f"others follow, so its tokens cannot be found; remove its `train`"
                )
            start, end = len(head), len(whole) - len(tail)
            eos = str(self.tokenizer.eos_token or "")
            spans.append((start, end + len(eos) if text.startswith(eos, end) else end))
        return spans

    def _header(self, conversation: Conversation, template: str, index: int) -> str:
        """Return the text that a template without a generation prompt writes between a question and its answer."""
        # Found by a probe that occurs in no template. The turn itself may hold tool calls only, whose marks the model
        # has to write.
        probe = {"role": "assistant", "content": _PROBE}
        asked = replace(conversation, messages=(*conversation.messages[:index], probe))
        before, after = (self._apply(asked, template, count)[0] for count in (index, index + 1))
        return after[len(before) :].partition(_PROBE)[0].strip()

    def _trimmed(self, text: str, start: int, end: int) -> Span:
        """Remove white space after the token that ends the turn, because no model has to write it."""
        stripped = text[start:end].rstrip()
        return (start, start + len(stripped)) if stripped.endswith(self._special) else (start, end)

    def _with_end(self, conversation: Conversation, text: str, span: Span) -> Span:
        """Extend the span to the special token that ends the turn. Raises DataError if there is none."""
        start, end = span
        if text[start:end].rstrip().endswith(self._special):
            return span
        # the longest, as one special token may be the beginning of another
        following = max((token for token in self._special if text.startswith(token, end)), key=len, default=None)
        if following is None:
            raise DataError(
                f"{conversation.place}: the chat template writes no special token after the assistant's turn "
                f"{_shown(text[start:end])}, so the model would never learn to stop; set tokenizer.chat_template to a "
                "template of your own that writes {{ eos_token }} there, or to "
                f"{CHATML}, which adds the tokens that it writes"
            )
        return start, end + len(following)


def encoder(
    tokenizer: PreTrainedTokenizerFast, schema: ChatSchema, date: str | None = None
) -> ChatEncoder | TextEncoder:
    """Return the encoder for conversations. `date`: see ChatEncoder."""
    return ChatEncoder(tokenizer, schema, date) if schema.chat else TextEncoder(tokenizer, schema)


def end_tokens(tokenizer: PreTrainedTokenizerBase, stored: int | list[int] | None, chat: bool = True) -> list[int]:
    """List the ids that end a generation.

    Args:
        tokenizer: the model's tokenizer, whose end of text is one of them.
        stored: eos_token_id of the model's generation config.
        chat: whether the token that the chat template writes after an answer is one, too.
    """
    named = [*(stored if isinstance(stored, list) else [stored]), tokenizer.eos_token_id]
    if chat and tokenizer.chat_template:
        named.append(_end_of_turn(tokenizer))
    return list(dict.fromkeys(token for token in named if token is not None))


def _end_of_turn(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Return the special token that the chat template writes after an answer; None without one."""
    from transformers import PreTrainedTokenizerFast

    if not isinstance(tokenizer, PreTrainedTokenizerFast):  # ChatEncoder needs the Rust backend
        return None
    messages = ({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"})
    try:
        text, spans = ChatEncoder(tokenizer, ChatSchema()).render(Conversation("the chat template", messages))
    except DataError:  # such a template can render prompts, but not be trained with
        return None
    special = {token.content: index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    ending = text[: spans[-1][1]].rstrip()  # many templates write a line break after the token
    longest = max((token for token in special if ending.endswith(token)), key=len, default=None)
    return None if longest is None else special[longest]


def _untrained(conversation: Conversation) -> Iterator[tuple[int, int]]:
    """Yield ranges of messages that are not trained: a prompt that contains example answers, and turns of weight 0."""
    # A turn's range ends where the next answer begins. Many templates drop the reasoning from the turns before the last
    # question, so a conversation that ends with the turn itself would be rendered differently.
    answers = [index for index, message in enumerate(conversation.messages) if message["role"] == "assistant"]
    if any(index < conversation.num_prompt for index in answers):
        yield 0, conversation.num_prompt
    for index, following in zip(answers, [*answers[1:], len(conversation.messages)], strict=True):
        if index >= conversation.num_prompt and conversation.messages[index].get("weight") == 0:
            yield index, following


def _clock(day: datetime) -> str:
    """Return the beginning of a template in which strftime_now is of the given day.

    A Jinja macro, because transformers turns a function among a template's variables into text.
    """
    directives = [f"%{dash}{letter}" for letter in "aAbBcdeDFHIjmMnprRSTuUwWxXyYZ" for dash in ("", "-")]
    values = "".join(f" | replace({name!r}, {day.strftime(name)!r})" for name in directives)
    # the last expression keeps a line break at the beginning of the template itself
    return "{% macro " + _DATED + "(format) %}{{ format" + values + " }}{% endmacro %}{{ '' }}"


def _shown(text: str) -> str:
    return repr(text if len(text) <= 40 else f"{text[:20]}...{text[-17:]}")
