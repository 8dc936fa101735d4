"""Answers and whether each is good (KTO), in the formats of conversations with a column `label` or `kto_tag`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from samecurve.data.encoder import Encoded
from samecurve.data.formats import no_column
from samecurve.data.schemas import conversation
from samecurve.data.schemas.conversation import VERDICTS, ChatSchema, Conversation
from samecurve.data.schemas.messages import shown
from samecurve.data.schemas.preference import Pair, PairEncoder, PairSource, check_answer, prompt_of
from samecurve.errors import DataError
from samecurve.specs.row_formats import PAIRS, fitting


@dataclass(frozen=True)
class Judged:
    """A conversation that ends with an answer, and whether it is a good one. Its str() is both without the place."""

    conversation: Conversation
    is_good: bool

    @property
    def place(self) -> str:
        return self.conversation.place

    @property
    def split_key(self) -> str:
        return prompt_of(self.conversation)

    def __str__(self) -> str:
        return f"{self.conversation}\0{self.is_good}"


@dataclass(frozen=True)
class JudgedSource(PairSource):
    """Tables whose rows are judged answers or preference pairs, of which one answer is good and one is not."""

    documents_are, a_line_is = "answers", "one answer and its label, or one pair of answers"

    @property
    def identity(self) -> str:
        return f"judged {super().identity}"

    @property
    def _chats(self) -> ChatSchema:
        return ChatSchema(chat=self.schema.chat, template_kwargs=self.schema.template_kwargs)

    def columns_read(self, row: dict) -> tuple[str, ...]:
        column = _verdict_column(row)
        return super().columns_read(row) if column is None else (*conversation.columns_read(row, self._chats), column)

    def format_name(self, row: dict) -> str:
        is_pair = _verdict_column(row) is None
        return super().format_name(row) if is_pair else conversation.format_of(row, self._chats).name

    def texts(self, document: Pair | Judged) -> list[str]:
        if isinstance(document, Pair):
            return super().texts(document)
        return [message["content"] for message in document.conversation.messages if message.get("content")]

    def read(self, place: str, row: dict) -> Pair | Judged:
        column = _verdict_column(row)
        if column is None:
            if not fitting(row, PAIRS) and not self.schema.names_columns:
                raise no_column(place, row, "'label' (whether the answer is good), nor 'chosen' and 'rejected'")
            return super().read(place, row)
        verdict = conversation.is_good(row[column])
        if verdict is None:
            raise DataError(
                f"{place}: {column!r} is {shown(row[column])}, not true (a good answer) or false; correct it"
            )
        read = conversation.conversation(place, row, self._chats)
        if not read.messages:
            column = conversation.format_of(row, self._chats).columns[0]
            raise DataError(f"{place}: {column!r} does not say where the answer begins; give prompt and completion")
        num_prompt = read.num_prompt or len(read.messages) - 1  # of a conversation the last turn is judged
        check_answer(place, conversation.format_of(row, self._chats).columns[-1], read.messages[num_prompt:])
        return Judged(replace(read, num_prompt=num_prompt), verdict)


def _verdict_column(row: Iterable[str]) -> str | None:
    return next((column for column in VERDICTS if column in row), None)


class JudgedEncoder(PairEncoder):
    """Encodes each answer as a document with its prompt; its label is 1 for a good answer and 0 for a bad one."""

    segmented, labelled = False, True

    def encode(self, documents: list[Pair | Judged]) -> list[Encoded]:
        answers = [
            [(document.chosen, 1), (document.rejected, 0)]
            if isinstance(document, Pair)
            else [(document.conversation, int(document.is_good))]
            for document in documents
        ]
        encoded = iter(self._one.encode([answer for group in answers for answer, _ in group]))
        judged = []
        for group in answers:
            rows = []
            for _, label in group:
                answer = next(encoded)
                assert answer.trained is not None  # both encoders of chats are masked
                trained = np.asarray(answer.trained)
                if self._completions:  # from the first trained token to the end
                    trained = np.arange(len(trained)) >= int(np.argmax(trained))
                rows.append(answer._replace(trained=trained, label=label))
            judged.append(rows[0]._replace(more=tuple(rows[1:])))
        return judged
