"""Makes ``python -m distill_runner`` the same as ``distill-run``."""

from distill_runner.cli import main

if __name__ == "__main__":
    main()
