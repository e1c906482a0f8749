"""Starts and finds the processes of one deployment on a cluster: today on Ray (docs/decisions/0020).

Importing this loads no Ray; what speaks to it imports it when it is called.
"""
