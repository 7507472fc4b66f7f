"""Words that small data sets of the tests are made of."""

WORDS = ["the", "a", "river", "stone", "cloud", "garden", "window", "letter", "under", "over", "slowly", "bright"]
WORDS += ["heavy", "green", "walked", "found", "carried"]
