"""The demo: what the prefix cache does for real prompts on a real server, told by a client that speaks HTTP only."""
