"""The architecture laws: functions from source text to findings, one line each: "path:line: what, and the way out"."""

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

PACKAGES = ("kitsune", "tuner", "server", "migrations")

# Folders from the ground up. A folder imports from itself and from the rows above its own. Files at the root of a
# package are named one by one, and a package stands for its own `__init__.py` and `__main__.py`.
FLOORS: tuple[tuple[str, ...], ...] = (
    ("kitsune", "kitsune.errors", "kitsune.knobs", "kitsune.run_status", "kitsune.submission"),
    ("kitsune.amp", "kitsune.base", "kitsune.kernels", "kitsune.streams"),
    ("kitsune.long_proof", "kitsune.timeline"),
    ("kitsune.class_tables", "kitsune.plan"),
    ("kitsune.cli", "kitsune.device", "kitsune.open_masks", "kitsune.workload"),
    ("kitsune.autograd", "kitsune.launches.model", "kitsune.update"),
    ("kitsune.launches.planning", "kitsune.launches.recording", "kitsune.submission.format"),
    ("kitsune.launches.execution", "kitsune.launches.transforms", "kitsune.submission.rebuilding"),
    ("kitsune.launches", "kitsune.profiler", "kitsune.submission.exporting"),
    ("kitsune.capture", "kitsune.client"),
    ("kitsune.fusion",),
    ("kitsune.techniques",),
    ("kitsune.runtime",),
    ("kitsune.memory", "kitsune.optimizer"),
    ("kitsune.step",),
    ("tuner", "tuner.fault_injection", "tuner.ids", "tuner.records", "tuner.sandbox", "tuner.zoo"),
    ("tuner.cli", "tuner.measuring", "tuner.workloads"),
    ("tuner.building", "tuner.settings", "tuner.statistics", "tuner.wall_clock"),
    ("tuner.numerics", "tuner.search", "tuner.store", "tuner.timing"),
    ("tuner.child", "tuner.planning", "tuner.store.queries"),
    ("tuner.tuning",),
    ("tuner.terminal",),
    ("tuner.worker",),
    ("tuner.api",),
    ("tuner.commands",),
    ("migrations", "migrations.versions"),
    ("server", "server.charts.drawing", "server.cli", "server.payloads", "server.retention", "server.settings"),
    ("server.charts", "server.http", "server.tokens"),
    ("server.api",),
    ("server.pages.views",),
    ("server.pages",),
    ("server.app",),
    ("server.serving",),
)

TORCH = frozenset({"torch", "torchvision", "triton", "transformers", "functorch"})
# Folders and files that must not load these packages, not even through what they import. Planning is pure: it decides
# on plain data, and what acts on a device stands elsewhere.
FREE_OF: Mapping[str, frozenset[str]] = {
    **dict.fromkeys(
        (
            "kitsune",
            "kitsune.base",
            "kitsune.class_tables",
            "kitsune.client.http_client",
            "kitsune.client.http_deadline",
            "kitsune.client.plan_cache",
            "kitsune.client.plan_lookup",
            "kitsune.client.remote_run",
            "kitsune.client.server_address",
            "kitsune.errors",
            "kitsune.knobs",
            "kitsune.launches.model.launch_graph",
            "kitsune.launches.planning",
            "kitsune.long_proof",
            "kitsune.plan",
            "kitsune.run_status",
            "kitsune.runtime.report",
            "kitsune.submission.format.archive",
            "kitsune.submission.format.ops",
            "kitsune.timeline",
            "tuner.commands.migrate",
            "tuner.commands.runs",
            "tuner.commands.server_runs",
            "tuner.fault_injection",
            "tuner.ids",
            "tuner.measuring",
            "tuner.numerics.depth",
            "tuner.planning",
            "tuner.records",
            "tuner.sandbox",
            "tuner.search",
            "tuner.settings",
            "tuner.statistics",
            "tuner.store",
            "tuner.terminal",
            "tuner.timing.checkup",
            "tuner.tuning",
            "tuner.wall_clock",
            "tuner.worker",
        ),
        TORCH,
    ),
    "kitsune.cli": TORCH,
    "tuner.cli": TORCH | {"optuna", "sqlalchemy"},
    "server": TORCH | {"optuna"},
    "server.cli": TORCH | {"optuna", "sqlalchemy", "fastapi"},
}

# Where a module may be looked up at run time: lazy public names, extras that may be absent, files named by the table.
LAZY_IMPORTERS = frozenset(
    {
        "kitsune/__init__.py",
        "kitsune/__main__.py",
        "kitsune/base/optional_imports.py",
        "kitsune/cli/doctor.py",
        "kitsune/cli/main.py",
        "kitsune/fusion/tied_gradients.py",  # torch's compiler, by what compiles
        "kitsune/launches/recording/triton_adapter.py",  # Triton is there with a CUDA build of torch only
        "kitsune/profiler/__init__.py",
        "kitsune/techniques/__init__.py",
        "kitsune/techniques/compile.py",  # the same
        "kitsune/techniques/long_kernels.py",  # the same
        "tuner/child/main.py",  # torch's compiler, by a process that has nothing to do yet
    }
)
# Who may catch everything, and why.
BROAD_CATCHERS: Mapping[str, str] = {
    "kitsune/client/plan_lookup.py": "training goes on plain whatever a server sends and whatever the export raises",
    "kitsune/device/cuda_graph.py": "whatever a model raises in a capture is a reason not to capture it",
    "kitsune/launches/execution/verified_recording.py": "the user's code runs again in a proof; its errors stay there",
    "kitsune/launches/pipeline.py": "the user's code runs again in a proof; its errors stay there",
    "kitsune/memory/prefetch.py": "what a loader raises in its thread is raised again where it is awaited",
    "kitsune/runtime/applied_plan.py": "errors of Triton derive from nothing else; what no technique caused is raised",
    "server/retention.py": "the thread that deletes old runs goes on, whatever a database says",
    "tuner/child/main.py": "whatever a user's model does becomes a value at the border of its process",
    "tuner/worker/run_execution.py": "whatever a run does becomes a value at the border of its process",
    "tuner/workloads/copies.py": "whatever the copy of a model raises is a reason not to copy it",
}
# Whose product is text on stdout.
PRINTERS = frozenset({"kitsune/cli/main.py", "tuner/cli.py", "server/cli.py", "tuner/child/main.py"})

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 80
MAX_MEAN_FUNCTION_LINES = 15
LONG_FUNCTIONS: frozenset[str] = frozenset()  # "path::name", each with its reason beside it

STUB_WORDS = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b")
BROAD = ("Exception", "BaseException")


@dataclass(frozen=True)
class Module:
    """One source file of ours."""

    name: str
    path: str
    source: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.source, self.path)

    @property
    def is_package(self) -> bool:
        return self.path.endswith("__init__.py")

    @cached_property
    def nodes(self) -> list[ast.AST]:
        return list(ast.walk(self.tree))

    @cached_property
    def import_nodes(self) -> list[ast.Import | ast.ImportFrom]:
        return [node for node in self.nodes if isinstance(node, ast.Import | ast.ImportFrom)]

    @cached_property
    def functions(self) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
        return [node for node in self.nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]

    def found(self, node: ast.AST | int, text: str) -> str:
        line = node if isinstance(node, int) else getattr(node, "lineno", 1)
        return f"{self.path}:{line}: {text}"


def read_modules(root: Path) -> dict[str, Module]:
    """Every module of our packages below `root`, by dotted name."""
    files = [file for package in PACKAGES for file in sorted((root / package).rglob("*.py"))]
    modules = [module_of(file.relative_to(root).as_posix(), file.read_text(encoding="utf-8")) for file in files]
    return {module.name: module for module in modules}


def module_of(path: str, source: str) -> Module:
    return Module(path.removesuffix(".py").removesuffix("/__init__").replace("/", "."), path, source)


# One file at a time ---------------------------------------------------------------------------------------------------


def relative_imports(module: Module) -> list[str]:
    return [
        module.found(node, "relative import; write the whole name")
        for node in module.nodes
        if isinstance(node, ast.ImportFrom) and node.level
    ]


def hidden_imports(module: Module) -> list[str]:
    """Imports inside functions, and modules looked up by name outside the files that may."""
    return [
        module.found(node, f"import hidden in {function.name}(); move it to the top of the file")
        for function in module.functions
        for node in ast.walk(function)
        if isinstance(node, ast.Import | ast.ImportFrom)
    ] + [
        module.found(node, "imports by name at run time; import at the top, or name the file in LAZY_IMPORTERS")
        for node in module.nodes
        if isinstance(node, ast.Call)
        and called_name(node) in ("import_module", "__import__")
        and module.path not in LAZY_IMPORTERS
    ]


def broad_excepts(module: Module) -> list[str]:
    if module.path in BROAD_CATCHERS:
        return []
    return [
        module.found(node, "catches everything; name the errors that you can answer, or clean up and raise")
        for node in module.nodes
        if isinstance(node, ast.ExceptHandler) and is_broad(node.type) and not passes_on(node)
    ] + [
        module.found(node, "suppresses everything; name the errors that you can answer")
        for node in module.nodes
        if isinstance(node, ast.Call) and called_name(node) == "suppress" and any(map(is_broad, node.args))
    ]


def is_broad(caught: ast.expr | None) -> bool:
    if caught is None:
        return True
    names = caught.elts if isinstance(caught, ast.Tuple) else [caught]
    return any(isinstance(name, ast.Name) and name.id in BROAD for name in names)


def passes_on(handler: ast.ExceptHandler) -> bool:
    """Whether the handler only cleans up: its last statement raises what it caught, and nothing leaves it before."""
    *before, last = handler.body
    leaves = any(isinstance(node, ast.Return | ast.Continue | ast.Break) for line in before for node in ast.walk(line))
    return isinstance(last, ast.Raise) and last.exc is None and not leaves


def prints(module: Module) -> list[str]:
    if module.path in PRINTERS:
        return []
    return [
        module.found(node, "prints; log to the logger 'kitsune', or return the text to the command line")
        for node in module.nodes
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]


def stubs(module: Module) -> list[str]:
    words = [
        module.found(number, f"holds the word {match.group()}; do it, or file an issue")
        for number, line in enumerate(module.source.splitlines(), 1)
        if (match := STUB_WORDS.search(line))
    ]
    return words + [
        module.found(node, "raises NotImplementedError; leave the name out until it does its work")
        for node in module.nodes
        if isinstance(node, ast.Raise) and raised_name(node) == "NotImplementedError"
    ]


def long_files(module: Module) -> list[str]:
    lines = len(module.source.splitlines())
    return [module.found(1, f"{lines} lines; more than one noun lives here")] if lines > MAX_FILE_LINES else []


def long_functions(module: Module) -> list[str]:
    return [
        module.found(node, f"{node.name}() has {lines} lines; split it, or name it in LONG_FUNCTIONS with the reason")
        for node in module.functions
        if (lines := function_lines(node)) > MAX_FUNCTION_LINES and f"{module.path}::{node.name}" not in LONG_FUNCTIONS
    ]


def missing_docstrings(module: Module) -> list[str]:
    if ast.get_docstring(module.tree) or not module.source.strip():
        return []
    return [module.found(1, "no docstring; one line says what the module is for")]


FILE_LAWS = (
    relative_imports,
    hidden_imports,
    broad_excepts,
    prints,
    stubs,
    long_files,
    long_functions,
    missing_docstrings,
)


def function_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def called_name(node: ast.Call) -> str:
    return getattr(node.func, "attr", getattr(node.func, "id", ""))


def raised_name(node: ast.Raise) -> str:
    raised = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
    return getattr(raised, "id", "")


# All files together ---------------------------------------------------------------------------------------------------


def imports(module: Module, modules: Mapping[str, Module]) -> Iterator[tuple[int, str]]:
    """(line, name) of every module that the source names, ours or not, also under `if TYPE_CHECKING`.

    The lazy `kitsune/__init__.py` names its public objects for type checkers only, and loads nothing.
    """
    typing_only = {id(node) for node in typing_imports(module)} if module.name == "kitsune" else set()
    for node in module.import_nodes:
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield node.lineno, inner if inner in modules else node.module


def typing_imports(module: Module) -> Iterator[ast.AST]:
    for node in module.tree.body:
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            yield from ast.walk(node)


def folder_of(module: Module) -> str:
    """Its line in FLOORS: the folder that it lies in, or its own name at the root of a package."""
    folder = module.name if module.is_package else module.name.rpartition(".")[0]
    is_at_root = folder in PACKAGES and module.name not in PACKAGES and module.name != f"{folder}.__main__"
    return module.name if is_at_root and folder != "migrations" else folder


def floor_of(folder: str, floors: Iterable[tuple[str, ...]] = FLOORS) -> int | None:
    return next((floor for floor, row in enumerate(floors) if folder in row), None)


def climbing_imports(modules: Mapping[str, Module]) -> list[str]:
    """Arrows between folders that do not point down, and folders that have no line."""
    found = []
    for module in modules.values():
        folder = folder_of(module)
        own = floor_of(folder)
        if own is None:
            found.append(module.found(1, f"{folder} has no line in FLOORS of tests/laws.py"))
            continue
        for line, target in imports(module, modules):
            there = folder_of(modules[target]) if target in modules else folder
            other = floor_of(there)
            if there != folder and other is not None and other >= own:
                found.append(module.found(line, f"{folder} imports {target}, whose folder does not stand below it"))
    return found


def import_cycles(modules: Mapping[str, Module]) -> list[str]:
    graph = {
        name: {target for _, target in imports(module, modules) if target in modules and target != name}
        for name, module in modules.items()
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return [f"import cycle: {' <- '.join(error.args[1])}"]
    return []


def forbidden_loads(modules: Mapping[str, Module], free_of: Mapping[str, frozenset[str]] = FREE_OF) -> list[str]:
    """Folders and files that load a package that they must be free of, with the chain of imports that does it."""
    found = []
    for name in modules:
        lines = [line for line in free_of if name == line or (name.startswith(f"{line}.") and line not in PACKAGES[:2])]
        forbidden = frozenset().union(*(free_of[line] for line in lines))
        if forbidden and (chain := load_chain(name, modules, forbidden)):
            found.append(f"{modules[name].path}: must be free of {chain[-1]}, but loads it: {' -> '.join(chain)}")
    return found


def load_chain(start: str, modules: Mapping[str, Module], forbidden: frozenset[str]) -> list[str]:
    """The shortest chain of imports from `start` to a forbidden package; empty when there is none."""
    chains, seen = [[start]], {start}
    for chain in chains:
        for target in loads(modules[chain[-1]], modules):
            if target.partition(".")[0] in forbidden:
                return [*chain, target]
            if target in modules and target not in seen:
                seen.add(target)
                chains.append([*chain, target])
    return []


def loads(module: Module, modules: Mapping[str, Module]) -> Iterator[str]:
    """What importing `module` loads: what it names, and the packages that those lie in."""
    for name in [module.name, *(target for _, target in imports(module, modules))]:
        parts = name.split(".")
        yield from (".".join(parts[:length]) for length in range(1, len(parts) + 1))


def stale_floors(modules: Mapping[str, Module]) -> list[str]:
    """Names in FLOORS that stand for nothing any more."""
    there = {folder_of(module) for module in modules.values()}
    return [f"FLOORS names {folder}, which does not exist" for row in FLOORS for folder in row if folder not in there]
