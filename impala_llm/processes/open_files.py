"""The limit of open files of this process, connections included."""

import resource

_MOST = 1 << 16
"""Programs that are started inherit the limit, and some old ones close each descriptor below it one by one."""


def raise_limit() -> int:
    """Raise the limit as far as allowed, up to 65,536. Returns how many of these files may be open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MOST if hard == resource.RLIM_INFINITY else min(hard, _MOST)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return most
