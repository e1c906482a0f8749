"""A page that shows a running queue. It only looks: see `app` for who may see it, `__main__` for its process."""
