"""`python -m transferqueue.cli`."""

import sys

from transferqueue.cli import main

sys.exit(main())
