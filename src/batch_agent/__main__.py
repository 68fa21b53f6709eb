"""``python -m batch_agent`` is ``batch-agent``."""

import sys

from batch_agent.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
