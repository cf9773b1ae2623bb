"""Train a chat model: `python train.py --help`."""

import sys

from zerochat import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
