"""Which tokens of each row a script trains, and whether a row means the same without the rows and padding around it."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from samecurve.losses.cross_entropy import IGNORE_INDEX

ROLES = ("system", "user", "tool", "assistant")
_KNOWN = {"input_ids", "attention_mask", "position_ids", "token_type_ids", "labels", "num_items_in_batch"}
_MOST_TURNS = 20_000  # remembered; of longer data the first are enough


class Masks:
    """Remembers what a script renders by chat templates, and so knows the roles of tokens."""

    def __init__(self) -> None:
        self._turns: dict[tuple[int, ...], list[tuple[list[int], str]]] = defaultdict(list)  # by their first tokens
        self._roles: dict[str, str] = {}  # of contents; "" if several have it
        self._depth = 0
        self._hides = False  # labels of a masked language model leave it to chance which rows are trained

    def render(self, render: Callable, tokenizer: PreTrainedTokenizerBase, chat: Any, *args: Any, **kwargs: Any) -> Any:
        """Call apply_chat_template."""
        is_one = bool(chat) and isinstance(chat[0], dict)
        for message in (message for messages in ([chat] if is_one else chat) for message in messages):
            content, role = message.get("content"), message.get("role")
            if self._depth or not isinstance(content, str) or not content.strip() or role not in ROLES:
                continue
            if self._roles.setdefault(content, role) != role:
                self._roles[content] = ""
            elif len(self._roles) < _MOST_TURNS:
                ids = tokenizer(content.strip(), add_special_tokens=False)["input_ids"]
                if (ids, content) not in self._turns[tuple(ids[:2])]:
                    self._turns[tuple(ids[:2])].append((ids, content))
        self._depth += 1
        try:
            return render(tokenizer, chat, *args, **kwargs)
        finally:
            self._depth -= 1

    def of_rows(self, inputs: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Say of each row how many tokens are trained: of all, and of each turn; and which is the last."""
        ids, labels, mask = (inputs.get(name) for name in ("input_ids", "labels", "attention_mask"))
        if not isinstance(ids, Tensor) or not isinstance(labels, Tensor) or labels.shape != ids.shape:
            return
        mask = mask if isinstance(mask, Tensor) and mask.shape == ids.shape else torch.ones_like(ids)
        others = mask.bool() & labels.ne(IGNORE_INDEX) & labels.ne(ids)  # shifted already, or a masked model's
        self._hides = self._hides or bool(others.any())
        for index in range(len(ids)):
            kept = mask[index].bool()
            row, wanted = ids[index][kept].tolist(), labels[index][kept].tolist()
            trained = [place for place, label in enumerate(wanted) if label != IGNORE_INDEX]
            if others[index].any() or (self._hides and not trained):
                continue
            turns: list[tuple[str, int, int]] = []  # (role, number of tokens, number of trained ones)
            place = 0
            while place < len(row):
                known = self._turns.get(tuple(row[place : place + 2]), ())
                fits = [turn for turn in known if row[place : place + len(turn[0])] == turn[0]]
                said, content = max(fits, key=lambda turn: len(turn[0]), default=([0], ""))
                if role := self._roles.get(content, ""):
                    num_trained = sum(label != IGNORE_INDEX for label in wanted[place : place + len(said)])
                    turns.append((role, len(said), num_trained))
                place += len(said)
            last = trained[-1] if trained else len(row)
            yield {
                "tokens": len(row),
                "trained": len(trained),
                "last": row[last] if trained else None,
                "next": row[last + 1] if last + 1 < len(row) else None,
                "turns": turns,
            }


def mask_problem(rows: list[dict[str, Any]]) -> str:
    """Return what is wrong with the trained tokens of these rows; "" if nothing is."""
    if empty := sum(not row["trained"] for row in rows):
        return f"{empty} of {len(rows)} rows have no trained token: a loss of 0, or 0 / 0"
    # what all rows are trained on to their last token needs no end; and if all end alike, that is the end
    ends, follows = {row["last"] for row in rows}, {row["next"] for row in rows}
    if len(ends) > 1 and len(follows) == 1 and None not in follows and not ends & follows:
        told = f"after its last trained token each row goes on with token {follows.pop()}, which is never trained"
        return f"{told}: the model does not learn to stop"
    counts = Counter[tuple[str, bool]]()
    for row in rows:
        for role, size, trained in row["turns"] if row["trained"] < row["tokens"] else ():
            counts[role, role == "assistant" and 0 < trained < size or role != "assistant" and trained > 0] += 1
    for role in ROLES:
        if wrong := counts[role, True]:
            how = "are trained in part" if role == "assistant" else "have trained tokens"
            return f"{wrong} of {wrong + counts[role, False]} turns of {role} {how}"
    return ""


@torch.no_grad()
def apart(module: nn.Module, inputs: dict[str, Any], output: Any) -> tuple[float, str]:
    """Return how far the outputs of texts are from those without other rows, padding, and texts packed with them.

    Relative to the largest output, with a sentence of where that is most; (0, "") within rounding, and for what is not
    known. If outputs agree, the same of the loss with one more column of padding.
    """
    ids, logits = inputs.get("input_ids"), getattr(output, "logits", None)
    unknown = {name for name, value in inputs.items() if isinstance(value, Tensor)} - _KNOWN
    is_plain = isinstance(module, PreTrainedModel | PeftModel) and not module.config.is_encoder_decoder and not unknown
    if not is_plain or not isinstance(ids, Tensor) or not isinstance(logits, Tensor) or ids.ndim != 2:
        return _of_padding(module, inputs, output)
    worst, where = 0.0, ""
    positions, mask = inputs.get("position_ids"), inputs.get("attention_mask")
    names = ("input_ids", "position_ids", "token_type_ids")
    by_token = {name: inputs[name] for name in names if isinstance(inputs.get(name), Tensor)}
    by_token = {name: values for name, values in by_token.items() if values.shape == ids.shape}
    for row in range(len(ids)):
        places = torch.arange(ids.shape[1])
        if isinstance(mask, Tensor) and mask.shape == ids.shape:
            places = places[mask[row].bool()]
        of_row = positions[row if len(positions) > 1 else 0].tolist() if isinstance(positions, Tensor) else None
        starts = [place for place in places.tolist() if of_row and of_row[place] == 0] or places.tolist()[:1]
        for number, start in enumerate(starts):
            stop = starts[number + 1] if number + 1 < len(starts) else int(places[-1]) + 1
            alone = {name: values[row : row + 1, start:stop] for name, values in by_token.items()}
            other = module(**alone).logits[0]
            ours = logits[row, start:stop] if logits.ndim == 3 else logits[row]
            if other.shape != ours.shape:
                continue
            value = float((other - ours).abs().max() / other.abs().max().clamp(min=1e-12))
            if value > max(worst, 1e-3 if logits.dtype == torch.float32 else 0.05):
                worst, place = value, f"text {number + 1} of row {row + 1}"
                where = f"the model's outputs for {place} are {value:.1e} away, relative, from those for it alone"
    return (worst, where) if worst else _of_padding(module, inputs, output)


def _of_padding(module: nn.Module, inputs: dict[str, Any], output: Any) -> tuple[float, str]:
    """Return what one more column of padding changes in a loss, as `apart` does."""
    mask, loss = inputs.get("attention_mask"), getattr(output, "loss", None)
    most = getattr(getattr(module, "config", None), "max_position_embeddings", None)
    if not isinstance(mask, Tensor) or mask.ndim != 2 or not isinstance(loss, Tensor) or loss.numel() > 1:
        return 0.0, ""
    if "position_ids" in inputs or not most or most <= mask.shape[1]:
        return 0.0, ""
    fillers = {"input_ids": getattr(module.config, "pad_token_id", None) or 0, "labels": IGNORE_INDEX}
    wider = {
        name: nn.functional.pad(value, (0, 1), value=fillers.get(name, 0))
        for name, value in inputs.items()
        if isinstance(value, Tensor) and value.shape == mask.shape
    }
    other = module(**{**inputs, **wider}).loss
    value = float((other - loss).abs() / loss.abs().clamp(min=1e-12))
    if not value > (1e-4 if loss.dtype == torch.float32 else 0.05):
        return 0.0, ""
    return value, f"one more column of padding changes the loss by {value:.1e}, relative"
