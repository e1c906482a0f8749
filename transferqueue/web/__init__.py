"""The web page of a running queue, and the HTTP service. `access` admits requests; `__main__` is their process."""
