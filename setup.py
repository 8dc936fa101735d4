"""Puts train.py, recipes, strategies and documentation into the wheel as samecurve/shipped/. See pyproject.toml."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

SHIPPED = ("train.py", "constraints.txt", "recipes", "configs", "ds_configs", "docs")


class BuildWithShippedFiles(build_py):
    def run(self):
        super().run()
        if self.editable_mode:  # pip install -e: the files of the clone count
            return
        target = Path(self.build_lib) / "samecurve" / "shipped"
        shutil.rmtree(target, ignore_errors=True)  # of an earlier build
        target.mkdir()
        for name in SHIPPED:
            copy = shutil.copy if Path(name).is_file() else shutil.copytree
            copy(name, target / name)


setup(cmdclass={"build_py": BuildWithShippedFiles})
