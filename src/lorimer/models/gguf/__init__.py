"""GGUF files: their binary format, and their conversion into a Hugging Face directory."""
