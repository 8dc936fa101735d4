"""Encoders of conversations: the chat template renders them, and the assistant's tokens are marked as trained."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime
from typing import TYPE_CHECKING

import numpy as np

from samecurve.data.chat_template import CALLING, ChatTemplate
from samecurve.data.chat_turns import OTHER_TEMPLATE, Rendered, RenderedTurns
from samecurve.data.conversation_encoder import ConversationEncoder, TextEncoder, overlap, weights_of
from samecurve.data.encoder import Encoded
from samecurve.data.known_templates import variant
from samecurve.data.schemas.conversation import ChatSchema, Conversation
from samecurve.errors import ConfigurationError, DataError
from samecurve.specs.data_names import CHATML
from samecurve.storage.cache import digest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

# Part of the cache key: raise it when the same conversation gives other tokens or other trained marks.
_VERSION = 7


class ChatEncoder(ConversationEncoder):
    """Encodes conversations with the tokenizer's chat template.

    Trained spans are found in the rendered text; all tokens that overlap them are trained. A span is the part that the
    template marks by {% generation %}. Without such marks it is the text that each assistant turn adds to the prompt
    that the model gets for it; if that is ambiguous, an error is raised. Turns of weight 0 are not trained. The special
    token that ends a turn is trained, even if the mark ends before it or the next turn begins with it. A line break
    after that token is not trained unless it is marked, because generation stops before it.

    Many templates render a turn differently once others follow: they drop its reasoning, or end it by another token.
    With reasoning="as_inference" such a conversation becomes several rows. A row is the conversation up to one answer,
    as the model sees it when it writes that answer. All turns that read the same in it are trained in it, and each turn
    is trained in one row only. With "keep" a conversation is one row, and a template that drops reasoning is an error.

    With train_on="completion" everything after the prompt is trained instead, whatever is marked, as in TRL's
    DPOTrainer and KTOTrainer, and in SFTTrainer with completion_only_loss.

    Counts:
        answers_begun_inside_a_token: answers whose first characters share a token with the prompt, mostly a line break
            with the spaces after it. The model is trained to write this token, but never has to at inference.
        answers_unlike_the_prompt: answers without something that ends the generation prompt, such as <think>.
        answers_without_their_reasoning: answers whose reasoning, or text before </think>, the template leaves out
            wherever they stand.
        calls_without_their_text: answers with calls of tools beside which the template leaves out the text.
        messages_with_special_tokens: messages whose text contains a special token.
        developer_messages_as_system: messages of the role developer, for templates that know the role system only.
        split_conversations: conversations that became several rows.
        rows_of_split_conversations: those rows.

    Raises:
        ConfigurationError: for a variable that no template reads, and for a template without an end.
        DataError: for a tokenizer without a template, and for a conversation that the template cannot render.
    """

    renders = True
    rare = (
        *("answers_unlike_the_prompt", "answers_without_their_reasoning", "calls_without_their_text"),
        "developer_messages_as_system",
        *("split_conversations", "rows_of_split_conversations"),
    )
    counted = ("answers_begun_inside_a_token", "messages_with_special_tokens", *rare)

    def __init__(
        self, tokenizer: PreTrainedTokenizerFast, schema: ChatSchema, date: str | None = None, splits: bool = True
    ):
        """Prepare the templates.

        Args:
            tokenizer: tokenizer with one or several chat templates.
            schema: what is trained.
            date: the day that the template takes for today, as YYYY-MM-DD; None for today.
            splits: whether a conversation may become several rows, which is an error otherwise.
        """
        super().__init__(tokenizer)
        if not tokenizer.chat_template:
            raise DataError(
                f"{tokenizer.name_or_path or 'the tokenizer'}: there is no chat template; use a chat model's "
                f"tokenizer, set tokenizer.chat_template to a Jinja file or to {CHATML} (which adds its two tokens if "
                "they are missing), or set data.chat=false to train on prompts and completions, or on input_ids, "
                "without a template"
            )
        from tokenizers import processors

        self.tokenizer, self.schema, self.splits, self.weighted = tokenizer, schema, splits, schema.weighted
        self._rust.encode_special_tokens = False  # the template writes special tokens as text
        # A post-processor would trim spaces from the offsets, and add tokens that the template has already written.
        self._rust.post_processor = processors.Sequence([])
        day = datetime.fromisoformat(date or datetime.now().date().isoformat())
        known: str | dict[str, str] = tokenizer.chat_template
        sources = known.values() if isinstance(known, dict) else (known,)
        variables = schema.template_kwargs
        made = {source: variant(source, schema.reasoning == "keep") for source in sources}
        self.templates = {
            source: ChatTemplate(tokenizer, one.template if one else source, day, variables)
            for source, one in made.items()
        }
        effects = dict.fromkeys(one.effect for one in made.values() if one)
        self.facts = {"chat_template": "; ".join(effects)} if effects else {}
        unknown = [template.unknown_variable(variables) for template in self.templates.values()]
        if all(unknown):
            raise ConfigurationError(f"data.chat_template_kwargs: found {unknown[0]}")
        facts = [day.isoformat()] if any(template.dated for template in self.templates.values()) else []
        facts += [template.unasked for template in self.templates.values() if template.unasked]
        facts += [one.template for one in made.values() if one]
        # with the special tokens, which the template may write by their names
        names = [tokenizer.chat_template, {key: str(value) for key, value in tokenizer.special_tokens_map.items()}]
        settings = [schema.train_on, schema.reasoning, variables]
        self.identity = digest(_VERSION, self.identity, names, *settings, *facts)

    def reads(self, key: str) -> bool:
        return any(template.reads(key) for template in self.templates.values())

    def encode_texts(self, documents: list[Conversation]) -> list[Encoded]:
        rendered = [self.rows(document) for document in documents]
        flat = [row for rows in rendered for row in rows]
        encodings = self._rust.encode_batch([row.text for row in flat], add_special_tokens=False)
        of_rows = []
        for encoding, row in zip(encodings, flat, strict=True):
            offsets, spans = np.array(encoding.offsets), row.spans
            inside = sum(bool(((offsets[:, 0] < start) & (start < offsets[:, 1])).any()) for start, _ in spans)
            self.counts["answers_begun_inside_a_token"] += inside
            weights = np.ones(len(offsets), np.float32) if self.weighted else None
            if weights is not None:
                for span in (span for span in spans if span[0] in row.weights):
                    weights[overlap(offsets, [span])] = weights_of([row.weights[span[0]]])
            of_rows.append(Encoded(encoding.ids, overlap(offsets, spans), weights=weights))
        following = iter(of_rows)
        encoded, specials = [], next(iter(self.templates.values())).special
        for document, rows in zip(documents, rendered, strict=True):
            first, *more = [next(following) for _ in rows]
            encoded.append(first._replace(more=tuple(more)))
            if more:
                self.counts["split_conversations"] += 1
                self.counts["rows_of_split_conversations"] += len(rows)
            special = (any(token in message["content"] for token in specials) for message in document.messages)
            self.counts["messages_with_special_tokens"] += sum(special)
        return encoded

    def rows(self, conversation: Conversation) -> list[Rendered]:
        """Return the rows of a conversation, in the order of their last turns."""
        template = self.template(conversation)
        conversation = self._with_known_roles(conversation, template)
        if template.unasked is None and not template.marked:
            raise DataError(
                f"{conversation.place}: the chat template ends a question and an answer alike, with and without a "
                "generation prompt, so the end of an answer cannot be told from the prompt for the next; "
                f"{OTHER_TEMPLATE}"
            )
        turns = RenderedTurns(conversation, template)
        if self.schema.train_on == "all":
            text, _ = template.render(conversation)
            rows = [Rendered(text, [(0, len(text))])]
        elif self.schema.train_on == "completion":
            rows = [turns.completion()]
        else:
            answers = turns.answers()
            rows = turns.kept(answers) if self.schema.reasoning == "keep" else turns.as_inference(answers)
        self.counts["answers_unlike_the_prompt"] += turns.num_unlike
        self.counts["answers_without_their_reasoning"] += turns.num_unreasoned
        self.counts["calls_without_their_text"] += turns.num_untold
        if not any(row.spans for row in rows):
            raise DataError(
                f"{conversation.place}: the chat template marks no text of this conversation as the assistant's, so no "
                f"token would be trained; {OTHER_TEMPLATE}"
            )
        if not template.renders_text:
            raise DataError(
                f"{conversation.place}: the chat template leaves out contents that are texts, as those for images do "
                f"that read lists of parts; {OTHER_TEMPLATE}"
            )
        if len(rows) > 1 and not self.splits:
            raise DataError(
                f"{conversation.place}: the chat template renders an answer differently once others follow, so that "
                "the answers have different prompts, but they are compared or scored as one text; set "
                "data.train_on=completion, or put all turns before the last answer into the prompt"
            )
        return rows

    def template(self, conversation: Conversation) -> ChatTemplate:
        """Return the template of a conversation. Raises DataError if it does not read all that the row has."""
        tools = list(conversation.tools) if conversation.tools else None
        # some tokenizers have several templates, of which one is for tools
        template = self.templates[self.tokenizer.get_chat_template(None, tools)]
        used = {"tools": tools, "tool_calls": any("tool_calls" in message for message in conversation.messages)}
        for name, is_used in used.items():
            is_rendered = name in template.source and (name == "tools" or template.num_calls != 0)
            if is_used and not is_rendered:
                raise DataError(
                    f"{conversation.place}: the row has {name}, which the chat template does not render; remove them, "
                    f"or set tokenizer.chat_template to {CHATML}, which does, or to another model's template"
                )
        num_calls = max((len(message.get("tool_calls", ())) for message in conversation.messages), default=0)
        if num_calls > 1 and template.num_calls == 1:
            raise DataError(
                f"{conversation.place}: a turn has {num_calls} calls of tools, of which the chat template renders one "
                "only; write each call and its result as turns of their own, or set tokenizer.chat_template to "
                f"{CHATML}, which renders all, or to another model's template"
            )
        unknown = template.unknown_variable(conversation.template_kwargs or {})
        if unknown:
            raise DataError(f"{conversation.place}: 'chat_template_kwargs' has {unknown}")
        return template

    def _with_known_roles(self, conversation: Conversation, template: ChatTemplate) -> Conversation:
        """Give messages of the role developer the role system, where the template knows that one only.

        Raises DataError for a role that the template leaves out of the text.
        """
        for role in {message["role"] for message in conversation.messages} - {"user", "assistant"}:
            if role == "developer" and not template.renders_role(role) and template.renders_role("system"):
                named = [{**m, "role": "system"} if m["role"] == role else m for m in conversation.messages]
                self.counts["developer_messages_as_system"] += sum(m["role"] == role for m in conversation.messages)
                conversation = replace(conversation, messages=tuple(named))
            elif template.renders_role(role) is False:
                fix = "put their text into the first user turn" if role != "tool" else "write them as user turns"
                raise DataError(
                    f"{conversation.place}: the chat template leaves out messages of the role {role!r}; {fix}, remove "
                    f"the row, or set tokenizer.chat_template to {CHATML}, which renders them"
                )
        return conversation


def encoder(
    tokenizer: PreTrainedTokenizerFast, schema: ChatSchema, date: str | None = None, splits: bool = True
) -> ChatEncoder | TextEncoder:
    """Return the encoder for conversations. `date`, `splits`: see ChatEncoder."""
    return ChatEncoder(tokenizer, schema, date, splits) if schema.chat else TextEncoder(tokenizer, schema)


def end_tokens(tokenizer: PreTrainedTokenizerBase, stored: int | list[int] | None, chat: bool = True) -> list[int]:
    """List the ids that end a generation.

    Args:
        tokenizer: the model's tokenizer, whose end of text is one of them.
        stored: eos_token_id of the model's generation config.
        chat: whether the tokens that the chat template writes after an answer, and after calls of tools, are some, too.
    """
    named = [*(stored if isinstance(stored, list) else [stored]), tokenizer.eos_token_id]
    if chat and tokenizer.chat_template:
        named += _ends_of_turn(tokenizer)
    return list(dict.fromkeys(token for token in named if token is not None))


def _ends_of_turn(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the special tokens that end an answer in the chat template; [] without one."""
    from transformers import PreTrainedTokenizerFast

    if not isinstance(tokenizer, PreTrainedTokenizerFast):  # ChatEncoder needs the Rust backend
        return []
    special = {token.content: index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    ends = []
    try:
        encoder = ChatEncoder(tokenizer, ChatSchema())
    except DataError:  # such a template can render prompts, but not be trained with
        return []
    for message in ({"role": "assistant", "content": "b"}, *([CALLING] if encoder.reads("tool_calls") else [])):
        conversation = Conversation("the chat template", ({"role": "user", "content": "a"}, message))
        try:
            turns = RenderedTurns(conversation, encoder.template(conversation))
            body, (text, spans, _) = turns.answers()[1]
        except DataError:  # such a template can render prompts, but not be trained with
            continue
        # the end of the turn, and what is trained behind it: many templates write a line break after the token
        for ending in (body, text[: spans[-1][1]].rstrip()):
            longest = max((token for token in special if ending.endswith(token)), key=len, default=None)
            ends += [] if longest is None else [special[longest]]
    return ends
