"""What happens to rows by rule: how they finish, when they are requeued, when a group is complete or stale."""
