"""Stage 3, PPO: answers that score high, near the SFT model (Schulman et al., 2017; Ouyang et al., 2022)."""
