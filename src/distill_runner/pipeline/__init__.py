"""Pipeline: plan and build the stages of a run, each artifact once."""
