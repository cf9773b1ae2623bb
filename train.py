"""Train a chat model: `python train.py --help`."""

import sys

from pipeline.installation import require_packages

if __name__ == "__main__":
    require_packages()
    from pipeline.launch.command import main

    sys.exit(main())
