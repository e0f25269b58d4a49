"""A model that is cut among processes. The door: `runner.load_ranks`."""
