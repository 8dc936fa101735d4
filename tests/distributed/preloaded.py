"""What a forked rank has when it begins: imports and tables, a third of a short run's processor time.

The planner answers in the rank itself here. Runs by a real launcher start its process.
"""

from __future__ import annotations

import json

import accelerate  # noqa: F401
import deepspeed  # noqa: F401
import peft  # noqa: F401
import torch.utils.tensorboard  # noqa: F401
import transformers.models.llama.modeling_llama  # noqa: F401
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

from samecurve.engines import factory  # noqa: F401
from samecurve.export import hf_export  # noqa: F401
from samecurve.planner.forecast import Device, forecast
from samecurve.training import settle, startup  # noqa: F401

get_checkpoint_conversion_mapping("llama")
settle.ask_planner = lambda plan, fields, device: json.loads(json.dumps(forecast(plan, fields, Device(**device))))
