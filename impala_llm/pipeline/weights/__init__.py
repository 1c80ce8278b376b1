"""Versions of the policy: the board in shared memory, and the relay that brings them to other hosts.

From outside: `board.WeightPublisher` and `board.WeightReader` on one host, `relay_server.serve_weights` and
`relay_client.relay_weights` between hosts; both ends of the third way, a process group to SGLang, are in
engines/sglang.

- of the board: slots (its files), tensor_writing (one or several processes write a version), safetensors_layout (of a
  file that is rewritten in place), bfloat16 (converted on the way)
- of the relay: relay_server and relay_client, relay_thread (of either), relay_download (of one version),
  relay_messages
"""
