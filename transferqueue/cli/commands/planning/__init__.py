"""The commands that measure a job and divide devices among its stages."""
