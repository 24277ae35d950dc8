"""Code that runs inside vLLM's worker processes; it imports nothing else of Baton.

worker.py         releases held blocks early, says which are held, and keeps NIXL's thread from spinning
"""
