"""Processes of a run: how they start, what they log, how they end. Nothing of settings, playing or learning.

- at the supervisor: child_processes, fork_server, programs (command lines for people)
- in every process: supervised, log_lines, limited_warnings, stop_signals, open_files
- module_process: command line and variables of processes that run a module of this package
- cgroups: cores and memory that a container may use; compiled_code: where torch.compile keeps its results
"""
