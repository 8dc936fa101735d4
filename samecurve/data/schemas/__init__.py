"""What one record of a data file means: a conversation, a preference pair, a labelled text, a retrieval pair."""
