"""Texts that the model writes while it is trained (evaluate.samples): what follows the first held-out rows' prompts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from samecurve.data.chat_encoder import end_tokens
from samecurve.data.micro_batch import MicroBatch
from samecurve.losses.cross_entropy import IGNORE_INDEX

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import PreTrainedTokenizerFast

    from samecurve.data.datasets.base import Rows
    from samecurve.distributed.control_group import ControlGroup
    from samecurve.interfaces.engine import Engine

MOST_NEW_TOKENS = 64
WIDTH = 32  # rows are padded to a multiple


def write_samples(
    engine: Engine,
    rows: Rows,
    count: int,
    tokenizer: PreTrainedTokenizerFast,
    world: ControlGroup,
    busy: Callable[[], None],
) -> list[tuple[str, str]]:
    """Continue the prompts of the first `count` rows, each time by the likeliest token. Collective.

    Every token is a forward pass of all rows without a cache, because sharded and pipelined engines have no other. A
    text ends at the tokenizer's end token, after MOST_NEW_TOKENS tokens, or at the row's length.

    Args:
        busy: called for each token.

    Returns:
        (prompt, text) of each row.
    """
    prompts = [_prompt(rows, index) for index in range(min(count, len(rows)))]
    lengths = [len(prompt) for prompt in prompts]
    width = min(-(-(max(lengths) + MOST_NEW_TOKENS) // WIDTH) * WIDTH, rows.sequence_length)
    ids = torch.full((len(prompts), width), rows.padding_token)
    for row, prompt in enumerate(prompts):
        ids[row, : len(prompt)] = torch.from_numpy(prompt)
    positions = torch.arange(width).repeat(len(prompts), 1)
    labels = torch.full_like(ids, IGNORE_INDEX)
    stops, ends = end_tokens(tokenizer, None), list(lengths)
    writing = {row for row, length in enumerate(lengths) if length < width}
    for _ in range(MOST_NEW_TOKENS):
        if not writing:
            break
        busy()
        # later tokens are not attended to, so that rows of different lengths need no mask
        batch = MicroBatch({"input_ids": ids, "position_ids": positions}, {"labels": labels})
        logits = engine.outputs(batch, torch.tensor(ends) - 1)
        likeliest = world.on_main(lambda logits=logits: logits.argmax(dim=-1).tolist() if logits is not None else [])
        for row in tuple(writing):
            ids[row, ends[row]] = likeliest[row]
            ends[row] += 1
            if likeliest[row] in stops or ends[row] == width:
                writing.remove(row)
    spans = zip(ids.tolist(), lengths, ends, strict=True)
    return [(str(tokenizer.decode(row[:length])), str(tokenizer.decode(row[length:end]))) for row, length, end in spans]


def _prompt(rows: Rows, index: int) -> np.ndarray:
    """Return the tokens before the first trained one of a row; half of its first document where all are trained."""
    row = rows[np.array([index])]
    trained = np.flatnonzero(row.labels[0] != IGNORE_INDEX)
    # labels are shifted: the label at t is the token at t + 1
    given = int(trained[0]) + 1 if len(trained) else 1
    starts = np.flatnonzero(row.inputs["position_ids"][0] == 0)  # of the documents of a packed row
    end = int(starts[1]) if len(starts) > 1 else max(len(trained), 1)
    return row.inputs["input_ids"][0, : given if given > 1 else (end + 1) // 2]
