"""A model that is cut among processes. The door: `runner.build_ranked`."""
