"""LoRA adapters: which weights they change, their state, and their formats on disk."""
