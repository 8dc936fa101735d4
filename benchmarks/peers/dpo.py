"""TRL's DPOTrainer, after https://huggingface.co/docs/trl/dpo_trainer."""

import sys

import toy
from datasets import Dataset
from trl import DPOConfig, DPOTrainer

settings, checkpoint = toy.arguments(__file__, sys.argv[1:])
trainer = DPOTrainer(
    toy.model_folder(),
    args=DPOConfig(**settings),
    train_dataset=Dataset.from_list(toy.pairs(toy.ROWS, 1)),
    eval_dataset=Dataset.from_list(toy.pairs(toy.TESTS, 2)),
)
trainer.train(resume_from_checkpoint=checkpoint)
trainer.save_model()
