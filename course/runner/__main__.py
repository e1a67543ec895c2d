"""The ladder's command: `python course/runner VERB ...`, which is what `./vc` runs. Standard library alone."""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:] = [str(HERE.parents[1]), *(p for p in sys.path if p != str(HERE))]  # the checkout is not installed

from course.runner.verbs import main  # noqa: E402

sys.exit(main(sys.argv[1:]))
