"""``python -m distill_runner`` is ``distill-run``."""

from distill_runner.cli import main

if __name__ == "__main__":
    main()
