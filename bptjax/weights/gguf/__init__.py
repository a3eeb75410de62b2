"""GGUF files, which llama.cpp and Ollama read."""
