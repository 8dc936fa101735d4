"""What tasks and engines know of each other. May import the types of data, models, optim and below."""
