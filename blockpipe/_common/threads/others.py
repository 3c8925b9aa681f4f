"""The user's threads beside this one: no mode of torch sees what they compute."""

import threading


def beside_this_thread() -> str:
    """Return a text that names a thread that a forward may have given work, or an empty one."""
    own = (threading.current_thread(), threading.main_thread())
    for thread in threading.enumerate():
        is_ours = thread.daemon or thread.name.startswith("blockpipe")
        if thread not in own and not is_ours:
            return f", as in another thread (there is {thread.name!r})"
    return ""


def are_others() -> bool:
    """Return whether threads of the user's run beside this one, other than the main one that may
    wait for it."""
    return bool(beside_this_thread())
