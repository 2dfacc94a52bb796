"""Lorimer's engine measured against plain transformers with PEFT, back to back in one run: ``python -m bench``.

``models.py`` has the models, ``workloads.py`` the data, ``ours.py`` and ``peers.py`` the two sides, ``rows.py`` what is
measured, ``report.py`` the table and the aims; ``service/`` puts a server under load. What the figures mean is in
``docs/benchmarks.md``.
"""

import os

# As in an engine's own process, and the same for both sides; torch reads it when it is loaded.
os.environ.setdefault("GOMP_SPINCOUNT", "2000")
