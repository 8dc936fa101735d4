"""Classify images with a small convolutional network of one's own: no transformers model, BatchNorm over all processes.

    accelerate launch --config_file configs/fsdp.yaml --num_processes 2 examples/images.py --project_dir runs/images

Installation, and how a run goes on: as in examples/nlp.py.
"""

import argparse
from pathlib import Path

import torch
from accelerate.utils import ProjectConfiguration, set_seed
from torch import nn
from torch.nn.functional import cross_entropy, relu
from torch.utils.data import DataLoader, TensorDataset

from samecurve import Accelerator


def images(count: int, seed: int) -> TensorDataset:
    """Make noise of shape (count, 3, 8, 8) with stripes; the label says whether they are vertical, and which of two."""
    generator = torch.Generator().manual_seed(seed)
    pixels, labels = torch.randn(count, 3, 8, 8, generator=generator), torch.randint(4, (count,), generator=generator)
    stripes = torch.stack([torch.arange(8) % 2, torch.arange(8) // 2 % 2]).float()[labels % 2][:, None, None, :]
    vertical = (labels >= 2)[:, None, None, None]
    return TensorDataset(pixels + torch.where(vertical, stripes, stripes.transpose(2, 3)), labels)


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm1 = nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
        self.second, self.norm2 = nn.Conv2d(16, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
        self.head = nn.Linear(16, 4)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """Return logits of shape (rows, 4) for pixels of shape (rows, 3, height, width)."""
        hidden = relu(self.norm1(self.first(pixels)))
        return self.head(relu(self.norm2(self.second(hidden))).mean((2, 3)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--project_dir", default="runs/images")
    project_dir = parser.parse_args().project_dir
    project = ProjectConfiguration(project_dir, automatic_checkpoint_naming=True, total_limit=2)
    accelerator = Accelerator(gradient_accumulation_steps=2, project_config=project)
    set_seed(7)
    train, held_out = DataLoader(images(70, 1), batch_size=8, shuffle=True), DataLoader(images(30, 2), 8)
    # BatchNorm alone would normalize over the rows of one process, and Accelerator.prepare would warn of it
    model = nn.SyncBatchNorm.convert_sync_batchnorm(Network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9, nesterov=True)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=15)
    model, optimizer, train, held_out, scheduler = accelerator.prepare(model, optimizer, train, held_out, scheduler)
    if any(Path(project_dir).glob("checkpoints/checkpoint_*")):
        accelerator.load_state()

    for epoch in range(train.iteration, 3):  # a loaded loader knows its epoch
        model.train()
        for pixels, labels in train:
            with accelerator.accumulate(model):
                accelerator.backward(cross_entropy(model(pixels), labels))
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                step = scheduler.scheduler.last_epoch
                accelerator.print(f"step {step} grad_norm {norm.item():.7f}")
                if step % 4 == 0:
                    accelerator.save_state()
        model.eval()
        losses = []
        for pixels, labels in held_out:
            with torch.no_grad():
                losses.append(accelerator.gather_for_metrics(cross_entropy(model(pixels), labels, reduction="none")))
        accelerator.print(f"epoch {epoch} eval_loss {torch.cat(losses).mean():.7f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
