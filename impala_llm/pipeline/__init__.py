"""Communication between processes: the only package with sockets and shared memory. numpy only, no torch."""
