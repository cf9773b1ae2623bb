"""The command `python -m engine.memory` has a new name."""

import sys

sys.exit("python -m engine.memory is now: python -m pipeline.planning.estimate model=opt-13b ranks=8")
