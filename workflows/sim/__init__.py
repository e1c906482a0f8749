"""Workflows in simulation: engines that only take their time, over the real queue."""
