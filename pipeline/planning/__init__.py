"""Before a stage: what it will need, how long it will take, and the fastest setting that fits."""
