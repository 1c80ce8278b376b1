"""Processes talk to each other here and nowhere else. numpy only, no torch."""
