"""An OpenAI-compatible server above an engine, and the agents that play episodes through it."""
