"""Load-tests the whole service: a real ``lorimer serve`` on loopback, called over HTTP as clients do.

``server.py`` starts it and measures memory and disk, ``http.py`` and ``client.py`` call it, ``rows.py`` has the loads,
``setting.py`` their sizes, ``figures.py`` the table and the targets.
"""
