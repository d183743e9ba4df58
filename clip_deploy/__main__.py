"""``python -m clip_deploy``: the same as the ``clip-deploy`` command."""

import sys

from clip_deploy.cli import main

if __name__ == "__main__":
    sys.exit(main())
