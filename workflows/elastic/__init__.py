"""Generators that come and go while a job runs: the controller that decides, and what applies its decisions to a flow."""
