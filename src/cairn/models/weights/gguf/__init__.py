"""GGUF files, llama.cpp's form of a checkpoint, read as if they were a folder of safetensors: config.json's fields from
their metadata, published tensors from what llama.cpp's converter made of these."""
