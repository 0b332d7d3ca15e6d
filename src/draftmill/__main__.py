"""`python -m draftmill` is `draftmill`."""

import sys

from draftmill.cli import main

sys.exit(main())
