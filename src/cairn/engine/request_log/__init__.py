"""A line for each request that has ended. The door: `log.open_log`."""
