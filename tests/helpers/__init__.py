"""What tests share: the console script, small runs, models of every family, and made data."""
