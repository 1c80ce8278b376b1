"""Embedded engine: generates with torch inside of the actor's process."""
