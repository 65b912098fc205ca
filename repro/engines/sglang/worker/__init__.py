"""What runs in the worker process, maybe by another environment's interpreter (Python 3.10 or newer).

Self-contained: the standard library, torch, and one another by relative imports. Loaded as ``moepad_worker``.
"""
