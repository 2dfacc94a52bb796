"""Workers placed by Ray (``cluster = "ray"``), by the command ``lorimer cluster``; needs the extra ``cluster``."""
