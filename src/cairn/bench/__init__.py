"""A load generator for any server with OpenAI's API, and what is made of its figures. A stranger: HTTP only."""
