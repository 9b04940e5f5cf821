"""`python -m specnb_audit`: the same as the command `specnb-audit`."""

import sys

from specnb_audit.cli import main

sys.exit(main())
