"""A load generator for any server with OpenAI's API, and its reports. It knows nothing of cairn: HTTP only."""
