"""One new token on a cache, all branches in four launches."""
