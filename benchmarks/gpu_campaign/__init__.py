"""What only a GPU can tell, in at most eight minutes."""
