"""Portable, verified checkpoints, which any strategy and any number of processes can load.

May import interfaces and what is below it, not tasks or engines.

Why not torch.distributed.checkpoint: its tensors are blocks of rows and columns, and ZeRO's partitions are ranges of
the flattened parameter that begin and end within a row; its metadata file is a pickle, which loading must not run; and
it has no commit that survives a power cut (read in torch 2.13).
"""
