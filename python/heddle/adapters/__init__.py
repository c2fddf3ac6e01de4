"""Heddle under the names of other systems (docs/adapters.md): a user of those changes an import.

heddle.adapters.deepep: DeepEP's Buffer and ElasticBuffer. heddle.adapters.sglang: a token dispatcher and a fused function for
SGLang. They stand on heddle.Exchange and heddle.MoeLayer, on the host engine, and take NumPy arrays and torch's CPU tensors."""
