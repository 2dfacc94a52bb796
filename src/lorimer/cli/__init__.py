"""The command ``lorimer`` and its subcommands. Runs on the user's machine; loads the server only to serve."""
