"""transformers.Trainer on prompts and answers, after https://huggingface.co/docs/transformers/trainer."""

import sys

import toy
from transformers import AutoModelForCausalLM, DataCollatorForSeq2Seq, Trainer, TrainingArguments

settings, checkpoint = toy.arguments(__file__, sys.argv[1:])
tokenizer = toy.tokenizer()
trainer = Trainer(
    AutoModelForCausalLM.from_pretrained(toy.model_folder()),
    TrainingArguments(**settings),
    DataCollatorForSeq2Seq(tokenizer),
    train_dataset=toy.encoded(toy.ROWS, 1),
    eval_dataset=toy.encoded(toy.TESTS, 2),
    processing_class=tokenizer,
)
trainer.train(resume_from_checkpoint=checkpoint)
trainer.save_model()
