"""What surrounds every call on a server, so that servicers are three lines."""
