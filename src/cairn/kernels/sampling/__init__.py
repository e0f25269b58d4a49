"""How tokens are drawn: what a row asks for, and the sampler in torch that every backend without one of its own has."""
