"""Write a CycloneDX SBOM of what is installed beside a Python, and of the JavaScript that is bundled with the console.

Runs in an environment that has cyclonedx-bom: ``python tools/sbom.py .venv/bin/python build/sbom.json``.
"""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
VENDOR = ROOT / "src/lorimer/console/static/vendor"


def bundled() -> dict[str, Any]:
    """uPlot as a component, with the version that its own file states."""
    found = re.search(r"uPlot \(v([\d.]+)\)", (VENDOR / "uPlot.esm.js").read_text("utf-8")[:500])
    if found is None:
        sys.exit(f"{VENDOR / 'uPlot.esm.js'} does not state its version")
    purl = f"pkg:npm/uplot@{found[1]}"
    licenses = [{"license": {"id": "MIT"}}]
    return {
        "type": "library",
        "bom-ref": purl,
        "name": "uplot",
        "version": found[1],
        "purl": purl,
        "licenses": licenses,
    }


def installed(python: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "cyclonedx_py", "environment", "--output-format", "JSON", "--output-reproducible"]
    command += ["--pyproject", str(ROOT / "pyproject.toml"), python]
    found: dict[str, Any] = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    return found


def main(python: str, target: str) -> None:
    sbom = installed(python)
    version = re.search(r'^__version__ = "(.+)"$', (ROOT / "src/lorimer/__init__.py").read_text("utf-8"), re.MULTILINE)
    root = sbom["metadata"]["component"]
    root["version"] = version[1] if version else sys.exit("src/lorimer/__init__.py states no version")
    component = bundled()
    sbom["components"].append(component)
    sbom["dependencies"].append({"ref": component["bom-ref"]})
    ours = next(one for one in sbom["dependencies"] if one["ref"] == root["bom-ref"])
    ours.setdefault("dependsOn", []).append(component["bom-ref"])
    Path(target).write_text(json.dumps(sbom, indent=2) + "\n", "utf-8")
    print(f"{target}: {len(sbom['components'])} components")


if __name__ == "__main__":
    main(*sys.argv[1:])
