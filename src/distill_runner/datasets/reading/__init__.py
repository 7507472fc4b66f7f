"""Reading: rows of a local folder, of the hub or of embedded data."""
