"""The house laws: functions from source text to findings, one line each: "path:line: what, and the way out"."""

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

PACKAGES = ("kitsune", "tuner", "server", "migrations")

# The house from the ground up. A module may import from its own tier and from those above it in this list.
# A line stands for a module, or for a folder with all that is in it; package roots stand for themselves only.
TIERS: tuple[tuple[str, ...], ...] = (
    ("kitsune", "kitsune.errors", "kitsune.garbage", "kitsune.knobs", "kitsune.record", "kitsune.run_status"),
    ("kitsune.compile_cache", "kitsune.files", "kitsune.home", "kitsune.kernels", "kitsune.proof", "kitsune.timeline"),
    ("kitsune.logs", "kitsune.server_address", "kitsune.switch"),
    (
        "kitsune.duration",
        "kitsune.exits",
        "kitsune.extras",
        "kitsune.plan",
        "kitsune.report",
        "kitsune.screen",
        "kitsune.signals",
    ),
    ("kitsune.amp", "kitsune.fusion.config", "kitsune.options", "kitsune.streams"),
    ("kitsune.cache", "kitsune.exchange", "kitsune.keyed_files", "kitsune.plan_diff"),
    (
        "kitsune.client",
        "kitsune.device",
        "kitsune.engine",
        "kitsune.graphs",
        "kitsune.memsets",
        "kitsune.submission",
        "kitsune.tf32",
        "kitsune.workload",
    ),
    ("kitsune.fusion", "kitsune.lookup", "kitsune.memory", "kitsune.profiler"),
    ("kitsune.remote_run", "kitsune.techniques"),
    ("kitsune.assembly", "kitsune.remote"),
    ("kitsune.attach", "kitsune.inner", "kitsune.loop", "kitsune.stats", "kitsune.step"),
    ("kitsune.step_profile",),
    ("kitsune.optimizer",),
    ("kitsune.doctor",),
    ("kitsune.cli",),
    ("kitsune.__main__",),
    (
        "tuner",
        "tuner.bytecode",
        "tuner.depot",
        "tuner.faults",
        "tuner.ids",
        "tuner.lockdown",
        "tuner.patience",
        "tuner.plain_step",
        "tuner.records",
        "tuner.scratch",
        "tuner.self_test",
        "tuner.student",
    ),
    ("tuner.settings", "tuner.time_spent", "tuner.wall_clock"),
    (
        "tuner.compiling",
        "tuner.confinement",
        "tuner.copies",
        "tuner.depth",
        "tuner.protocol",
        "tuner.ruler",
        "tuner.space",
        "tuner.store",
        "tuner.zoo",
    ),
    (
        "migrations",
        "tuner.batches",
        "tuner.dropout",
        "tuner.effects",
        "tuner.fitness",
        "tuner.gpu_watch",
        "tuner.numerics",
        "tuner.host_watch",
        "tuner.presets",
        "tuner.stats",
        "tuner.workloads",
    ),
    (
        "tuner.confirmation",
        "tuner.curves",
        "tuner.data",
        "tuner.kept",
        "tuner.outcomes",
        "tuner.tensorwise",
        "tuner.timing",
    ),
    ("tuner.arms", "tuner.clock", "tuner.proposal"),
    ("tuner.ahead", "tuner.probe", "tuner.search", "tuner.tracing"),
    ("tuner.inspection", "tuner.masks", "tuner.means", "tuner.rehearsal", "tuner.restarts", "tuner.updates"),
    ("tuner.gate", "tuner.long_training", "tuner.trainings", "tuner.zoo_plans"),
    ("tuner.long_gate",),
    ("tuner.bench",),
    ("tuner.child",),
    ("tuner.supervise",),
    ("tuner.measure",),
    ("tuner.crew",),
    ("tuner.events", "tuner.ranking", "tuner.verdicts"),
    (
        "tuner.ablation",
        "tuner.checkup",
        "tuner.contenders",
        "tuner.interrupts",
        "tuner.budget",
        "tuner.knowledge",
        "tuner.pace",
        "tuner.room",
        "tuner.work",
    ),
    ("tuner.confirming", "tuner.planted", "tuner.standings"),
    ("tuner.next_trial", "tuner.recall", "tuner.reserve", "tuner.untried"),
    ("tuner.tune",),
    ("tuner.worker",),
    ("tuner.api", "tuner.views"),
    ("tuner.clearing", "tuner.history", "tuner.packing", "tuner.progress", "tuner.upkeep"),
    ("tuner.database_ledger", "tuner.remote_workloads", "tuner.server_ledger"),
    ("tuner.queue",),
    ("tuner.duty", "tuner.explain", "tuner.session", "tuner.verify"),
    ("tuner.cli",),
    (
        "server",
        "server.heads",
        "server.problem_types",
        "server.rates",
        "server.remembered",
        "server.request_log",
        "server.retention",
        "server.settings",
    ),
    ("server.admission", "server.cli", "server.metrics", "server.problems", "server.tokens"),
    ("server.bodies", "server.comparisons", "server.guard", "server.protocol", "server.schemas"),
    ("server.lookups",),
    ("server.context",),
    ("server.auth", "server.openapi"),
    ("server.direct",),
    ("server.archives", "server.health", "server.plans", "server.runs"),
    ("server.compare", "server.events", "server.exports", "server.shares", "server.traces"),
    ("server.pages", "server.pages.assets", "server.pages.attempts", "server.pages.words"),
    ("server.charts", "server.pages.frame"),
    ("server.pages.flash",),
    (
        "server.pages.choices_view",
        "server.pages.compare_view",
        "server.pages.contributions",
        "server.pages.facts_view",
        "server.pages.figures_view",
        "server.pages.headline_view",
        "server.pages.model_view",
        "server.pages.plan_view",
        "server.pages.progress_view",
        "server.pages.run_view",
        "server.pages.snippet_view",
        "server.pages.spent_view",
        "server.pages.timeline_view",
        "server.pages.trials_view",
    ),
    ("server.pages.drawn",),
    ("server.pages.run",),
    ("server.pages.compare", "server.pages.export", "server.pages.model", "server.pages.plan", "server.pages.shared"),
    (
        "server.pages.login",
        "server.pages.problem",
        "server.pages.problem_types",
        "server.pages.runs",
        "server.pages.submit",
        "server.pages.tokens",
    ),
    ("server.pages.home",),
    ("server.pages.site",),
    ("server.app",),
    ("server.serving",),
)

TORCH = frozenset({"torch", "torchvision", "triton", "transformers", "functorch"})
# Rooms that must not load these packages, not even through what they import.
FREE_OF: Mapping[str, frozenset[str]] = {
    **dict.fromkeys(
        (
            "kitsune",
            "kitsune.__main__",
            "kitsune.cache",
            "kitsune.cli",
            "kitsune.client",
            "kitsune.doctor",
            "kitsune.duration",
            "kitsune.engine.analysis",
            "kitsune.engine.trace",
            "kitsune.errors",
            "kitsune.exchange",
            "kitsune.exits",
            "kitsune.home",
            "kitsune.knobs",
            "kitsune.logs",
            "kitsune.lookup",
            "kitsune.plan",
            "kitsune.plan_diff",
            "kitsune.proof",
            "kitsune.record",
            "kitsune.remote_run",
            "kitsune.report",
            "kitsune.screen",
            "kitsune.server_address",
            "kitsune.submission.archive",
            "kitsune.submission.ops",
            "kitsune.switch",
            "kitsune.timeline",
            "tuner.ablation",
            "tuner.checkup",
            "tuner.clearing",
            "tuner.confinement",
            "tuner.confirmation",
            "tuner.curves",
            "tuner.depot",
            "tuner.depth",
            "tuner.events",
            "tuner.faults",
            "tuner.fitness",
            "tuner.history",
            "tuner.ids",
            "tuner.lockdown",
            "tuner.measure",
            "tuner.patience",
            "tuner.progress",
            "tuner.protocol",
            "tuner.queue",
            "tuner.records",
            "tuner.outcomes",
            "tuner.proposal",
            "tuner.search",
            "tuner.self_test",
            "tuner.server_ledger",
            "tuner.settings",
            "tuner.space",
            "tuner.stats",
            "tuner.store",
            "tuner.student",
            "tuner.supervise",
            "tuner.tune",
            "tuner.verdicts",
            "tuner.views",
            "tuner.wall_clock",
            "tuner.worker",
        ),
        TORCH,
    ),
    "tuner.cli": TORCH | {"optuna", "sqlalchemy"},
    "server": TORCH | {"optuna"},
    "server.cli": TORCH | {"optuna", "sqlalchemy", "fastapi"},
}

# Where a module may be looked up at run time: lazy public names, extras that may be absent, files named by the table.
LAZY_IMPORTERS = frozenset(
    {
        "kitsune/__init__.py",
        "kitsune/__main__.py",
        "kitsune/cli.py",
        "kitsune/doctor.py",
        "kitsune/engine/triton_launches.py",  # Triton is there with a CUDA build of torch only
        "kitsune/extras.py",
        "kitsune/profiler/__init__.py",
        "kitsune/techniques/__init__.py",
        "kitsune/techniques/compile.py",  # torch's compiler, by what compiles
        "tuner/child.py",  # torch's compiler, by a process that has nothing to do yet
    }
)
# The two process borders: whatever a user's model does must become a value there.
# kitsune/graphs.py: whatever a model raises in a capture, which runs it once more, is a reason not to capture it.
# kitsune/engine/planner.py, kitsune/engine/verified.py: the step has run once when these run it again to prove a plan;
# what the user's own code raises in such a run must neither reach them nor have the step run anew.
# kitsune/lookup.py: training must go on plain whatever a server sends and whatever the export of a model raises.
# kitsune/loop.py, kitsune/step.py: errors of Triton derive from nothing else; what no technique owns up to is raised.
# server/retention.py: the thread that deletes old runs must go on, whatever a database says at one of its hours.
# kitsune/memory/prefetch.py: what a loader raises in the thread that fetches ahead is raised again where it is awaited.
BROAD_CATCHERS = frozenset(
    {
        "kitsune/engine/planner.py",
        "kitsune/engine/verified.py",
        "kitsune/graphs.py",
        "kitsune/lookup.py",
        "kitsune/loop.py",
        "kitsune/memory/prefetch.py",
        "kitsune/step.py",
        "server/retention.py",
        "tuner/child.py",
        "tuner/copies.py",
        "tuner/worker.py",
    }
)
# Whose product is text on stdout.
PRINTERS = frozenset({"kitsune/cli.py", "tuner/cli.py", "server/cli.py", "tuner/child.py"})

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
    return [module.found(1, "no docstring; one line says what goes in and what comes out")]


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


def tier_of(name: str, tiers: Iterable[tuple[str, ...]] = TIERS) -> int | None:
    """The tier of the longest line that stands for `name`."""
    lines = [
        (len(line), tier)
        for tier, group in enumerate(tiers)
        for line in group
        if name == line or (name.startswith(f"{line}.") and (line not in PACKAGES or line in ("server", "migrations")))
    ]
    return max(lines)[1] if lines else None


def climbing_imports(modules: Mapping[str, Module]) -> list[str]:
    """Arrows that point up, and modules that have no tier."""
    found = []
    for module in modules.values():
        own = tier_of(module.name)
        if own is None:
            found.append(module.found(1, f"{module.name} has no tier; give it a line in TIERS of tests/laws.py"))
            continue
        for line, target in imports(module, modules):
            other = tier_of(target)
            if target in modules and other is not None and other > own:
                found.append(module.found(line, f"{module.name} imports {target}, which stands above it"))
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
    """Rooms that load a package that they must be free of, with the chain of imports that does it."""
    found = []
    for name in modules:
        rooms = [room for room in free_of if name == room or (name.startswith(f"{room}.") and room not in PACKAGES[:2])]
        forbidden = frozenset().union(*(free_of[room] for room in rooms))
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


def stale_tiers(modules: Mapping[str, Module]) -> list[str]:
    """Lines of TIERS that stand for nothing any more."""
    return [
        f"TIERS names {line}, which does not exist"
        for group in TIERS
        for line in group
        if not any(name == line or name.startswith(f"{line}.") for name in modules)
    ]
