"""The strategy: Accelerate YAML, DeepSpeed JSON and launcher, resolved into one Plan and checked. Loads no torch.

May import config and what is below it.
"""
