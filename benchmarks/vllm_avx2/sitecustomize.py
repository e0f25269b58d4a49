"""On the path of vLLM's processes where `benchmarks.peers --isa avx2` holds it to AVX2: Python reads this file at its
start. vLLM asks torch what the processor can before it takes one of its compiled libraries, `_C_AVX2` among them, and
has no switch for it; torch's and oneDNN's own kernels have (`ATEN_CPU_CAPABILITY`, `ONEDNN_MAX_CPU_ISA`)."""

import torch.cpu

_held = {name: value for name, value in torch.cpu.get_capabilities().items() if not name.startswith(("avx512", "amx"))}
torch.cpu.get_capabilities = lambda: _held
