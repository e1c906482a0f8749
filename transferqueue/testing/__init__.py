"""Public test kits for adapter authors and for the project itself."""
