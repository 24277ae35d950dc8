"""KServe's inference protocol, version 2, on the router's own port: for Triton's clients.

service.py   GRPCInferenceService, on the same pipeline as InferenceService; inputs and outputs of a model; embeddings
tensors.py   requests from tensors and parameters, responses as tensors
"""
