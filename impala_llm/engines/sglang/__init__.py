"""SGLang engine: generates on SGLang servers: their processes, clients and weights.

From outside: `engine.SGLangEngine`, `launch_args` (settings of a server), `external_server` (servers that somebody
else starts), and `weight_push`, the learner's end of the weights.

- a server: server (its process) and guard (which ends it with its owner), client (calls), response (a completion under
  way), replica (one server of the engine: traffic, restarts)
- its weights: replica_weights (which version), weight_update (while it answers), weight_lock, process_group
"""
