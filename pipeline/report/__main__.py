"""`python -m pipeline.report RUN` writes RUN/report.html again."""

import sys

from pipeline.report.report import main

if __name__ == "__main__":
    sys.exit(main())
