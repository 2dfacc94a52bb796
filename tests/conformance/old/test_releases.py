"""Two of the older releases of the SDK; ``make conformance-old`` tries them all."""

import pytest

from tests.conformance.old.environments import ALWAYS, NotInstalled, python_of, run_steps
from tests.conformance.samples import MODEL, RANK


@pytest.mark.parametrize("release", ALWAYS)
def test_older_release_passes_every_step(alice, service, release):
    try:
        python_of(release)
    except NotInstalled as reason:
        pytest.skip(str(reason))
    service.create_lora_training_client(MODEL, rank=RANK).save_weights_external("for-newer-releases").result()
    assert run_steps(release, alice.url, alice.key, MODEL) >= 24
