"""The engine that generates with an SGLang server: its process, its client, its weights."""
