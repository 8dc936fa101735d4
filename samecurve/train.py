"""`accelerate launch -m samecurve.train RECIPE`, `torchrun -m`, `python -m`: train.py of any folder."""

import runpy

from samecurve.specs.environment import ROOT

if __name__ == "__main__":
    runpy.run_path(str(ROOT / "train.py"), run_name="__main__")
