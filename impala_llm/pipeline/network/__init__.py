"""Sockets, keys and authentication.

From outside: `keys` (made, read, refused), and `listener`, where other processes meet this one.

- sockets: ZeroMQ sockets with all of their options
- zap_authenticator: which keys may connect
"""
