"""One file for each family of requests, named as the request."""
