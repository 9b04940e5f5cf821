"""Adapters: tokens of other engines for the audit, without torch or transformers in the engine's environment.

An adapter is a module with one function:

    generate(models, requests, settings)   yields the token ids that continue each prompt, in order

and imports its engine inside that function, so that importing the adapter needs nothing but Python.

    adapter         the interface `Adapter`, and `Models`; `Settings` and `Request` are those of `specnb_audit.cli`
    gguf            a Llama model as a GGUF file
    openvino, llama_cpp, mlx_lm, onnxruntime, transformers, vllm    one engine each
    vllm_mended     vLLM's build for CPUs without its known error

    python -m studies.engines.adapters openvino --target TARGET --draft DRAFT --prompts prompts.jsonl --out tokens.jsonl

>>> from specnb_audit.cli.settings import Settings
>>> Settings(temperature=0.7, top_k=40).speculation
'none'
"""
