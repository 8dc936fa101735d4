"""Several processes on one GPU over gloo, so that its kernels can be tested under strategies of several ranks.

NCCL refuses two ranks on one device. gloo copies through host memory, so this is slow, and it has no point-to-point
transfers of device memory: pipelines need a GPU for each stage. This has not run on a GPU yet.
"""

from __future__ import annotations

import os

import torch

VARIABLE = "SAMECURVE_SHARE_GPUS"


def asked() -> bool:
    """Whether processes share GPUs: there are GPUs, and the environment asks for it."""
    return VARIABLE in os.environ and torch.cuda.is_available()


def prepare() -> None:
    """Number the local ranks by GPU, as Accelerate, DeepSpeed and DeviceMesh read LOCAL_RANK to choose a device."""
    if asked():
        os.environ["LOCAL_RANK"] = str(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
