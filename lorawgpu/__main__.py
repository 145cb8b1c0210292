"""`python -m lorawgpu <command>`, where the `lorawgpu` script is not on the PATH."""

import sys

from lorawgpu.cli import main

sys.exit(main())
