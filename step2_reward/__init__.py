"""Stage 2, the reward model: a score for an answer, learned from pairs (Bradley & Terry, 1952; Ouyang et al., 2022)."""
