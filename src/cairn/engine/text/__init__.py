"""Text to tokens and back, chats to prompts. The door: `tokenizer.ModelTokenizer`. No torch."""
