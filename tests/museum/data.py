"""Reports of rows, masks and padding."""

from __future__ import annotations

from tests.museum.exhibit import Exhibit

_COLLATE = "def collate(rows):\n"
_UNCACHED = {"sizes |= {": 'sizes |= {"use_cache": False, '}  # with a cache, transformers masks by positions no more
_PACKED = """def collate(rows):
    values = {"input_ids": [], "position_ids": [], "labels": []}
    for row in rows:
        values["input_ids"] += row["input_ids"]
        values["position_ids"] += range(len(row["input_ids"]))
        values["labels"] += [IGNORED, *row["labels"][1:]]
    return {name: torch.tensor([row]) for name, row in values.items()}


def padded(rows):
"""

EXHIBITS = [
    Exhibit(
        28,
        "rows without an answer",
        "TRL #6668, #6320 and #5826",
        "the loss is 0 or NaN in some steps",
        "long prompts fill the row, the answer is cut off, and no token is left to train",
        "trainer",
        {"prompt = index * 5 % 13": "prompt = min(16, index * 5 % 23)"},
        "labels",
        "have no trained token",
    ),
    Exhibit(
        29,
        "user is trained",
        "TRL #6361 and #6363, verl #7807, slime #330 and #1742, OpenRLHF #1080, LLaMA-Factory #10773, ms-swift #4939",
        "the model writes the user's turns",
        "the mask of a conversation of several turns is not closed after the first answer",
        "chat",
        {"            is_answer = token ==": "            is_answer |= token =="},
        "labels",
        "turns of user have trained tokens",
    ),
    Exhibit(
        30,
        "packed texts see each other",
        "transformers #46634, unsloth #8253",
        "the loss of packed rows is lower than that of the same texts alone",
        "a mask of ones replaces the borders that the positions tell",
        "chat",
        {
            **_UNCACHED,
            _COLLATE: _PACKED.replace(
                "    return {name", '    values["attention_mask"] = [1] * len(values["labels"])\n    return {name'
            ),
        },
        "context",
        "text 2 of row 1",
        {**_UNCACHED, _COLLATE: _PACKED},
    ),
    Exhibit(
        33,
        "rank 0 prepares alone",
        "Megatron-Bridge #1505, nanotron #280",
        "the start ends with a timeout of a collective",
        "the other ranks wait in a collective while rank 0 tokenizes",
        "plain",
        {
            "inputs = torch.randn(96, 8)\n": """inputs = torch.randn(96, 8)
if world > 1:
    import time
    from datetime import timedelta
    group = dist.new_group(timeout=timedelta(seconds=2))
    time.sleep(0 if rank else 6)
    dist.all_reduce(torch.zeros(1), group=group)
"""
        },
        "ended",
        "after 0 of 3 steps",
        {
            "inputs = torch.randn(96, 8)\n": """inputs = torch.randn(96, 8)
if world > 1:
    from datetime import timedelta
    dist.all_reduce(torch.zeros(1), group=dist.new_group(timeout=timedelta(seconds=60)))
"""
        },
    ),
    Exhibit(
        36,
        "reference of other rows",
        "TRL #6527, #6403 and #5542",
        "the rewards of preference training are noise on several GPUs",
        "what the ranks computed for every second row is put together rank by rank",
        "pairs",
        {"torch.stack(accelerator.gather(own).chunk(world), 1).flatten(0, 1)": "accelerator.gather(own)"},
        "loss",
        "",
    ),
    Exhibit(
        38,
        "reward of the padding",
        "TRL #2758 and #937, transformers #35352",
        "the reward of a text depends on the longest one beside it",
        "the model looks for the end of a text by another token than that of the padding",
        "rewards",
        {"pad_token_id=PAD": "pad_token_id=END"},
        "context",
        "padding, or what stands beside it",
    ),
]
