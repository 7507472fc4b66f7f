"""Training: the one loop, the teacher's targets, devices and processes."""
