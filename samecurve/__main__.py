import sys

from samecurve.cli.commands import main

sys.exit(main())
