"""Portable, verified checkpoints: any strategy and any number of processes goes on from any other's.

manager.py     what the training loop uses          commit.py   all of a checkpoint or nothing of it, whatever happens
snapshot.py    what this rank saves                 verify.py   whether a checkpoint on the disk is still good
finder.py      which one a run goes on from         files.py    the tensors' files and their index
changes.py     what may differ from the saved run   filesystem.py  what all this asks of a disk

Why not torch.distributed.checkpoint: its tensors are blocks of rows and columns, and ZeRO's partitions are ranges of
the flattened parameter that begin and end within a row; its metadata file is a pickle, which loading must not run; and
it has no commit that survives a power cut (read in torch 2.13).
"""
