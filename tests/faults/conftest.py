"""What the fault tests log is their own: which process was killed when, and what it came to."""

import logging

logging.getLogger("httpx2").setLevel(logging.WARNING)
