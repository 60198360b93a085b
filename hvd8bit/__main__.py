"""`python -m hvd8bit`: the same as the command `hvd8bit`."""

import sys

from hvd8bit.cli import main

sys.exit(main())
