"""Chat: how messages become a model's tokens, and how its tokens become messages again.

The server's compatible APIs and the cookbook's renderers share this package. It loads no torch; ``templates`` alone
needs Jinja.
"""
