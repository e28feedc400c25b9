"""`python -m scalelab` is `scalelab`."""

import sys

from .cli import main

sys.exit(main())
