"""Operations of operators on workers.

workers.py  WorkerOperations: moves a worker's decodes, drains it, changes its role
loras.py    LoraOperations: loads and unloads adapters, on all workers
"""
