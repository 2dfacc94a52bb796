"""Records the public surface of every release of the official SDK that Lorimer serves, as names and call signatures.

``python tools/official_surface.py`` downloads the wheels of those releases, reads them without importing them, and
writes ``tests/client/official_surface.json``: for each public class its members, each with the signatures it has had
and the first and last release that has each. ``tests/client/test_parity.py`` compares it with ours. A release that is
new gets a line in ``RELEASES``.
"""

import ast
import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "tests" / "client" / "official_surface.json"
RELEASES = """
0.7.0 0.8.1 0.9.0 0.10.0 0.11.0 0.12.0 0.13.1 0.14.0 0.15.0 0.16.1 0.18.2 0.19.0 0.20.0 0.21.0 0.22.7 0.23.4 0.24.1
0.25.0 0.26.2 0.27.2 0.28.1 0.29.1 0.30.4 0.31.0 0.32.0 0.33.1 0.34.0 0.35.0 0.36.0
""".split()
"""The last of each minor release."""
PYDANTICS = ("model_config",)
SPECIAL = ("__init__", "__enter__", "__exit__", "__await__", "__reduce__")
"""Members with two underscores that users reach by calls, ``with``, ``await`` and ``pickle``."""
MODELS = ("BaseModel", "StrictBase")
"""Base classes whose annotated fields are parameters."""

Surface = dict[str, dict[str, str]]
"""Class, member, signature."""
Modules = dict[str, ast.Module]


# ── one release ───────────────────────────────────────────────────────────────────────────────────────


def modules_of(wheel: Path) -> Modules:
    """The modules of a wheel by path, without those that hold nothing public."""
    found = {}
    with zipfile.ZipFile(wheel) as files:
        for name in files.namelist():
            if name.endswith(".py") and not name.endswith("_pb2.py"):
                found[name] = ast.parse(files.read(name))
    return found


def surface_of(modules: Modules) -> Surface:
    """What a release has; ``""`` and ``types`` are the names of the package and of its types."""
    exported = dunder_all(modules["tinker/__init__.py"])
    types = imported(modules["tinker/types/__init__.py"])
    classes = {
        node.name: node
        for path, module in modules.items()
        if PurePosixPath(path).parts[1] in ("types", "lib")
        for node in module.body
        if isinstance(node, ast.ClassDef)
    }
    clients = {
        name
        for path, module in modules.items()
        if path.startswith("tinker/lib/public_interfaces/")
        for name in [*imported(module), *(node.name for node in module.body if isinstance(node, ast.ClassDef))]
        if name.endswith(("Client", "Future", "Handle")) and not name.startswith(("_", "Async"))
    }
    found: Surface = {"": dict.fromkeys(exported, ""), "types": dict.fromkeys(types, "")}
    for name in sorted({*clients, *types} & classes.keys()):
        found[name] = dict(members_of(classes[name], classes))
    return found


def dunder_all(module: ast.Module) -> list[str]:
    for node in module.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return [str(name) for name in ast.literal_eval(node.value)]
    raise SystemExit("the package has no __all__")


def imported(module: ast.Module) -> list[str]:
    """The public names that a module takes from others."""
    return [
        alias.asname or alias.name
        for node in module.body
        if isinstance(node, ast.ImportFrom) and node.level
        for alias in node.names
        if (alias.asname or alias.name)[0].isupper()
    ]


def members_of(node: ast.ClassDef, classes: dict[str, ast.ClassDef]) -> Iterator[tuple[str, str]]:
    """The members of a class and of its bases, the latter first; a model's fields are parameters of ``__init__``."""
    lineage = list(line_of(node, classes))
    fields = {}
    for one in lineage:
        for item in one.body:
            if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name) and public(item.target.id):
                if not ast.unparse(item.annotation).startswith(("ClassVar", "InitVar")):
                    fields[item.target.id] = default_of(item)
            elif isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef) and public(item.name) and not is_hook(item):
                yield item.name, signature_of(item)
                yield from attributes_of(item)
            elif isinstance(item, ast.Assign) and public(ast.unparse(item.targets[0])):
                yield ast.unparse(item.targets[0]), "value"
    if is_model(lineage):
        required = [f"{name}" for name, default in fields.items() if default is None]
        optional = [f"{name}={default}" for name, default in fields.items() if default is not None]
        yield "__init__", f"fields(*, {', '.join([*required, *optional])})" if fields else "fields()"


def attributes_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[tuple[str, str]]:
    """The public attributes that a constructor sets."""
    if function.name != "__init__":
        return
    for node in ast.walk(function):
        if not isinstance(node, ast.Assign | ast.AnnAssign):
            continue
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            if isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self" and public(target.attr):
                yield target.attr, "attribute"


def line_of(node: ast.ClassDef, classes: dict[str, ast.ClassDef]) -> Iterator[ast.ClassDef]:
    for base in node.bases:
        name = ast.unparse(base).partition("[")[0].rpartition(".")[2]
        if name in classes and name != node.name:
            yield from line_of(classes[name], classes)
    yield node


def is_model(lineage: list[ast.ClassDef]) -> bool:
    """Whether its fields are its parameters: a pydantic model or a dataclass, without a constructor of its own."""
    if any(isinstance(item, ast.FunctionDef) and item.name == "__init__" for one in lineage for item in one.body):
        return False
    bases = {ast.unparse(base).rpartition(".")[2] for one in lineage for base in one.bases}
    marks = {ast.unparse(mark).partition("(")[0].rpartition(".")[2] for one in lineage for mark in one.decorator_list}
    return bool(bases & set(MODELS)) or "dataclass" in marks


def is_hook(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether only pydantic calls it."""
    return any("validator(" in mark or "serializer" in mark for mark in map(ast.unparse, function.decorator_list))


def public(name: str) -> bool:
    return name in SPECIAL or not (name.startswith("_") or name in PYDANTICS)


def default_of(item: ast.AnnAssign) -> str | None:
    """The default of a field as text; ``None`` where there is none, ``...`` where it is made by a call."""
    if item.value is None:
        return None
    value = item.value
    if isinstance(value, ast.Call):
        named = {word.arg: word.value for word in value.keywords}
        first = value.args[0] if value.args else named.get("default")
        if first is None:
            return "..." if "default_factory" in named else None
        return None if ast.unparse(first) == "..." else plain(first)
    return plain(value)


def signature_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """How it is called: ``def``, ``async``, ``static``, ``class`` or ``property``, and the parameters."""
    marks = {ast.unparse(mark).rpartition(".")[2] for mark in function.decorator_list}
    if marks & {"property", "cached_property"}:
        return "property"
    kind = "async" if isinstance(function, ast.AsyncFunctionDef) else "def"
    kind = "static" if "staticmethod" in marks else "class" if "classmethod" in marks else kind
    arguments = function.args
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults: list[ast.expr | None] = [None] * (len(positional) - len(arguments.defaults)) + [*arguments.defaults]
    words = [worded(one, default) for one, default in zip(positional, defaults, strict=True)]
    if arguments.vararg:
        words.append(f"*{arguments.vararg.arg}")
    elif arguments.kwonlyargs:
        words.append("*")
    words += [worded(one, value) for one, value in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)]
    words += [f"**{arguments.kwarg.arg}"] if arguments.kwarg else []
    return f"{kind}({', '.join(words if kind == 'static' else words[1:])})"


def worded(argument: ast.arg, default: ast.expr | None) -> str:
    return argument.arg if default is None else f"{argument.arg}={plain(default)}"


def plain(default: ast.expr) -> str:
    """A literal as text; ``...`` for anything else."""
    try:
        return repr(ast.literal_eval(default))
    except ValueError:
        return "..."


# ── all releases ──────────────────────────────────────────────────────────────────────────────────────


def merged(surfaces: dict[str, Surface]) -> dict[str, dict[str, list[list[str]]]]:
    """For each class and member: signature, first and last release that has it; the newest signature is last."""
    found: dict[str, dict[str, list[list[str]]]] = {}
    for release, surface in surfaces.items():
        for owner, members in surface.items():
            for member, signature in members.items():
                spans = found.setdefault(owner, {}).setdefault(member, [])
                if spans and spans[-1][0] == signature:
                    spans[-1][2] = release
                else:
                    spans.append([signature, release, release])
    return {owner: dict(sorted(members.items())) for owner, members in sorted(found.items())}


def download(release: str, directory: Path) -> Path:
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps"]
    command = [*pip, "--only-binary", ":all:", "--dest", str(directory), f"tinker=={release}"]
    run = subprocess.run(command, capture_output=True, text=True)
    if run.returncode != 0:
        raise SystemExit(f"tinker {release} cannot be downloaded: {run.stderr.strip().splitlines()[-1]}")
    return next(directory.glob(f"tinker-{release}-*.whl"))


def text_of(found: dict[str, dict[str, list[list[str]]]]) -> str:
    """JSON with a line for each member."""
    owners = []
    for owner, members in found.items():
        lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(spans)}" for name, spans in members.items())
        owners.append(f" {json.dumps(owner)}: {{\n{lines}\n }}")
    return "{\n" + ",\n".join(owners) + "\n}\n"


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        surfaces = {one: surface_of(modules_of(download(one, Path(directory)))) for one in RELEASES}
    RECORD.write_text(text_of(merged(surfaces)), "utf-8")


if __name__ == "__main__":
    main()
