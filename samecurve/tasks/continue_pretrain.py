"""Continued pretraining: next-token prediction from a pretrained model, on other text.

Rows and loss are those of `pretrain`. Only the rules for recipes differ (samecurve/config/rules.py): `model.path` is
required, its tokenizer is kept, and the learning rate is warmed up again, from 0 to a peak below that of the
pretraining (Ibrahim et al., 2024, arXiv:2403.08763). `data.mixture` can mix in some of the old text against forgetting.
"""

from __future__ import annotations

from samecurve.tasks.pretrain import load_task

__all__ = ["load_task"]
