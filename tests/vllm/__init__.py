import os

from millrace.config.serving_checks import HOST_PID

# vLLM's workers import `millrace.serving.vllm.worker`, and tests that plant faults in them do so too.
os.environ.setdefault(HOST_PID, str(os.getpid()))
