"""The frozen base model, its layers, and the device that runs it."""
