"""The command line. Commands load what they need when they run, so that ``lorimer --help`` is quick."""
