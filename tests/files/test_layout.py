"""What a reader of this repository may rely on: one short loop, strategy words in one place, small modules."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MODULES = sorted([ROOT / "train.py", *(ROOT / "samecurve").rglob("*.py")])
STRATEGY_WORDS = re.compile(r"\b(ddp|fsdp2?|hsdp|zero[123]?|deepspeed|pipeline)\b", re.IGNORECASE)


def test_the_loop_fits_on_a_page_and_names_no_strategy():
    text = (ROOT / "train.py").read_text()
    assert len(text.splitlines()) <= 150
    assert STRATEGY_WORDS.findall(text) == []


def test_modules_and_functions_stay_small():
    assert len(MODULES) > 30
    for path in MODULES:
        text = path.read_text()
        assert len(text.splitlines()) <= 300, path
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                assert node.end_lineno - node.lineno < 50, f"{path}:{node.lineno} {node.name}"


def test_test_files_have_names_of_their_own():
    """pytest collects two files of one name only where folders are packages; apart, both run."""
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert len(names) > 80 and len(names) == len(set(names))


def test_layers_import_only_downwards():
    """Tasks and engines are above the modules that they use; only the session, which is made of both, imports them."""
    below = [path for path in (ROOT / "samecurve").glob("*.py") if path.name not in ("__main__.py", "session.py")]
    assert len(below) > 15
    for path in below:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ImportFrom):
                name = f"{'.' * node.level}{node.module or ''}"
                assert not name.startswith((".engines", ".cli", ".tasks")), f"{path}:{node.lineno} imports {name}"


def test_importing_the_configuration_loads_nothing_heavy():
    code = (
        "import sys, samecurve, samecurve.config, samecurve.errors, samecurve.outcome, samecurve.engines.resolve\n"
        "heavy = {'torch', 'transformers', 'accelerate', 'deepspeed', 'datasets', 'numpy'} & sys.modules.keys()\n"
        "sys.exit(f'loaded {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
