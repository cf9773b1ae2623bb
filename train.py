"""Train a chat model: `python train.py --help`."""

import sys

from pipeline.launch.command import main

if __name__ == "__main__":
    sys.exit(main())
