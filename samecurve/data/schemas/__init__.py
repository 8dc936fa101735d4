"""Schemas of one record of a data file: conversation, preference pair, labelled text, retrieval pair."""
