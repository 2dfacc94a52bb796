"""Example training scripts, each short enough to read in ten minutes. Run on the user's machine."""
