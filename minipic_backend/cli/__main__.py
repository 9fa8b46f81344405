"""`python -m minipic_backend.cli`: the command `minipic`."""

import sys

from minipic_backend.cli import main

sys.exit(main())
