"""From MODEL, a folder, a GGUF file or a name on the Hugging Face Hub, to tensors in memory."""
