"""A strict stand-in for TensorRT-LLM, written from what is documented of it: it accepts exactly what a version accepts.

It computes nothing: its ids follow from the context. What it is strict about: unknown arguments, the life of KV that is
handed over, cumulative outputs, what an abort does and does not do. It proves nothing about the real package.
"""
