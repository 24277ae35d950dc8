"""What is on the wire, without anything that runs: frames, HPACK and whole header blocks, a request's head, gRPC's
metadata and messages."""
