"""The wire's formats, without anything that runs.

frames (HTTP/2's frames), hpack and header_blocks (compressed fields, and whole blocks of them), request (a request's
head), metadata and messages (gRPC's).
"""
