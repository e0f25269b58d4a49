"""Plan -> tensors -> result; moves state between live slots and pages."""
