"""Run the steps with every older release, against one server: ``make conformance-old``."""

import sys
import tempfile
import time
from pathlib import Path

import tinker

from tests.conformance.old.environments import RELEASES, python_of, run_steps
from tests.conformance.servers import create_key, running_server

MODEL = "conformance/debug"


def main() -> int:
    for release in RELEASES:
        python_of(release)
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data"
        key = create_key(data, "alice")
        with running_server(data, [f"{MODEL}=lorimer/debug"]) as server:
            make_export(server.url, key)
            for release in RELEASES:
                started = time.monotonic()
                try:
                    outcome = f"{run_steps(release, server.url, key, MODEL)} steps"
                except AssertionError as error:
                    failed += 1
                    outcome = f"failed\n{error}"
                print(f"tinker {release:7} {outcome} in {time.monotonic() - started:.1f} s", flush=True)  # noqa: T201
    return min(failed, 1)


def make_export(url: str, key: str) -> None:
    """An external checkpoint, which releases before 0.28 must not be shown."""
    with tinker.ServiceClient(base_url=url, api_key=key) as service:
        service.create_lora_training_client(MODEL, rank=4).save_weights_external("export").result()


if __name__ == "__main__":
    sys.exit(main())
