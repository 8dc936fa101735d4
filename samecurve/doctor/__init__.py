"""Finds out before a run what would stop it: versions, compilers, network, file system, limits. May import all but cli.

`host.facts` looks at one host, `host_checks` judges it and compares hosts. `ranks` runs on every rank of a launcher,
and `examination.examine` starts it on the hosts of a hostfile.
"""
