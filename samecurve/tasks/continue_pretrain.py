"""Next-token prediction that goes on from a pretrained model, on other text.

The rows and the loss are pretrain's. What differs is what a recipe may say (samecurve/config/rules.py): `model.path` is
there, its tokenizer stays, and the learning rate is warmed up again, from 0 to a peak below that of the pretraining
(Ibrahim et al., 2024, arXiv:2403.08763). `data.mixture` keeps some of the old text in, against forgetting.
"""

from __future__ import annotations

from samecurve.tasks.pretrain import load

__all__ = ["load"]
