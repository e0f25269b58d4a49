"""The settings of `cairn serve` and `cairn proxy`: flags, environment variables, a YAML file."""
