"""The peers. Each module runs in the peer's own environment and imports only `benchmarks`, never engine or pipeline."""
