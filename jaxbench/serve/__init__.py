"""Serving: many requests in one running batch, each answered as if it were the only one."""
