"""SFT, reward model and PPO beside the peers: the same data, shape and precision, in processes of their own."""
