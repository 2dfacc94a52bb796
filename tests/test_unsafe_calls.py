"""No code of the service and its clients loads objects from bytes, runs text as code, or gives a command to a shell:
whoever sends us bytes, names or files gets no more than data out of them.

The cookbook and the recipes are left out: they run a user's own code on the user's machine.
"""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "lorimer"
SOURCES = [
    path for path in sorted(PACKAGE.rglob("*.py")) if path.relative_to(PACKAGE).parts[0] not in ("cookbook", "recipes")
]
MODULES = {"pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve", "jsonpickle"}
CALLS = {
    "eval",
    "exec",
    "compile",
    "__import__",
    "os.system",
    "os.popen",
    "torch.load",
    "yaml.load",
    "yaml.unsafe_load",
    "numpy.load",
    "np.load",
}
KEYWORDS = {"shell", "allow_pickle", "trust_remote_code"}


def name_of(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{name_of(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def unsafe(source: str) -> list[str]:
    """What a source does that it must not, with lines."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [f"{node.lineno}: import {alias.name}" for alias in node.names if alias.name in MODULES]
        elif isinstance(node, ast.ImportFrom) and node.module in MODULES:
            found.append(f"{node.lineno}: import {node.module}")
        elif isinstance(node, ast.Call):
            name = name_of(node.func)
            given = [keyword for keyword in node.keywords if keyword.arg in KEYWORDS]
            said = [keyword.arg for keyword in given if not is_false(keyword.value)]
            found += [f"{node.lineno}: {name}"] if name in CALLS else []
            found += [f"{node.lineno}: {name}({keyword}=...)" for keyword in said]
    return found


def is_false(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is False


def test_no_source_runs_what_it_reads():
    assert len(SOURCES) > 100
    found = {str(path.relative_to(PACKAGE)): unsafe(path.read_text("utf-8")) for path in SOURCES}
    assert {path: calls for path, calls in found.items() if calls} == {}


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from cloudpickle import loads",
        "eval(text)",
        "torch.load(path)",
        "subprocess.run(command, shell=True)",
        "AutoModel.from_pretrained(name, trust_remote_code=flag)",
        "np.load(path, allow_pickle=True)",
    ],
)
def test_planted_ones_are_found(source):
    assert unsafe(source)


def test_what_is_harmless_passes():
    assert unsafe("re.compile('a'); model.eval(); load(path); run(command, shell=False)") == []
