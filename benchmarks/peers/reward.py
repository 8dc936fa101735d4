"""TRL's RewardTrainer, after https://huggingface.co/docs/trl/reward_trainer."""

import sys

import toy
from datasets import Dataset
from trl import RewardConfig, RewardTrainer

settings, checkpoint = toy.arguments(__file__, sys.argv[1:])
trainer = RewardTrainer(
    toy.model_folder(),
    args=RewardConfig(**settings),
    train_dataset=Dataset.from_list(toy.pairs(toy.ROWS, 1)),
    eval_dataset=Dataset.from_list(toy.pairs(toy.TESTS, 2)),
)
trainer.train(resume_from_checkpoint=checkpoint)
trainer.save_model()
