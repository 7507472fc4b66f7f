"""Methods: loss terms, and methods as weighted sums of them."""
