"""What changes while training goes on, as functions of the step: no state, hence nothing to checkpoint."""


def linear(step: int, num_steps: int, warmup: float) -> float:
    """Factor of the learning rate: up from 0 over the first share ``warmup`` of the steps, then down to 0 (BERT).

    ``step`` counts from 0; the last of ``num_steps`` steps still has a factor above 0.
    """
    warmup_steps = int(warmup * num_steps)
    if step < warmup_steps:
        return (step + 1) / (warmup_steps + 1)
    return (num_steps - step) / max(1, num_steps - warmup_steps)


def constant(step: int, num_steps: int, warmup: float) -> float:
    """Factor of the learning rate: up from 0 over the first share ``warmup`` of the steps, then 1."""
    return min(1.0, (step + 1) / (int(warmup * num_steps) + 1))


LEARNING_RATES = {"linear": linear, "constant": constant}
