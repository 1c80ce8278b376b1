"""An OpenAI-compatible server above an engine, and the agents that play episodes through it.

From outside: `agents`, which plays an episode, and `tasks`.

- a request: connections, server, requests and anthropic (bodies), chat (messages as tokens), tool_calls (in
  completions)
- an episode: episode, conversation (which completion a request continues), tree (the tokens, and the trajectory in the
  end)
- agents: agent_pool, worker, worker_pipes, descendants (what they have started)
"""
