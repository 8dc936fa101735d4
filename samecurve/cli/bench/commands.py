"""Subcommands of `python -m samecurve bench`: speed of this machine, and of a recipe on it."""

COMMANDS = {
    "matmul": "measure matrix multiplications and memory copies of this device",
    "collectives": "measure time and bandwidth of collectives by message size",
    "memory": "measure what a process holds beside its tensors",
    "dataloader": "measure rows per second by number of workers, and find how many are enough",
    "step": "measure a recipe's step with each performance option on and off",
}
