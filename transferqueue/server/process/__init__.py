"""Starting and stopping a server."""
