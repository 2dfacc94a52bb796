"""What travels on the wire, and its encodings: JSON, protobuf and zstd. Used in every process."""
