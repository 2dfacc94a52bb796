"""The whole service under load: a real ``lorimer serve`` on loopback, spoken to over HTTP as clients do.

``server.py`` starts it and weighs its processes, ``http.py`` and ``client.py`` speak to it, ``rows.py`` has what is
measured in the measures of ``setting.py``, ``figures.py`` the table and the aims.
"""
