"""Pipeline: what to build, each artifact once."""
