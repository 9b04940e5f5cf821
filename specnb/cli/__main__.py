"""`python -m specnb.cli`: the same as the command `specnb`."""

import sys

from specnb.cli import main

sys.exit(main())
