"""Completions, chats and tokenizing, as OpenAI and vLLM have them: the one way from a body to the engine and back."""
