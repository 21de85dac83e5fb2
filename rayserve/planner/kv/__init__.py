"""What does the KV cache hold, by vLLM's own rules?"""
