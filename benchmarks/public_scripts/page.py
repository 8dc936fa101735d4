"""The page's text; what it says of causes was read in the libraries, at the lines that it names."""

# paragraphs by their cause in cases.py; the page has those of the causes that its table names
NOTES = {
    "loss times processes": """\
- **Loss times the number of processes (`run_glue.py`).** Trainer multiplies the loss by the number of processes
  (transformers/trainer.py:2199-2207) for models that take any keyword arguments, because their losses divide by the
  labels of all processes. `BertForSequenceClassification` takes such arguments and ignores them: its loss is a mean of
  the batch (modeling_bert.py:1125-1126). The last table shows it without `prove`.""",
    "clipping": """\
- **Clipping (ZeRO-2).** Where a DeepSpeed file has `gradient_clipping: auto`, Accelerate takes 1.0
  (accelerate/accelerator.py:2224), whether a script clips or not; accelerate #2791 reported it.""",
    "padding": """\
- **Padding (`run_qa_no_trainer.py`).** The loss of an answer's place is a softmax over all columns, those of padding,
  too (modeling_bert.py:1339-1345). Rows are padded to the longest of their batch, so their loss depends on which rows
  stand beside them.""",
    "mean of means": """\
- **Mean of means (`run_ner_no_trainer.py`).** Each batch is divided by its own number of labels
  (modeling_bert.py:1278-1279).""",
    "order of rows": """\
- **Order of rows.** On several processes Accelerate's sampler has a generator of its own
  (accelerate/data_loader.py:1245-1251); `use_seedable_sampler=True` is the documented way to one order.""",
    "schedule": """\
- **Schedule.** Accelerate steps a scheduler once for each process (accelerate/scheduler.py:76).""",
    "embeddings sharded twice": """\
- **BERT under FSDP2.** `fsdp2_prepare_model` of accelerate 1.15 shards the modules of `_no_split_modules`, among them
  BERT's embeddings, and then the word embedding inside (accelerate/utils/fsdp_utils.py:866).""",
}
PAGE = """# Public scripts, judged by `prove`

Measured on {today} by `python -m benchmarks.public_scripts` at {commit}:
{machine}.

The scripts are the examples of
{accelerate} and of
{transformers}, without a change.
Each was run by `python -m samecurve prove SCRIPT --strategies NAMES -- ARGUMENTS`: 4 steps, 2 processes;
[`cases.py`](public_scripts/cases.py) has the arguments. Local folders stand in for the models (BERT, GPT-2 and Llama of
2 layers with random weights), for the tokenizers and for the data: 203 rows of GLUE, 600 lines of text, 96 rows of
others. A package that counts nothing stands in for `evaluate`. `run_clm_no_trainer.py` and `run_mlm_no_trainer.py` name
`DistributedType.TPU`, which accelerate 1.15 no longer has; a `sitecustomize` gave them that name.

{table}

The seconds are of all strategies of a script together. A finding that is not named was not seen: where only `rows` and
`learning rate` are, losses, gradients and weights agree with one process that reads the same rows at the same rates.

## What the findings come from

{notes}

## The loss of `run_glue.py` by hand

Two steps by torchrun, without `prove`, of a BERT without dropout: what Trainer logs.

{by_hand}
"""
