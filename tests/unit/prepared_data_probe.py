"""Ranks, forked here, that read a data set of 11 rows in batches of 4: python prepared_data_probe.py FOLDER RANKS."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import accelerate  # noqa: E402
import torch  # noqa: E402
from accelerate.utils import DataLoaderConfiguration, set_seed  # noqa: E402
from test_prepared_data import Groups, Numbers  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402

from benchmarks.scale.counting import fork  # noqa: E402
from samecurve.accelerator.prepared_data import PreparedData  # noqa: E402
from samecurve.distributed.network import free_port  # noqa: E402


def probe(accelerator: PreparedData) -> dict:
    train = accelerator.prepare_data_loader(DataLoader(Numbers(11), batch_size=4, shuffle=True))
    result: dict = {"train": [], "steps": [], "micro": [], "gathered": [], "objects": [], "nested": []}
    for batch in train:
        result["train"].append(accelerator.gather_for_metrics(batch).tolist())
        with accelerator.accumulate():
            result["micro"].append(accelerator.units.micro_batch)
            if accelerator.sync_gradients:
                result["steps"].append(accelerator.units.step)
    held_out = accelerator.prepare_data_loader(DataLoader(Numbers(11), batch_size=4))
    repeated: tuple[list, list] = [], []
    for batch in held_out:
        for losses, length in zip(repeated, (4, 4 // accelerator.num_processes), strict=True):
            losses.append(accelerator.gather_for_metrics(batch.float().mean().repeat(length)))
        result["gathered"] += accelerator.gather_for_metrics(batch).tolist()
        result["objects"] += accelerator.gather_for_metrics([str(row) for row in batch.tolist()])
        pair = accelerator.gather_for_metrics({"x": (2 * batch[:, None],), "y": batch})
        result["nested"] += torch.cat([pair["x"][0], pair["y"][:, None]], dim=1).tolist()
    result["repeated"] = [torch.cat(losses).mean().item() for losses in repeated]
    result["objects"] = [int(text) for text in result["objects"]]
    custom = accelerator.prepare_data_loader(DataLoader(Numbers(8), batch_sampler=Groups()))
    result["custom"] = [accelerator.gather_for_metrics(batch).tolist() for batch in custom]
    return result | {"seed": train.state_dict()["seed"]}


def rank(number: int, size: int, port: int, folder: Path) -> None:
    os.environ |= {"RANK": str(number), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"LOCAL_RANK": str(number), "GLOO_SOCKET_IFNAME": "lo"}
    torch.set_num_threads(1)
    set_seed(number)  # every rank another one: rank 0's counts
    config = DataLoaderConfiguration(split_batches=True, use_seedable_sampler=True)
    result = probe(PreparedData(cpu=True, gradient_accumulation_steps=2, dataloader_config=config))
    accelerate.state.AcceleratorState._reset_state()
    stock = accelerate.Accelerator(cpu=True, dataloader_config=config)
    loader = stock.skip_first_batches(stock.prepare_data_loader(DataLoader(Numbers(11), batch_size=4)), 0)
    result["stock"] = torch.cat([stock.gather_for_metrics(batch) for batch in loader]).tolist()
    (folder / f"{number}.json").write_text(json.dumps(result))
    torch.distributed.barrier()
    os._exit(0)


def main() -> None:
    folder, size, port = Path(sys.argv[1]), int(sys.argv[2]), free_port()
    children = [fork(lambda number=number: rank(number, size, port, folder)) for number in range(size)]
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * size


if __name__ == "__main__":
    main()
