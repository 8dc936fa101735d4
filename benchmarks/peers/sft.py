"""TRL's SFTTrainer, after https://huggingface.co/docs/trl/sft_trainer."""

import sys

import toy
from datasets import Dataset
from trl import SFTConfig, SFTTrainer

settings, checkpoint = toy.arguments(__file__, sys.argv[1:])
trainer = SFTTrainer(
    toy.model_folder(),
    args=SFTConfig(**settings),
    train_dataset=Dataset.from_list(toy.completions(toy.ROWS, 1)),
    eval_dataset=Dataset.from_list(toy.completions(toy.TESTS, 2)),
)
trainer.train(resume_from_checkpoint=checkpoint)
trainer.save_model()
