"""The former name of `python -m pipeline.report RUN`."""

import sys

from pipeline.report.report import main

if __name__ == "__main__":
    sys.exit(main())
