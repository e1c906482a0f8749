"""The web page that shows a running queue, and the HTTP service. `access` decides who may use them; `__main__` is their
process."""
