"""How a job of another stack is read: shell scripts, YAML files, arguments. No stack is named here."""
