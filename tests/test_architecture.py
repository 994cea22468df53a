"""The architecture laws hold for the source as it is, and each law finds a source that breaks it."""

import ast
import importlib
import json
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

import kitsune
from tests import laws

ROOT = Path(__file__).parent.parent
MODULES = laws.read_modules(ROOT)


def report(findings: list[str]) -> str:
    return "\n".join(["the architecture laws (tests/laws.py) are broken:", *findings])


@pytest.mark.parametrize("law", laws.FILE_LAWS, ids=lambda law: law.__name__)
def test_every_file_keeps(law):
    findings = [finding for module in MODULES.values() for finding in law(module)]
    assert not findings, report(findings)


@pytest.mark.parametrize(
    "law", [laws.climbing_imports, laws.import_cycles, laws.forbidden_loads], ids=lambda law: law.__name__
)
def test_all_files_together_keep(law):
    findings = law(MODULES)
    assert not findings, report(findings)


def test_the_floors_name_what_is_there():
    findings = laws.stale_floors(MODULES)
    assert not findings, report(findings)


def test_functions_are_short_on_average():
    lengths = [laws.function_lines(node) for module in MODULES.values() for node in module.functions]
    assert statistics.mean(lengths) <= laws.MAX_MEAN_FUNCTION_LINES


def test_all_packages_were_read():
    assert {name.partition(".")[0] for name in MODULES} >= {"kitsune", "tuner", "server"}
    assert len(MODULES) > 20


# The laws themselves --------------------------------------------------------------------------------------------------

LONG_FUNCTION = "def f():\n" + "    x = 1\n" * 80
DOCSTRING = '"""What it is."""\n'


@pytest.mark.parametrize(
    ("law", "path", "source"),
    [
        (laws.relative_imports, "kitsune/a.py", "from . import b"),
        (laws.relative_imports, "kitsune/a.py", "from .b import c"),
        (laws.hidden_imports, "kitsune/a.py", "def f():\n    import json"),
        (laws.hidden_imports, "kitsune/a.py", "class A:\n    async def f(self):\n        from json import loads"),
        (laws.hidden_imports, "kitsune/a.py", "import importlib\nm = importlib.import_module('json')"),
        (laws.hidden_imports, "kitsune/a.py", "m = __import__('json')"),
        (laws.broad_excepts, "kitsune/a.py", "try:\n    x = 1\nexcept Exception:\n    x = 2"),
        (laws.broad_excepts, "kitsune/a.py", "try:\n    x = 1\nexcept (ValueError, BaseException):\n    x = 2"),
        (laws.broad_excepts, "tuner/a.py", "try:\n    x = 1\nexcept:\n    x = 2"),
        (laws.broad_excepts, "tuner/a.py", "try:\n    x = 1\nexcept Exception:\n    if x:\n        raise"),
        (laws.broad_excepts, "tuner/a.py", "with contextlib.suppress(Exception):\n    x = 1"),
        (laws.prints, "kitsune/a.py", "print('hello')"),
        (laws.stubs, "kitsune/a.py", "x = 1  # TO" + "DO: more"),
        (laws.stubs, "kitsune/a.py", "def f():\n    raise NotImplementedError"),
        (laws.stubs, "kitsune/a.py", "def f():\n    raise NotImplementedError('later')"),
        (laws.long_files, "kitsune/a.py", "x = 1\n" * 401),
        (laws.long_functions, "kitsune/a.py", LONG_FUNCTION),
        (laws.missing_docstrings, "kitsune/a.py", "x = 1"),
    ],
)
def test_a_law_finds_what_breaks_it(law, path, source):
    findings = law(laws.module_of(path, source))
    assert len(findings) == 1
    assert findings[0].startswith(f"{path}:")


@pytest.mark.parametrize(
    ("law", "path", "source"),
    [
        (laws.relative_imports, "kitsune/a.py", "from kitsune import b"),
        (
            laws.hidden_imports,
            "kitsune/a.py",
            "import json\ntry:\n    import a\nexcept ImportError:\n    a = None",
        ),
        (laws.hidden_imports, "kitsune/cli/doctor.py", "import importlib\nm = importlib.import_module('json')"),
        (laws.broad_excepts, "kitsune/a.py", "try:\n    x = 1\nexcept (OSError, ValueError):\n    x = 2"),
        (laws.broad_excepts, "tuner/child/main.py", "try:\n    x = 1\nexcept Exception:\n    x = 2"),
        (laws.broad_excepts, "kitsune/a.py", "try:\n    x = 1\nexcept BaseException:\n    x = 2\n    raise"),
        (laws.prints, "kitsune/cli/main.py", "print('hello')"),
        (laws.stubs, "kitsune/a.py", "try:\n    x = 1\nexcept NotImplementedError:\n    x = 2"),
        (laws.long_files, "kitsune/a.py", "x = 1\n" * 400),
        (laws.long_functions, "kitsune/a.py", LONG_FUNCTION.removesuffix("    x = 1\n")),
        (laws.missing_docstrings, "kitsune/a.py", DOCSTRING + "x = 1"),
        (laws.missing_docstrings, "kitsune/__init__.py", ""),
    ],
)
def test_a_law_accepts_what_keeps_it(law, path, source):
    assert law(laws.module_of(path, source)) == []


def modules_of(**sources: str) -> dict[str, laws.Module]:
    """Modules from keyword arguments: `kitsune__plan="..."` is kitsune/plan.py."""
    modules = [laws.module_of(name.replace("__", "/") + ".py", source) for name, source in sources.items()]
    return {module.name: module for module in modules}


@pytest.mark.parametrize(
    "modules",
    [
        modules_of(kitsune__plan="from tuner import records", tuner__records=""),
        modules_of(tuner__records="import server.app", server__app=""),
        modules_of(kitsune__errors="from kitsune.plan import Plan", kitsune__plan=""),
        modules_of(kitsune__techniques__layout="from kitsune.step import TrainStep", kitsune__step=""),
        modules_of(kitsune__launches__graph="import kitsune.techniques.layout", kitsune__techniques__layout=""),
        modules_of(kitsune__novelty=""),
    ],
)
def test_an_arrow_that_climbs_is_found(modules):
    assert len(laws.climbing_imports(modules)) == 1


def test_arrows_that_fall_are_accepted():
    modules = modules_of(
        server__app="from tuner.store.queries import runs",
        tuner__store__queries__runs="from tuner.records import Run\nfrom kitsune.errors import StoreError",
        tuner__records="from kitsune.plan import Plan",
        kitsune__plan="import json\nfrom kitsune.errors import PlanError",
        kitsune__errors="",
    )
    assert laws.climbing_imports(modules) == []
    assert laws.import_cycles(modules) == []


def test_a_cycle_is_found():
    modules = modules_of(
        kitsune__launches__a="from kitsune.launches import b",
        kitsune__launches__b="from kitsune.launches.c import x",
        kitsune__launches__c="import kitsune.launches.a",
    )
    (finding,) = laws.import_cycles(modules)
    assert all(f"kitsune.launches.{name}" in finding for name in "abc")


def test_torch_is_found_behind_an_import():
    modules = modules_of(
        kitsune__plan="from kitsune.device.backend import environment",
        kitsune__device__backend="import torch.cuda",
    )
    (finding,) = laws.forbidden_loads(modules)
    assert "kitsune.plan -> kitsune.device.backend -> torch" in finding


def test_torch_is_found_in_the_package_around_a_module():
    modules = modules_of(kitsune__submission__format__archive="import json")
    modules["kitsune.submission"] = laws.module_of("kitsune/submission/__init__.py", "from torch import nn")
    (finding,) = laws.forbidden_loads(modules)
    assert "kitsune.submission.format.archive -> kitsune.submission -> torch" in finding


def test_optuna_is_found_in_the_server():
    modules = modules_of(
        server__app="from tuner.search.strategy import propose", tuner__search__strategy="import optuna"
    )
    (finding,) = laws.forbidden_loads(modules)
    assert "server.app -> tuner.search.strategy -> optuna" in finding


# What only a running interpreter shows --------------------------------------------------------------------------------


def run_python(code: str) -> str:
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=150)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_kitsune_is_quick_and_leaves_torch_alone():
    code = (
        "import json, sys, time; start = time.perf_counter(); import kitsune; took = time.perf_counter() - start;"
        "print(json.dumps([took, 'torch' in sys.modules, 'numpy' in sys.modules]))"
    )
    runs = [json.loads(run_python(code)) for _ in range(5)]
    assert statistics.median(took for took, _, _ in runs) <= 0.3
    assert not any(torch or numpy for _, torch, numpy in runs)


@pytest.mark.parametrize(
    "module",
    [
        "kitsune.plan",
        "kitsune.submission.format.archive",
        "kitsune.cli.doctor",
        "tuner.store.queries.runs",
        "tuner.search.strategy",
    ],
)
def test_a_torch_free_room_loads_no_torch(module):
    code = f"import sys, importlib; importlib.import_module({module!r}); print('torch' in sys.modules)"
    assert run_python(code).strip() == "False"


def test_what_compiles_is_loaded_by_whoever_compiles():
    """torch.compile's parts take 2 to 5 s to load; training by a plan without it, and every child, would wait."""
    code = "import sys, kitsune.step, kitsune.optimizer, tuner.child.main; print(*sys.modules)"
    loaded = set(run_python(code).split())
    assert loaded >= {"torch", "kitsune.techniques.compile"}
    assert not loaded & {"torch._dynamo", "torch._inductor", "sympy"}


def test_public_names_are_bound_and_are_what_type_checkers_see():
    typed = {
        alias.asname: node.module
        for node in laws.typing_imports(MODULES["kitsune"])
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert typed == kitsune._HOMES
    for name, home in typed.items():
        assert getattr(kitsune, name) is getattr(importlib.import_module(home), name)
    assert set(typed) <= set(dir(kitsune))


def test_an_unknown_public_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'optimise'"):
        kitsune.optimise  # noqa: B018
