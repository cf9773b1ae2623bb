"""Chat with a model: `python chat.py --help`."""

import sys

from pipeline.chat.command import main

if __name__ == "__main__":
    sys.exit(main())
