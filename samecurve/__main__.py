"""`python -m samecurve COMMAND`, and the installed command `samecurve`."""

import sys

import samecurve.specs.packages  # noqa: F401 - before the packages that it looks for
from samecurve.cli.commands import main

if __name__ == "__main__":
    sys.exit(main())
