"""Common helpers: errors, schemas, seeds, locks, terminal output, hub access, imports. No machine learning."""
