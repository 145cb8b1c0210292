"""Untrusted input is worked on in processes of their own, within limits of time and memory.

Templates, tokenizers and data files are programs in disguise: libraries in C and Rust run them, so nothing in Python
can count or stop what they do. A worker process can be stopped. `call` runs a function in the worker of this process;
`Kept` is an object that lives in workers; `WorkerStopped` says which limit an item met. The process that has the model
never renders, tokenizes or decodes anything itself.
"""

from lorawgpu.guard.kept import Kept, loading
from lorawgpu.guard.memory import allow_work
from lorawgpu.guard.status import doing
from lorawgpu.guard.worker import Worker, WorkerStopped, call, shared_worker

__all__ = ["Kept", "WorkerStopped", "allow_work", "Worker", "call", "doing", "loading", "shared_worker"]
