"""Rows of conversations that are tokenised already, by axolotl, transformers or TRL: ids, labels, masks, weights."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

from samecurve.data.schemas.messages import A_WEIGHT, is_weight, shown
from samecurve.errors import DataError

_MASKS = ("completion_mask", "assistant_masks")  # a token is trained where all that a row has are 1, as in TRL


class TokenRow(NamedTuple):
    """A tokenised row.

    Attributes:
        tokens: token ids.
        trained: whether each of them is trained.
        weights: of the loss of each of them, () for 1.
    """

    tokens: tuple[int, ...]
    trained: tuple[bool, ...]
    weights: tuple[float, ...]


def token_row(place: str, row: dict, train_on: str, weighted: bool) -> TokenRow:
    """Read and check a tokenised row. `train_on`, `weighted`: see ChatSchema.

    Raises:
        DataError: with the place, the column, the value and the fix.
    """
    values = _columns(place, row)
    ids = values["input_ids"]
    masks = [values[column] for column in _MASKS if column in values]
    if "labels" not in values and not masks and train_on != "all":
        raise DataError(
            f"{place}: there are 'input_ids' and no 'labels', which say what is trained; add them, or set "
            "data.train_on=all to train all"
        )
    labels, inside = values.get("labels", ids), values.get("attention_mask", [1] * len(ids))
    wrong = next((nth for nth, label in enumerate(labels) if label not in (ids[nth], -100)), None)
    if wrong is not None:
        raise DataError(
            f"{place}: labels[{wrong}] is {labels[wrong]}, but input_ids[{wrong}] is {ids[wrong]}; write the same id "
            "where a token is trained and -100 elsewhere (labels are not shifted)"
        )
    weights = _weights(place, row, len(ids), weighted)
    kept = [nth for nth in range(len(ids)) if inside[nth]]
    trained = tuple(labels[nth] != -100 and weights[nth] > 0 and all(mask[nth] for mask in masks) for nth in kept)
    if not any(trained[1:]):
        raise DataError(f"{place}: no label after the first is a token, so no token would be trained; remove the row")
    given = tuple(weights[nth] for nth in kept) if "weights" in row else ()
    return TokenRow(tuple(ids[nth] for nth in kept), trained, given)


def _columns(place: str, row: dict) -> dict[str, list[int]]:
    """Return the columns that have a whole number for each token. Raises DataError, also for several documents."""
    values: dict[str, list[int]] = {}
    for column in ("input_ids", "labels", "attention_mask", *_MASKS, "position_ids"):
        value = row.get(column)
        if value is None and column != "input_ids":
            continue
        if not isinstance(value, list) or not all(type(number) is int for number in value):
            raise DataError(f"{place}: {column!r} is {shown(value)}, not a list of whole numbers; correct it")
        values[column] = value
        if len(value) != (length := len(values["input_ids"])):
            raise DataError(f"{place}: 'input_ids' has {length} values, but {column!r} has {len(value)}; correct it")
        if column in _MASKS and (wrong := set(value) - {0, 1}):
            raise DataError(f"{place}: {column!r} has {min(wrong)}; write 0 or 1 for each token")
    mask = values.get("attention_mask", [1] * len(values["input_ids"]))
    positions = [nth for nth, inside in zip(values.get("position_ids", ()), mask, strict=False) if inside]
    lengths = row.get("seq_lengths")
    packed = {  # by the column that says so: TRL's, transformers', LLaMA-Factory's
        "seq_lengths": isinstance(lengths, list) and len(lengths) > 1,
        "position_ids": any(after != before + 1 for before, after in pairwise(positions)),
        "attention_mask": len(set(mask) - {0}) > 1,
    }
    if column := next((column for column, is_packed in packed.items() if is_packed), None):
        raise DataError(
            f"{place}: {column!r} says that the row has several documents, which would attend to each other; write "
            "each as a row of its own (data.packing=true packs them)"
        )
    return values


def _weights(place: str, row: dict, length: int, weighted: bool) -> list[float]:
    """Return the weights of a row's tokens, 1 without a column of them."""
    weights = row.get("weights")
    if weights is None:
        return [1.0] * length
    if not weighted:
        raise DataError(f"{place}: 'weights' are there, but data.token_weights is false; set it to true (task sft)")
    wrong = [value for value in weights if not is_weight(value)] if isinstance(weights, list) else [weights]
    if wrong:
        raise DataError(f"{place}: 'weights' has {shown(wrong[0])}; write a list of numbers, each {A_WEIGHT}")
    if len(weights) != length:
        raise DataError(f"{place}: 'input_ids' has {length} values, but 'weights' has {len(weights)}; correct it")
    return weights
