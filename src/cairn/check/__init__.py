"""`cairn check --generate`: what a model answers here, beside what transformers answers with the same weights."""
