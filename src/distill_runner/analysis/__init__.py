"""Analysis: what finished students have inside, beside their teacher."""
