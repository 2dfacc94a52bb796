"""Benchmarks Lorimer's engine against plain transformers with PEFT, alternating in one run: ``python -m bench``.

``models.py`` has the models, ``workloads.py`` the data, ``ours.py`` and ``peers.py`` the two sides, ``rows.py`` the
measurements, ``report.py`` the table and the targets. ``outsiders.py`` has peers in environments of their own, which
``drivers/`` runs there. ``service/`` load-tests a server. ``docs/benchmarks.md`` explains the figures.
"""

import os

# Same as in an engine process, for both sides. Set before torch is imported, which reads it.
os.environ.setdefault("GOMP_SPINCOUNT", "2000")
