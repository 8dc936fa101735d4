"""What was measured, and the programs that did it; not a part of the package that is installed."""
