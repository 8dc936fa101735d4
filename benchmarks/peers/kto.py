"""TRL's KTOTrainer, after https://huggingface.co/docs/trl/kto_trainer."""

import sys

import toy
from datasets import Dataset
from trl import KTOConfig, KTOTrainer

settings, checkpoint = toy.arguments(__file__, sys.argv[1:])
trainer = KTOTrainer(
    toy.model_folder(),
    args=KTOConfig(**settings),
    train_dataset=Dataset.from_list(toy.judgements(toy.ROWS, 1)),
    eval_dataset=Dataset.from_list(toy.judgements(toy.TESTS, 2)),
)
trainer.train(resume_from_checkpoint=checkpoint)
trainer.save_model()
