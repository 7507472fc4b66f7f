"""Common: errors, schema, seeds, terminal, hub, imports. No machine learning."""
