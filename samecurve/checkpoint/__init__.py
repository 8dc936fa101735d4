"""Portable, verified checkpoints that any strategy and any number of ranks can load.

Imports: interfaces and the layers below it; never tasks or engines.

torch.distributed.checkpoint does not fit, for three reasons (read in torch 2.13):

* It stores tensors as blocks of rows and columns. ZeRO partitions are ranges of the flattened parameter, which begin
  and end within a row.
* Its metadata file is a pickle, and loading a checkpoint must not execute code.
* It has no commit that survives a power cut.
"""
