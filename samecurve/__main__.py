import sys

import samecurve.specs.packages  # noqa: F401 - before the packages that it looks for
from samecurve.cli.commands import main

sys.exit(main())
