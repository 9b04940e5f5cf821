# Kernels here talk to this machine only and are interrupted when their notebook ends; they need
# not report it.
c.IPKernelApp.log_level = 50  # noqa: F821
