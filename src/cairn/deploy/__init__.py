"""Ways to run many servers as one: on Ray Serve (`ray`)."""
