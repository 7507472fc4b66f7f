"""Loss terms, and distillation methods as weighted sums of loss terms."""
