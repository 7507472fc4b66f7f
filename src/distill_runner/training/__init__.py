"""Training: the only training loop, the teacher's targets, devices and processes."""
