"""What a reader of this repository may rely on: rooms with one direction of imports, one short loop, small modules."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
MODULES = sorted([ROOT / "train.py", *(ROOT / "samecurve").rglob("*.py")])
STRATEGY_WORDS = re.compile(r"\b(ddp|fsdp2?|hsdp|zero[123]?|deepspeed|pipeline)\b", re.IGNORECASE)

# From the bottom up. A package imports packages of lower rows only; packages of one row do not import each other.
LAYERS = (
    {"specs", "storage"},
    {"config"},
    {"strategy", "distributed"},
    {"launch"},
    {"losses", "planner"},
    {"data", "models", "optim"},
    {"interfaces"},
    {"checkpoint"},
    {"accelerator"},
    {"tasks", "engines"},
    {"run"},
    {"metrics"},
    {"reports"},
    {"export"},
    {"inference"},
    {"training"},
    {"bench"},
    {"prove"},
    {"doctor"},
    {"cli"},
)
RANKS = {package: rank for rank, packages in enumerate(LAYERS) for package in packages}
# Above tasks and engines, and yet not to import the latter: they read files and numbers, under no strategy.
WITHOUT_ENGINES = {"tasks", "checkpoint", "run", "metrics", "reports", "export"}
MAX_HIDDEN_IMPORTS = 8

# Where a strategy's family or name may decide, read or be written. Everywhere else code asks for a fact
# (`schedule`, `dims`) or an engine.
ROOMS_OF_STRATEGIES = {
    "strategy": "reads and checks the strategy's files",
    "accelerator": "does under every strategy what the Accelerator promises",
    "engines": "run a step under a strategy",
    "planner": "predicts memory and time of a step under each strategy and its stack",
}
_PACKAGE = "the version of a package that is installed"
_KEY = "a key of other trainers' files"
_LAUNCHER = "a launcher has this name, too"
STRATEGIES_ELSEWHERE = {
    "config.trainers.arguments": ("deepspeed fsdp", _KEY),
    "config.trainers.axolotl": ("deepspeed fsdp", _KEY),
    "config.trainers.files": ("ddp deepspeed fsdp zero", "finds the strategy of another trainer's file"),
    "cli.new": ("ddp fsdp", "suggests the one of the two that fits"),
    "bench.dry_run": ("backend deepspeed", "says what was left out, and which strategies are refused"),
    "bench.fake_rank": ("fsdp", "builds one rank of a strategy without the other ranks"),
    "bench.memory": ("deepspeed", _PACKAGE),
    "bench.memory_probe": ("deepspeed zero", "measures a process with it beside one without"),
    "bench.step": ("deepspeed", _PACKAGE),
    "checkpoint.foreign_formats": ("deepspeed zero", "the format of another library's checkpoint"),
    "cli.bench.step": ("single", "the default of --strategy"),
    "cli.doctor": ("deepspeed", "reports the problems of the strategy's two files"),
    "cli.launch": ("deepspeed", _LAUNCHER),
    "distributed.network": ("family", "of addresses"),
    "doctor.host": ("deepspeed", _PACKAGE),
    "doctor.host_checks": ("deepspeed", _PACKAGE),
    "export.verification": ("fsdp deepspeed", "prefixes of the launchers' environment variables"),
    "launch.scripts": ("deepspeed", _LAUNCHER),
    "launch.start": ("deepspeed", _LAUNCHER),
    "launch.target": ("deepspeed", _LAUNCHER),
    "prove.judge": ("zero", "says where clipping comes from that a script does not do"),
    "prove.process": ("deepspeed", "sets up what Accelerate expects of a launcher, and imports engines once"),
    "prove.recorder": ("ddp deepspeed fsdp single zero", "names what a script of anyone's has made of its model"),
    "prove.script": ("ddp single", "names runs, and a strategy that shards nothing"),
    "reports.run_report": ("deepspeed", "shows a strategy file of run.json"),
    "reports.run_summary": ("deepspeed", "shows a strategy file of run.json"),
    "run.metadata": ("family deepspeed", "writes the strategy into run.json"),
    "run.signals": ("deepspeed", _LAUNCHER),
    "specs.environment": ("deepspeed", _PACKAGE),
}
# tp is a dimension, too; the family "schedule" has the name of a recipe's section
STRATEGIES = {path.stem for path in (ROOT / "configs").glob("*.yaml")} - {"tp"} | {"pipeline"}
_OF_STRATEGIES = re.compile(r"(ddp|fsdp|hsdp|zero)\d?([_.]\w*)?|deepspeed[\w.]*|family")
_FACTS = re.compile(r"family|zero_stage|(deepspeed|fsdp_)\w*")


class Import(NamedTuple):
    """`module` imports `target`, both with dots; hidden: inside of a function."""

    module: str
    line: int
    target: str
    hidden: bool

    def __str__(self) -> str:
        return f"{self.module.replace('.', '/')}.py:{self.line} imports {self.target}"


def imports_of(module: str, text: str, modules: set[str]) -> Iterator[Import]:
    """Every import of the package's own modules, inside of functions and under TYPE_CHECKING, too.

    What a command names as its `Subcommand` counts like an import at the top: the dispatcher imports it.
    """
    tree = ast.parse(text)
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    inside = {id(node) for function in functions for node in ast.walk(function)}
    for node in ast.walk(tree):
        hidden = id(node) in inside
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parts = module.split(".")[: -node.level] if node.level else []
            source = ".".join([*parts, *([node.module] if node.module else [])])
            wanted = [f"{source}.{alias.name}" for alias in node.names]
            names = [name if name in modules else source for name in wanted]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Subcommand":
            names, hidden = [ast.literal_eval(node.args[0])], False
        else:
            continue
        for name in dict.fromkeys(names):
            if name.split(".")[0] == "samecurve":
                yield Import(module, node.lineno, name, hidden)


def package_of(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ""


def violations(found: list[Import]) -> list[str]:
    """Imports that go up or sideways."""
    wrong = []
    for each in found:
        here, there = package_of(each.module), package_of(each.target)
        if here in ("", "__main__", "__init__", "train") or there == here or there in ("", "errors"):
            continue
        upwards = here == "errors" or RANKS[there] >= RANKS[here]
        if upwards or (there == "engines" and here in WITHOUT_ENGINES):
            wrong.append(str(each))
    return wrong


def circles(edges: dict[str, set[str]]) -> list[list[str]]:
    """Groups of more than one node that can all be reached from each other: Tarjan's strongly connected components."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in sorted(edges.get(node, ())):
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            group = [stack.pop()]
            while group[-1] != node:
                group.append(stack.pop())
            if len(group) > 1:
                found.append(sorted(group))

    for node in edges:
        if node not in index:
            visit(node)
    return found


@pytest.fixture(scope="module")
def own_imports() -> list[Import]:
    names = {path: ".".join(path.relative_to(ROOT).with_suffix("").parts) for path in MODULES}
    found = [each for path, name in names.items() for each in imports_of(name, path.read_text(), set(names.values()))]
    assert len(found) > 500
    return found


def test_packages_import_lower_layers_only(own_imports):
    packages = {path.name for path in (ROOT / "samecurve").iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert packages == RANKS.keys()
    assert violations(own_imports) == []


def test_no_circles(own_imports):
    modules: dict[str, set[str]] = {}
    packages: dict[str, set[str]] = {}
    for each in own_imports:
        modules.setdefault(each.module, set()).add(each.target)
        if package_of(each.module) != package_of(each.target):
            packages.setdefault(package_of(each.module), set()).add(package_of(each.target))
    assert circles(modules) == []
    packages.pop("", None)
    assert circles(packages) == []


def test_a_run_loads_no_planner(own_imports):
    """The planner is a program of its own: training starts it as a process, and imports none of it."""
    loaded, waiting = set[str](), ["train"]
    while waiting:
        if (module := waiting.pop()) not in loaded:
            loaded.add(module)
            waiting += [each.target for each in own_imports if each.module == module]
    assert {package_of(module) for module in loaded} >= {"training", "engines", "metrics", "strategy"}
    assert [module for module in sorted(loaded) if package_of(module) == "planner"] == []


@pytest.mark.parametrize(
    ("module", "line", "wrong"),
    [
        ("samecurve.tasks.sft", "from samecurve.engines import zero", True),
        ("samecurve.engines.zero", "if TYPE_CHECKING:\n    from samecurve.tasks.sft import load", True),
        ("samecurve.losses.cross_entropy", "def f():\n    from samecurve.data.batches import MicroBatch", True),
        ("samecurve.data.batches", "from ..config.schema import Recipe", False),
        ("samecurve.config.rules", "import samecurve.data.sources", True),
        ("samecurve.errors", "from samecurve.storage import cache", True),
        ("samecurve.reports.svg", "from samecurve.engines import zero", True),
        ("samecurve.training.session", "from samecurve.engines import zero", False),
    ],
)
def test_an_import_that_goes_up_is_seen(module, line, wrong):
    modules = {"samecurve.engines.zero", "samecurve.storage.cache", "samecurve.data.sources"}
    assert bool(violations([*imports_of(module, line, modules)])) == wrong


def test_a_circle_is_seen():
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [["a", "b", "c"]]


def test_what_commands_leave_to_do_is_where_they_say(own_imports):
    names = {".".join(path.relative_to(ROOT).with_suffix("").parts) for path in MODULES}
    commands = [each for each in own_imports if package_of(each.module) == "cli"]
    assert [str(each) for each in commands if each.target not in names] == []
    bad = 'def run(arguments):\n    return Subcommand("samecurve.bench.gone", ())'
    (found,) = imports_of("samecurve.cli.x", bad, names)
    assert found.target not in names and not found.hidden


def test_imports_inside_functions_stay_few(own_imports):
    hidden = [str(each) for each in own_imports if each.hidden]
    assert len(hidden) <= MAX_HIDDEN_IMPORTS, "\n".join(hidden)


def test_packages_export_nothing():
    """An `__init__.py` says what lives in its folder. What it exported would have two import paths."""
    initial = [path for path in MODULES if path.name == "__init__.py" and path.parent.name != "samecurve"]
    assert len(initial) > 20
    for path in initial:
        (docstring,) = ast.parse(path.read_text()).body
        assert isinstance(docstring, ast.Expr) and isinstance(docstring.value, ast.Constant), path


def test_the_hall_holds_packages():
    assert {path.name for path in (ROOT / "samecurve").glob("*.py")} == {
        "__init__.py",
        "__main__.py",
        "errors.py",
        "train.py",
    }


def test_the_loop_fits_on_a_page_and_names_no_strategy():
    text = (ROOT / "train.py").read_text()
    assert len(text.splitlines()) <= 120
    assert STRATEGY_WORDS.findall(text) == []


def strategy_words(text: str) -> set[str]:
    """Return the strategy words among a module's strings and attributes; prose and docstrings are left out."""
    tree = ast.parse(text)
    prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    found = set()
    for node in ast.walk(tree):
        name = ""
        if isinstance(node, ast.Attribute):
            owner = getattr(node.value, "attr", getattr(node.value, "id", ""))
            is_fact = _FACTS.fullmatch(node.attr) or (owner == "strategy" and node.attr in ("backend", "sharding"))
            name = node.attr if is_fact else ""
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
            value = node.value.lower()
            name = value if value in STRATEGIES or _OF_STRATEGIES.fullmatch(value) else ""
        found |= set(re.findall(r"^[a-z]+", name))
    return found


def test_strategy_words_stay_in_their_rooms():
    assert len(STRATEGIES) > 20
    names = {path: ".".join(path.relative_to(ROOT).with_suffix("").parts) for path in MODULES}
    found = {name.removeprefix("samecurve."): strategy_words(path.read_text()) for path, name in names.items()}
    rooms = {module.split(".")[0] for module, words in found.items() if words}
    assert ROOMS_OF_STRATEGIES.keys() <= rooms
    elsewhere = {module: words for module, words in found.items() if module.split(".")[0] not in ROOMS_OF_STRATEGIES}
    allowed = {module: set(words.split()) for module, (words, _) in STRATEGIES_ELSEWHERE.items()}
    assert {module: words for module, words in elsewhere.items() if words} == allowed


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('if strategy.family == "schedule": pass', {"family"}),
        ('if run["strategy"] in ("zero3_offload", "fsdp2"): pass', {"zero", "fsdp"}),
        ("stage = plan.strategy.zero_stage", {"zero"}),
        ('if plan.strategy.backend == "deepspeed": model.sharding', {"backend", "deepspeed"}),
        ('if type(optimizer).__name__ == "DeepSpeedCPUAdam": pass', {"deepspeedcpuadam"}),
        ("if accelerator.state.fsdp_plugin: pass", {"fsdp"}),
        ('"""fsdp"""\nraise ValueError("fsdp refuses this")\nzeros = optimizer.zero_grad()  # zero3', set()),
    ],
)
def test_a_strategy_word_is_seen(line, words):
    assert strategy_words(line) == words


def test_backend_and_sharding_are_compared_seldom():
    """Elsewhere code asks for a property of one meaning, or the engine has been chosen."""
    asked = r"strategy\.(family|backend|sharding) (==|!=|in|not in)"
    elsewhere = [path for path in MODULES if path.parent.name != "strategy"]
    found = [
        f"{path}: {line}" for path in elsewhere for line in path.read_text().splitlines() if re.search(asked, line)
    ]
    assert len(found) <= 12, "\n".join(found)


def test_modules_and_functions_stay_small():
    assert len(MODULES) > 30
    for path in MODULES:
        text = path.read_text()
        assert len(text.splitlines()) <= 400, path
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                assert node.end_lineno - node.lineno < 60, f"{path}:{node.lineno} {node.name}"


def empty_names(tree: ast.AST) -> list[str]:
    """List the variables, arguments and attributes whose name does not say what they hold, as LINE NAME."""
    bound = []
    for node in ast.walk(tree):
        if isinstance(getattr(node, "ctx", None), ast.Store):
            bound.append((node, getattr(node, "id", getattr(node, "attr", ""))))
        elif isinstance(node, ast.arg | ast.ExceptHandler | ast.MatchAs | ast.MatchStar):
            bound.append((node, node.arg if isinstance(node, ast.arg) else node.name))
    return [f"{node.lineno} {name}" for node, name in bound if name in ("each", "found")]


def test_variables_say_what_they_hold():
    assert [f"{path}: {name}" for path in MODULES for name in empty_names(ast.parse(path.read_text()))] == []


@pytest.mark.parametrize(
    ("line", "empty"),
    [
        ("[each for each in rows]", ["1 each"]),
        ("def f(found): pass", ["1 found"]),
        ("while found := read(): pass", ["1 found"]),
        ("class A:\n    found: str", ["2 found"]),
        ("try: pass\nexcept OSError as found: pass", ["2 found"]),
        ("values.found(each, found=rows, each_row=1)", []),
    ],
)
def test_an_empty_name_is_seen(line, empty):
    assert empty_names(ast.parse(line)) == empty


def test_test_files_have_names_of_their_own():
    """pytest collects two files of one name only where folders are packages; apart, both run."""
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert len(names) > 80 and len(names) == len(set(names))


def test_importing_the_configuration_loads_nothing_heavy():
    code = (
        "import sys, samecurve, samecurve.config.schema, samecurve.errors\n"
        "import samecurve.run.lifecycle, samecurve.strategy.resolve\n"
        "heavy = {'torch', 'transformers', 'accelerate', 'deepspeed', 'datasets', 'numpy'} & sys.modules.keys()\n"
        "sys.exit(f'loaded {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_documentation_has_the_rooms_in_their_order():
    page = (ROOT / "docs" / "architecture.md").read_text()
    rows = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \|", page, re.MULTILINE)
    assert [set(re.findall(r"\w+", row)) for row in rows] == list(LAYERS)


def test_a_step_under_zero_is_followed_in_few_files():
    """tests/distributed/test_step_walk.py traces the files; the numbers below their table are those of the table."""
    page = (ROOT / "docs" / "architecture.md").read_text().split("## One step under ZeRO-3\n")[1].split("\n### ")[0]
    files = re.findall(r"^\| `([\w/.]+\.py)` \|", page, re.MULTILINE)
    (number, lines), *_ = re.findall(r"These are (\d+) files with about ([\d,]+) lines", page)
    assert len(set(files)) == int(number) <= 14
    paths = (ROOT / file if file == "train.py" else ROOT / "samecurve" / file for file in files)
    found = sum(len(path.read_text().splitlines()) for path in paths)
    assert found == pytest.approx(int(lines.replace(",", "")), rel=0.1)
