"""Neither the SDK nor the API process loads torch, shown by importing all their modules in a fresh interpreter."""

import json
import os
import pkgutil
import subprocess
import sys

import lorimer

MAY_LOAD_TORCH = {"engine", "models", "cluster", "cookbook", "recipes"}
TORCH_FREE = [
    "lorimer",
    *(
        f"lorimer.{module.name}"
        for module in pkgutil.iter_modules(lorimer.__path__)
        if module.name not in MAY_LOAD_TORCH
    ),
    "lorimer.engine.messages",
    "lorimer.engine.translation",
    "lorimer.engine.process",
    "lorimer.engine.config",
]

IMPORT_AND_REPORT = """
import importlib, json, pkgutil, sys
names = []
for name in sys.argv[1:]:
    module = importlib.import_module(name)
    names.append(name)
    if name != "lorimer" and hasattr(module, "__path__"):
        names += [found.name for found in pkgutil.walk_packages(module.__path__, name + ".")]
loaded = {}
for name in names:
    if not name.endswith((".__main__", ".migrations.env")):  # these run, they are not imported
        importlib.import_module(name)
    for heavy in {"torch", "transformers"} & sys.modules.keys():
        loaded.setdefault(heavy, name)
print(json.dumps(loaded))
"""


def heavy_modules(*names: str, extra_path: str = "") -> dict[str, str]:
    """Which of torch and transformers come with ``names`` and the modules below them, and with which of them first."""
    path = os.pathsep.join(filter(None, [extra_path, os.environ.get("PYTHONPATH")]))
    run = subprocess.run(
        [sys.executable, "-c", IMPORT_AND_REPORT, *names],
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | {"PYTHONPATH": path},
    )
    assert run.returncode == 0, run.stderr
    loaded: dict[str, str] = json.loads(run.stdout)
    return loaded


def test_import_loads_no_torch():
    """What all of them together do not load, none of them loads alone."""
    assert len(TORCH_FREE) > 10
    assert heavy_modules(*TORCH_FREE) == {}


def test_planted_torch_is_found(tmp_path):
    package = tmp_path / "planted" / "deep"
    package.mkdir(parents=True)
    (tmp_path / "torch.py").touch()
    (tmp_path / "planted" / "__init__.py").touch()
    (package / "__init__.py").touch()
    (package / "late.py").write_text("import torch", "utf-8")
    assert heavy_modules("planted", extra_path=str(tmp_path)) == {"torch": "planted.deep.late"}


def test_a_server_on_its_data_directory_does_not_load_obstore():
    check = "import sys, lorimer.server.app; print('obstore' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, timeout=60)
    assert run.stdout == "False\n", run.stderr
