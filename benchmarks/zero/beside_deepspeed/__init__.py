"""Training steps on our engine and on DeepSpeed, at the same ZeRO stage."""
