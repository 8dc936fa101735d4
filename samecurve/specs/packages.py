"""Ends the program in one line where packages of requirements.txt are missing, which is nearly always another Python.

The only module that does something when it is imported: the entry points import it first, because all others import
these packages. DeepSpeed is not among them: on some laptops it is not installed, and only its strategies need it.
"""

from __future__ import annotations

import shlex
import sys
from importlib.util import find_spec

from samecurve.specs.environment import IN_CLONE, ROOT

REQUIRED = ("torch", "transformers", "accelerate", "datasets", "peft", "tensorboard", "pydantic", "rich", "xxhash")
INDIRECT = ("numpy", "psutil", "safetensors", "tokenizers", "yaml")  # these come with the others

if missing := [name for name in (*REQUIRED, *INDIRECT) if find_spec(name) is None]:
    environment = ROOT / ".venv" / "bin" / "activate"
    made = f"source {shlex.quote(str(environment))}"
    make = f"cd {shlex.quote(str(ROOT))}; bash scripts/quickstart.sh, which makes .venv"
    make = make if IN_CLONE else f"{shlex.quote(sys.executable)} -m pip install {' '.join(missing)}"
    print(
        f"{sys.executable} has no {', '.join(missing)}; first: {made if environment.is_file() else make}",
        file=sys.stderr,
    )
    sys.exit(2)
