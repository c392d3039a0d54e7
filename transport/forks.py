"""Tells objects in the child of a fork that their threads stayed behind in the parent.

It is done at the fork, before any other code runs in the child: whoever waits there for such a thread hears so, too.
"""

import os
import weakref
from typing import Protocol


class HasThreads(Protocol):
    def forked(self) -> None:
        """Called in the child. The threads may have been stopped in the middle of anything, with any lock held."""


_told: weakref.WeakSet[HasThreads] = weakref.WeakSet()


def tell(owner: HasThreads) -> None:
    """Call `owner.forked` in the child of every fork, as long as the owner lives."""
    _told.add(owner)


def _tell_all() -> None:
    for owner in list(_told):
        owner.forked()


os.register_at_fork(after_in_child=_tell_all)
