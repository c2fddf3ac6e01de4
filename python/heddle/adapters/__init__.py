"""Heddle under the names of other systems (docs/adapters.md): a user of those changes an import.

heddle.adapters.deepep: DeepEP's Buffer and ElasticBuffer. heddle.adapters.sglang: a token dispatcher and a fused function for
SGLang. heddle.adapters.vllm: prepare, finalize and experts of vLLM's modular kernel. heddle.adapters.deepgemm: grouped products
and mega MoE. They stand on heddle.Exchange, heddle.Experts and heddle.MoeLayer, on the host engine, and take NumPy arrays and
torch's CPU tensors."""
