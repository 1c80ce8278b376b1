"""Sockets, keys and authentication."""
