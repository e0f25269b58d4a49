"""From MODEL, a folder or a name on the Hugging Face Hub, to tensors in memory."""
