"""Exports of a saved adapter: PEFT, merged Hugging Face weights, and GGUF."""
