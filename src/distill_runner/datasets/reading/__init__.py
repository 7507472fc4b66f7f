"""Reading of rows from a local folder, from the hub or from the embedded data."""
