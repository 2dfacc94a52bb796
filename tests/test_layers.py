"""Who may import whom, read from the syntax tree of every module, function-level imports included."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

SRC = Path(__file__).parents[1] / "src"

MAY_IMPORT = {
    "lorimer": {"types", "client"},  # the package's own __init__.py
    "errors": set(),
    "terminal": set(),
    "types": set(),
    "chat": {"types"},
    "client": {"types"},
    "store": {"types"},
    "engine": {"types", "models.sources"},
    "models": {"types"},
    "models.description": {"engine.model", "engine.adapters"},
    "models.export": {"types", "engine.model", "engine.adapters", "engine.training.batch"},
    "scheduler": {
        "types",
        "store",
        "engine.messages",
        "engine.translation",
        "engine.process",
        "engine.config",
        "engine.launch",
        "engine.reservations",
    },
    "cluster": {"engine.config", "scheduler.placement", "server.settings", "server.setting_sources"},
    "server": {"types", "chat", "store", "scheduler", "engine.process", "engine.config", "console"},
    "console": set(),
    "cli": {"types", "client", "terminal"},
    "cookbook": {"types", "chat", "client", "terminal"},
    "recipes": {"types", "chat", "client", "cookbook", "terminal"},
}
MAY_IMPORT_IN_FUNCTIONS = {
    "cli": {"server", "cluster", "models", "cookbook", "recipes"},
    "client": {"server.app", "server.control", "server.serve", "server.setting_sources"},
}
"""On top of the above, where a module is loaded only when it is needed: to serve, to export, to embed a server."""
EVERYBODY_MAY_IMPORT = {"errors", "__version__"}

MAY_LOAD_TORCH = {"engine", "models", "cookbook", "recipes"}
TORCH_FREE_ENGINE_MODULES = ["messages", "translation", "process", "config", "launch", "fork_server", "reservations"]
LOADS_TORCH = {"torch", "transformers", "peft", "accelerate", "safetensors.torch"}


@dataclass(frozen=True)
class Import:
    """One imported name, absolute and dotted: ``from a.b import c`` is ``a.b.c``."""

    name: str
    line: int
    in_function: bool


def module_name(path: Path, src: Path) -> str:
    parts = path.relative_to(src).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def imports_of(path: Path, src: Path) -> list[Import]:
    package = module_name(path, src).split(".")
    if path.name != "__init__.py":
        package.pop()

    def names(node: ast.AST) -> Iterator[str]:
        match node:
            case ast.Import():
                yield from (alias.name for alias in node.names)
            case ast.ImportFrom():
                base = package[: len(package) + 1 - node.level] if node.level else []
                prefix = [*base, *([node.module] if node.module else [])]
                yield from (".".join([*prefix, alias.name]) for alias in node.names)
            case ast.Call(func=ast.Name(id=called) | ast.Attribute(attr=called), args=[ast.Constant(str(name)), *_]):
                if called in ("import_module", "__import__"):
                    yield name

    def walk(node: ast.AST, in_function: bool) -> Iterator[Import]:
        for name in names(node):
            yield Import(name, getattr(node, "lineno", 0), in_function)
        inside = in_function or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        # What only the type checker reads is loaded later than anything in a function: never.
        inside = inside or (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
        for child in ast.iter_child_nodes(node):
            yield from walk(child, inside)

    return list(walk(ast.parse(path.read_text("utf-8")), False))


def is_within(name: str, prefixes: set[str]) -> bool:
    return any(name == prefix or name.startswith(prefix + ".") for prefix in prefixes)


def row_of(module: str) -> set[str]:
    """Return the row of the longest name in the table that contains ``module``, which has no leading ``lorimer.``."""
    parts = module.split(".")
    names = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next(MAY_IMPORT[name] for name in names if name in MAY_IMPORT)


def may_import(module: str, imported: Import) -> bool:
    """Return whether ``module`` may have this import; any module may import a name that is not ours."""
    first, _, ours = imported.name.partition(".")
    layer = module.partition(".")[0]
    if first != "lorimer" or is_within(ours, EVERYBODY_MAY_IMPORT | {layer}):
        return True
    row = row_of(module)
    if ours.partition(".")[0] not in MAY_IMPORT:
        # A name of the package itself comes from types or client.
        return {"types", "client"} <= row
    lazily = MAY_IMPORT_IN_FUNCTIONS.get(layer, set()) if imported.in_function else set()
    return is_within(ours, row | lazily)


def layer_violations(path: Path, src: Path) -> list[str]:
    module = module_name(path, src)
    layer = module.split(".")[1] if "." in module else "lorimer"
    if layer not in MAY_IMPORT:
        return [f"{module} belongs to no row of the table"]
    found = []
    for imported in imports_of(path, src):
        if not may_import(module.partition(".")[2] or layer, imported):
            found.append(f"{module}:{imported.line} imports {imported.name}")
        if layer not in MAY_LOAD_TORCH and is_within(imported.name, LOADS_TORCH):
            found.append(f"{module}:{imported.line} loads torch by {imported.name}")
    return found


def files_behind(name: str, src: Path) -> list[Path]:
    """The files that importing ``name`` executes: each package on the way, then the module."""
    parts = name.split(".")
    stems = [src.joinpath(*parts[:length]) for length in range(1, len(parts) + 1)]
    candidates = [file for stem in stems for file in (stem / "__init__.py", stem.with_suffix(".py"))]
    return [file for file in candidates if file.exists()]


def ways_to_torch(start: str, src: Path) -> list[str]:
    """The chains of imports by which ``start`` reaches torch, each once for the module that loads it."""
    found, seen = [], set()
    chains = [(start, file) for file in files_behind(start, src)]
    while chains:
        chain, path = chains.pop()
        if path in seen:
            continue
        seen.add(path)
        for imported in imports_of(path, src):
            step = f"{chain} -> {imported.name}"
            if is_within(imported.name, LOADS_TORCH):
                found.append(step)
            chains += [(step, file) for file in files_behind(imported.name, src)]
    return found


MODULES = sorted((SRC / "lorimer").rglob("*.py"))


def test_modules_import_only_what_their_rows_allow():
    assert len(MODULES) > 100
    assert [violation for path in MODULES for violation in layer_violations(path, SRC)] == []


@pytest.mark.parametrize("module", TORCH_FREE_ENGINE_MODULES)
def test_engine_door_reaches_no_torch(module):
    assert (SRC / "lorimer" / "engine" / f"{module}.py").exists()
    assert ways_to_torch(f"lorimer.engine.{module}", SRC) == []


def test_table_has_a_row_for_each_package_and_no_other():
    packages = {path.parent.name for path in (SRC / "lorimer").glob("*/__init__.py")}
    assert packages == {name for name in MAY_IMPORT if "." not in name} - {"lorimer", "errors", "terminal"}


# ── the checker itself, on planted trees ──────────────────────────────────────────────────────────────


def plant(src: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = src / "lorimer" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")


PLANTED = {
    "absolute": ("store/a.py", "import lorimer.client.service", "imports lorimer.client.service"),
    "from the root": ("store/a.py", "from lorimer import client", "imports lorimer.client"),
    "relative": ("store/a.py", "from ..client import service", "imports lorimer.client.service"),
    "relative from a deeper package": ("server/routes/a.py", "from ...client import x", "imports lorimer.client.x"),
    "relative from an __init__": ("store/__init__.py", "from .. import client", "imports lorimer.client"),
    "in a function": ("types/a.py", "def f():\n    from ..store import x", "imports lorimer.store.x"),
    "in a method": ("types/a.py", "class A:\n    def f(self):\n        import lorimer.store", "imports lorimer.store"),
    "by import_module": ("types/a.py", "importlib.import_module('lorimer.store')", "imports lorimer.store"),
    "the engine past its door": (
        "server/a.py",
        "from lorimer.engine.worker import x",
        "imports lorimer.engine.worker.x",
    ),
    "the engine's package": ("scheduler/a.py", "from lorimer.engine import x", "imports lorimer.engine.x"),
    "messages in the server": ("server/a.py", "import lorimer.engine.messages", "imports lorimer.engine.messages"),
    "the server at the top of the cli": ("cli/a.py", "from lorimer.server import x", "imports lorimer.server.x"),
    "the engine in a model's source": (
        "models/sources.py",
        "from lorimer.engine.model.base_model import x",
        "imports lorimer.engine.model.base_model.x",
    ),
    "an export in the engine": (
        "engine/a.py",
        "from lorimer.models.export import x",
        "imports lorimer.models.export.x",
    ),
    "a root name below the client": ("client/a.py", "from lorimer import Datum", "imports lorimer.Datum"),
    "torch in a function": ("client/a.py", "def f():\n    import torch.nn", "loads torch by torch.nn"),
    "transformers in chat": ("chat/a.py", "def f():\n    import transformers", "loads torch by transformers"),
    "the cookbook in chat": ("chat/a.py", "from lorimer.cookbook import x", "imports lorimer.cookbook.x"),
    "torch through safetensors": ("store/a.py", "import safetensors.torch", "loads torch by safetensors.torch"),
    "a package without a row": ("parts/a.py", "", "belongs to no row of the table"),
}


@pytest.mark.parametrize(("name", "text", "expected"), PLANTED.values(), ids=PLANTED)
def test_checker_finds_planted_violation(tmp_path, name, text, expected):
    plant(tmp_path, {name: text})
    found = layer_violations(tmp_path / "lorimer" / name, tmp_path)
    assert [violation.split(" ", 1)[1] for violation in found] == [expected]


ALLOWED = {
    "own package": ("store/a.py", "from . import b\nfrom .b import c\nimport lorimer.store.d"),
    "own package from a subpackage": ("server/routes/a.py", "from ..auth import check"),
    "errors": ("types/a.py", "from lorimer.errors import InvalidInput\nfrom ..errors import NotFound"),
    "the version": ("server/a.py", "from lorimer import __version__"),
    "the door": ("scheduler/a.py", "from lorimer.engine import messages\nfrom ..engine.process import Engine"),
    "the server in a function of the cli": ("cli/a.py", "def serve():\n    from lorimer.server import app"),
    "the server's types in the cli": ("cli/a.py", "if TYPE_CHECKING:\n    from lorimer.server.app import App"),
    "root names in recipes": ("recipes/a.py", "import lorimer\nfrom lorimer import Datum"),
    "torch in the engine": ("engine/a.py", "import torch"),
    "the engine's model in an export": ("models/export/a.py", "from lorimer.engine.model.base_model import x"),
    "a name that only begins alike": ("store/a.py", "import torchlike, lorimer_tools"),
}


@pytest.mark.parametrize(("name", "text"), ALLOWED.values(), ids=ALLOWED)
def test_checker_passes_what_the_table_allows(tmp_path, name, text):
    plant(tmp_path, {name: text})
    assert layer_violations(tmp_path / "lorimer" / name, tmp_path) == []


TORCH_BEHIND_THE_DOOR = {
    "directly": ({"process.py": "import torch"}, "process -> torch"),
    "in a function": ({"process.py": "def f():\n    import torch"}, "process -> torch"),
    "through another module": (
        {
            "process.py": "from . import config",
            "config.py": "from .device import x",
            "device.py": "from torch import nn",
        },
        "process -> lorimer.engine.config -> lorimer.engine.device.x -> torch.nn",
    ),
    "through the package's __init__": ({"__init__.py": "from .a import x", "a.py": "import transformers"}, None),
}


@pytest.mark.parametrize(("files", "chain"), TORCH_BEHIND_THE_DOOR.values(), ids=TORCH_BEHIND_THE_DOOR)
def test_checker_follows_imports_to_torch(tmp_path, files, chain):
    plant(tmp_path, {f"engine/{name}": text for name, text in ({"__init__.py": "", "process.py": ""} | files).items()})
    found = ways_to_torch("lorimer.engine.process", tmp_path)
    assert len(found) == 1
    assert chain is None or found[0] == f"lorimer.engine.{chain}"


def test_checker_survives_import_cycles(tmp_path):
    plant(tmp_path, {"engine/process.py": "from . import config", "engine/config.py": "from . import process"})
    assert ways_to_torch("lorimer.engine.process", tmp_path) == []


CONCERNS = {
    "admin": "what an administrator asks of a server",
    "auth": "who a request comes from",
    "backup": "copying a running server",
    "chat": "conversations with a model",
    "checkpoints": "named, persisted weights of a run",
    "clients": "what an SDK asks when it starts",
    "compression": "of bodies",
    "connection": "to a server",
    "custom_loss": "losses that clients upload",
    "datums": "training examples made of something else",
    "demo": "the first three minutes",
    "episodes": "what programs outside did with a sampler of a run",
    "errors": "exceptions, and how they are shown",
    "evaluations": "grades of a model on the items of a task",
    "export": "checkpoints in other formats",
    "futures": "pending results",
    "images": "in inputs of a model",
    "keys": "API keys",
    "leases": "rights of one process, until they run out",
    "methods": "ways of fine-tuning, compared",
    "metrics": "numbers of a run, over its steps",
    "optim": "optimisers and their parameters",
    "overview": "how a server is doing",
    "polling": "waiting for pending results",
    "progress": "shown on a terminal",
    "replicas": "who computes a base model",
    "results": "of operations and samples",
    "retention": "what is deleted when",
    "rollouts": "episodes of a policy",
    "runs": "adapters being trained",
    "sampling": "tokens from a model",
    "schemas": "requests and answers of a compatible API",
    "service": "the way to a server",
    "sessions": "client programs",
    "settings": "of a server",
    "snapshots": "what a run is restored from",
    "stops": "what ends a sequence",
    "system": "the machine and the processes of a server, over time",
    "telemetry": "of SDKs",
    "tokenizers": "files of a base model's tokenizer",
    "tools": "calls that a model makes",
    "training": "operations that train a run",
    "trainings": "trainings that the server runs for a user",
    "transcripts": "episodes as people read them",
    "usage": "tokens and checkpoints, counted",
}
"""File names that several packages have, and the one concern that each of them means everywhere."""


def test_a_file_name_means_one_concern():
    """A name that comes to recur is renamed, or gets its line above."""
    folders: dict[str, set[str]] = {}
    for path in (SRC / "lorimer").rglob("*.py"):
        if not path.stem.startswith("__") and "migrations" not in path.parts:
            folders.setdefault(path.stem, set()).add(path.parent.relative_to(SRC).as_posix())
    assert {name for name, found in folders.items() if len(found) > 1} == set(CONCERNS)


def test_files_are_short():
    """CONTRIBUTING's limit; what protoc wrote is not ours."""
    files = [path for path in (SRC / "lorimer").rglob("*.py") if not path.name.endswith("_pb2.py")]
    assert [path.name for path in files if len(path.read_text("utf-8").splitlines()) > 600] == []
