"""Protocols and types shared by tasks and engines. May import the types of data, models, optim and below."""
