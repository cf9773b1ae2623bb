"""Stage 3, PPO: answers the reward model likes, near the SFT model (Schulman et al., 2017; Ouyang et al., 2022)."""
