"""``python -m penstock.run script.py``: a program that was written for safetensors, with `penstock.patch`.

    python -m penstock.run script.py --its --arguments
    python -m penstock.run -m package.module --its --arguments

The program sees what ``python script.py`` and ``python -m package.module`` show it: ``sys.argv``, ``sys.path[0]``,
``__main__``, exit statuses, signals, and tracebacks without a line of this module. A folder or a zip file with a
``__main__.py`` is a program too, and ``-`` is standard input.

Only this process is patched, and what it forks. Interpreters that the program starts are not: they read
``PENSTOCK_PATCH=1``, which needs ``pip install "penstock[patch]"``.
"""

import sys

from ._program import main

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main())
