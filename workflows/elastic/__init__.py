"""Generators that come and go while a job runs: the controller that decides, and what applies it to a flow."""
