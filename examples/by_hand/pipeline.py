"""Pipeline parallelism: each rank has one layer; micro-batches pass through, forward and back, in three schedules.

holds    the weights, gradients and optimizer state of its layer; the inputs of the micro-batches that are under way
travels  between neighbours only: the activations of each micro-batch forward, their gradients back. A rank between
         two others sends 2 x rows x width numbers per step, whatever the schedule and however large the layers
equal    The layers are applied in the same order to the same rows, and the micro-batches' gradients are added up. A
         schedule changes when this is done, never what: all three agree with each other to the last bit.

The layer is y = tanh(x A), and its backward is written out, so that the two halves of zero bubble can be seen:
    B  dz = dy (1 - y^2),  dx = dz A^T     sent to the stage before, which waits for it
    W  dA = x^T dz                         can be done at any later time, when there is nothing else to do

`pipeline_schedules.py` has the schedules, their papers and their timetables.
"""

import torch
from pipeline_schedules import SCHEDULES
from torch import Tensor
from wire import receive, report, send, start

ROWS, WIDTH, MICRO_BATCHES = 24, 12, 6


def step(name: str, x: Tensor, y: Tensor, weight: Tensor, rank: int, n: int) -> tuple[Tensor, Tensor, int]:
    """Run a step of this rank's stage. x is read by the first stage only, y by the last one.

    Returns (the weight's gradient, the loss's part that is known here, the most inputs held at once).
    """
    inputs, outputs, cotangents = {}, {}, {}
    gradient, loss, most = torch.zeros_like(weight), torch.zeros(()), 0
    rows = x.chunk(MICRO_BATCHES)
    wanted = y.chunk(MICRO_BATCHES)
    for kind, i in SCHEDULES[name](rank, n, MICRO_BATCHES):
        if kind == "F":
            inputs[i] = rows[i] if rank == 0 else receive(rows[i].shape, rank - 1)
            outputs[i] = torch.tanh(inputs[i] @ weight)
            most = max(most, len(inputs))
            if rank < n - 1:
                send(outputs[i], rank + 1)
        elif kind == "B":
            output = outputs.pop(i)
            if rank == n - 1:
                loss += ((output - wanted[i]) ** 2).sum()
                dy = 2 * (output - wanted[i])
            else:
                dy = receive(output.shape, rank + 1)
            cotangents[i] = dy * (1 - output**2)
            if rank > 0:
                send(cotangents[i] @ weight.T, rank - 1)
        else:
            gradient += inputs.pop(i).T @ cotangents.pop(i)
    return gradient, loss, most


def main() -> None:
    gradients = []
    for name in SCHEDULES:
        rank, n = start()
        x, y = torch.randn(2, ROWS, WIDTH)
        weights = [torch.randn(WIDTH, WIDTH) / 3 for _ in range(n)]
        gradient, loss, most = step(name, x, y, weights[rank], rank, n)

        layers = [weight.requires_grad_() for weight in weights]
        output = x
        for layer in layers:
            output = torch.tanh(output @ layer)
        expected = ((output - y) ** 2).sum()
        expected.backward()
        found, wanted = [gradient], [layers[rank].grad]
        if rank == n - 1:
            found, wanted = [*found, loss], [*wanted, expected]
        holds = f"layer {rank} of {n}, at most {most} of {MICRO_BATCHES} micro-batches"
        report(f"pipeline, {name}", holds, found, wanted)
        gradients.append(gradient)
    assert all(torch.equal(gradients[0], each) for each in gradients), "to the last bit"


if __name__ == "__main__":
    main()
