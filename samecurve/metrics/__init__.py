"""What is measured while a run trains, and what is printed of it. May import run and what is below it, not engines."""
