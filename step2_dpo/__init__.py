"""Stage 2 without a reward model: direct preference optimization (Rafailov et al., 2023, arXiv:2305.18290)."""
