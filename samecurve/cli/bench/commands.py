"""Subcommands of `python -m samecurve bench`: speed of this machine, and of a recipe on it."""

COMMANDS = {
    "matmul": "the ceiling of this device: squares, a recipe's layers, copies",
    "collectives": "what processes send each other: time and bandwidth over sizes",
    "dataloader": "rows per second by number of workers, and how many are enough",
    "shapes": "the best width near a wanted one: SwiGLU, vocabulary padding",
    "step": "a recipe's step with each lever on and off, side by side",
}
